"""Two gloo processes, started once, that check every method of a run that talks to the other ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

WORKER = """
import json, sys, time
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime.run import command, start_run

folder = Path(sys.argv[1])
result = {}


def outcome(done, write):
    try:
        run.write_once(done, write)
    except (RuntimeError, OSError, UserError) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def say(error):
    def write():
        raise error
    return write


def write_cache():
    time.sleep(0.2)
    (folder / "cache").write_text(str(run.rank))
    result["wrote"] = True


def write_own():
    (folder / f"disk_{run.rank}").write_text("x")


def write_on_node():
    (folder / f"node_{run.rank}").write_text("x")


def main(argv):
    global run
    run = start_run(seed=11, deepspeed=True)
    result["ranks"] = [run.rank, run.local_rank, run.world_size, run.is_main]
    result["init"] = torch.rand(1).item()
    share = torch.tensor([1.0 + run.rank, 10.0], dtype=torch.float64)
    result["sum"] = run.sum(share).tolist()
    result["unchanged"] = share.tolist()
    result["max"] = run.max(share).tolist()
    result["all_true"] = [run.all_true(True), run.all_true(run.is_main), run.all_true(False)]
    result["gather"] = run.gather({"rank": run.rank})
    cache = folder / "cache"
    result["written"] = outcome(cache.exists, write_cache)
    result["cache"] = cache.read_text()
    own = folder / f"disk_{run.rank}"
    result["other_disk_unwritten"] = outcome(own.exists, write_own)
    node_of_its_own = replace(run, local_rank=0)
    node_of_its_own.write_once((folder / f"node_{run.rank}").exists, write_on_node)
    result["disk_full"] = outcome(lambda: False, say(OSError("the disk is full")))
    result["user_error"] = outcome(lambda: False, say(UserError("no column answer in a.json")))
    run.barrier()
    run.print("printed once")
    (folder / f"result_{run.rank}.json").write_text(json.dumps(result))
    raise UserError("both stop")


code = command(main)()
assert not dist.is_initialized()
raise SystemExit(code)
"""


def start_two(script: Path, folder: Path) -> list[tuple[int, str, str]]:
    """Run the script as rank 0 and 1 of one machine; (exit code, stdout, stderr) of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    return [(worker.returncode, *output) for worker, output in zip(workers, outputs, strict=True)]


def test_D01_P20_two_ranks_agree_and_fail_together(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    ends = start_two(script, tmp_path)
    assert [end[0] for end in ends] == [2, 2], ends
    main, other = (json.loads((tmp_path / f"result_{rank}.json").read_text()) for rank in range(2))

    assert (main["ranks"], other["ranks"]) == ([0, 0, 2, True], [1, 1, 2, False])
    assert main["init"] == other["init"], "models would start differently"
    assert (main["unchanged"], other["unchanged"]) == ([1.0, 10.0], [2.0, 10.0])
    for result in (main, other):
        assert result["sum"] == [3.0, 20.0]
        assert result["max"] == [2.0, 10.0]
        assert result["all_true"] == [True, False, False]
        assert result["gather"] == [{"rank": 0}, {"rank": 1}]
        assert result["written"] == ["", ""]
        assert result["cache"] == "0"
    assert "wrote" in main and "wrote" not in other

    # D-01: nodes that do not share a disk each have a writer.
    assert (tmp_path / "node_0").exists() and (tmp_path / "node_1").exists()
    # D-01: a writer that fails stops every rank with its reason, not with a missing file later.
    assert main["disk_full"] == ["OSError", "the disk is full"]
    assert other["disk_full"] == ["RuntimeError", "rank 0 failed: OSError: the disk is full"]
    assert main["user_error"] == other["user_error"] == ["UserError", "no column answer in a.json"]
    missing = "written without an error, but not to be seen on rank [1]: check the file system"
    assert main["other_disk_unwritten"] == other["other_disk_unwritten"] == ["RuntimeError", missing]

    assert [end[1].count("printed once") for end in ends] == [1, 0]
    assert "error: both stop\n" in ends[0][2] and "[rank" not in ends[0][2]
    assert "[rank 1] error: both stop\n" in ends[1][2]

"""One process or two, the plain engine or DeepSpeed at every ZeRO stage: the same weights and the same log.

Two launches serve all rows: one of two processes, one of a single one. Each runs the cases that were asked for.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equivalence.comparison import assert_equal_runs, outcome
from tests.equivalence.runs import Runs
from tests.equivalence.worker import Case, cases

pytestmark = pytest.mark.launcher
pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[2]
CASES = [pytest.param(case, id=name, marks=[pytest.mark.slow] * case.slow) for name, case in cases().items()]


def launch(folder: Path, processes: int, names: list[str]) -> None:
    """Start the ranks and wait; where one fails or hangs, the end of what each has printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.equivalence.worker", str(folder), *names]
    logs = [folder / f"rank{rank}of{processes}.log" for rank in range(processes)]
    ranks = []
    for rank, log in enumerate(logs):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(log, "wb") as output:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=600) for process in ranks]
    except subprocess.TimeoutExpired:
        codes = ["hangs"]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * processes, f"{codes}\n" + "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)


@pytest.fixture(scope="module")
def launched(runs: Runs, request):
    """Runs all the cases that this session is going to ask for, and those of one number of processes together."""
    asked = [
        item.callspec.params["case"]
        for item in request.session.items
        if "launched" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("skip")
    ]
    done: set[int] = set()

    def ensure(processes: int) -> None:
        if processes not in done:
            done.add(processes)
            mine = [case for case in asked if case.processes == processes]
            for kind in {case.kind for case in mine}:
                runs.world(kind)
            launch(runs.folder, processes, [case.name for case in mine])

    return ensure


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_and_the_plain_engine(runs: Runs, launched, case: Case):
    launched(case.processes)
    reference = runs.run(case.step, case.kind, **case.given)
    found = outcome(runs.folder / case.kind / "ranks" / case.name)
    assert_equal_runs(f"{case.name} and the plain engine", reference, found)

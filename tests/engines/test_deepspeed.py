"""DeepSpeed gives the plain engine's numbers, at every stage, on one and on two ranks; one start for all cases."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.deepspeed_worker import STAGES, cases

pytestmark = pytest.mark.launcher
pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[2]


def run_ranks(results: Path, size: int) -> dict[str, list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)}
    if size > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.engines.deepspeed_worker", str(results), "1" if size == 1 else "0"]
    ranks = []
    for rank in range(size):
        own = {"RANK": str(rank)} | ({"LOCAL_RANK": str(rank)} if size > 1 else {})
        with open(results.with_suffix(f".{rank}.log"), "wb") as log:
            ranks.append(
                subprocess.Popen(command, cwd=ROOT, env=environment | own, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=600) for process in ranks]
    except subprocess.TimeoutExpired:
        codes = ["hangs"]
    finally:
        for process in ranks:
            process.kill()
    logs = "\n".join(results.with_suffix(f".{rank}.log").read_text(errors="replace")[-3000:] for rank in range(size))
    assert codes == [0] * size, f"{codes}\n{logs}"
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[str]]:
    return run_ranks(tmp_path_factory.mktemp("ranks") / "two.json", 2)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> dict[str, list[str]]:
    return run_ranks(tmp_path_factory.mktemp("ranks") / "one.json", 1)


@pytest.mark.parametrize("case", cases())
def test_two_ranks(two_ranks, case: str) -> None:
    assert two_ranks[case] == []


@pytest.mark.parametrize("case", [f"same_numbers-stage{s}" + ("_offload" if o else "") for s, o in STAGES])
def test_one_rank_without_a_launcher(one_rank, case: str) -> None:
    assert one_rank[case] == []

"""DeepSpeed gives the plain engine's numbers, at every stage, on one and on two ranks; one start for all cases."""

import json
from pathlib import Path

import pytest

from tests.engines.deepspeed_worker import STAGES, cases
from tests.processes import launch

pytestmark = pytest.mark.launcher
pytest.importorskip("deepspeed")


def run_ranks(folder: Path, size: int) -> dict[str, list[str]]:
    launch("tests.engines.deepspeed_worker", folder, size, ["1" if size == 1 else "0"])
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[str]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> dict[str, list[str]]:
    return run_ranks(tmp_path_factory.mktemp("ranks"), 1)


@pytest.mark.parametrize("case", cases())
def test_two_ranks(two_ranks, case: str) -> None:
    assert two_ranks[case] == []


@pytest.mark.parametrize("case", [f"same_numbers-stage{s}" + ("_offload" if o else "") for s, o in STAGES])
def test_one_rank_without_a_launcher(one_rank, case: str) -> None:
    assert one_rank[case] == []

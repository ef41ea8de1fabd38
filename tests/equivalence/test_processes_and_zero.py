"""One process or two, the plain engine or DeepSpeed at every ZeRO stage: the same weights and the same log.

Two launches serve all rows: one of two processes, one of a single one. Each runs the cases that were asked for.
"""

import pytest

from tests.equivalence.comparison import assert_equal_runs, outcome
from tests.equivalence.runs import Runs
from tests.equivalence.worker import Case, cases
from tests.processes import launch

pytestmark = pytest.mark.launcher
pytest.importorskip("deepspeed")
CASES = [pytest.param(case, id=name, marks=[pytest.mark.slow] * case.slow) for name, case in cases().items()]


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
            launch("tests.equivalence.worker", runs.folder, processes, [case.name for case in mine])

    return ensure


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_and_the_plain_engine(runs: Runs, launched, case: Case):
    launched(case.processes)
    reference = runs.run(case.step, case.kind, **case.given)
    found = outcome(runs.folder / case.kind / "ranks" / case.name)
    assert_equal_runs(f"{case.name} and the plain engine", reference, found)

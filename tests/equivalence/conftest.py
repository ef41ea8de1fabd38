"""One collection of runs for the whole folder."""

import pytest

from tests.equivalence.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("equivalence"))

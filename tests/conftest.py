"""Fixtures of every test: no network, no device, one thread, a private cache."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from more, and the tests run side by side

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _same_start(tmp_path, monkeypatch):
    """Every test starts from one random state, in its own folder, with no rank variables of a launcher."""
    torch.manual_seed(0)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the slow proofs (tests marked slow)")


def pytest_collection_modifyitems(config, items):
    # Files that start real launchers take longest: they come first, or one process would be left with them at the end.
    slowest = {item.path for item in items if item.get_closest_marker("launcher")}
    items.sort(key=lambda item: item.path not in slowest)
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="a slow proof; sh run.sh test --slow runs it")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)

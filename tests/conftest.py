"""Fixtures of every test: no network, no device, one thread, a private cache."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _same_start(tmp_path, monkeypatch):
    """Every test starts from one random state, in its own folder, with no rank variables of a launcher."""
    torch.manual_seed(0)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))

"""Reading raw data in a test: with a cache of its own, and without a network."""

import socket

import pytest

from alpaca_rlhf.deepspeed_chat.training.utils.data import raw_datasets
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from tests.tiny import word_tokenizer


@pytest.fixture
def encoder() -> TextEncoder:
    """One word, one token."""
    return TextEncoder(word_tokenizer())


@pytest.fixture
def read(tmp_path):
    def read(path, needs_rejected=False, **options):
        return raw_datasets.load_raw_dataset(
            str(path), cache_dir=str(tmp_path / "cache"), needs_rejected=needs_rejected, **options
        )

    return read


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(raw_datasets, "read_hub", refuse)

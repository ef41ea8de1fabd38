"""The project's own data: unpacked into the cache when needed, never into the source tree; its archive is named."""

import os
import zipfile
from pathlib import Path

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import MultiTurnAlpacaDataset
from tests.deepspeed_chat.data.raw_files import lines, write

REPO = Path(__file__).resolve().parents[3]


def archive(folder: Path, train, test) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "data.zip", "w") as content:
        content.writestr("training_data.txt.train", lines(train))
        content.writestr("inner/training_data.txt.test", lines(test))
    return folder


DIALOGUE = [
    {"instruction": " Human: a Assistant:", "input": "", "output": "1"},
    {"instruction": " Human: a Assistant: 1 Human: b Assistant:", "input": "", "output": "2"},
    {
        "instruction": " Human: a Assistant: 1 Human: b Assistant: 2 Human: c Assistant:",
        "input": "",
        "output": "3",
    },
]


def use_data_dir(monkeypatch, folder: Path) -> None:
    original = MultiTurnAlpacaDataset.__init__
    monkeypatch.setattr(MultiTurnAlpacaDataset, "__init__", lambda self, cache: original(self, cache, folder))


def test_B07_multi_turn_alpaca_is_unpacked_into_the_cache(tmp_path, read, no_network, monkeypatch):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE[:1])
    use_data_dir(monkeypatch, folder)
    data = read("MultiTurnAlpaca", needs_answer=True)
    assert [(len(row.prompt), row.chosen) for row in data.train] == [(1, "1"), (3, "2"), (5, "3")]
    assert len(data.test) == 1
    assert [file.name for file in folder.iterdir()] == ["data.zip"]
    unpacked = sorted((tmp_path / "cache").rglob("*.*"))
    assert [file.name for file in unpacked if file.is_file()] == [
        "training_data.txt.test",
        "training_data.txt.train",
    ]
    with pytest.raises(UserError, match="MultiTurnAlpaca has no `rejected`"):
        read("MultiTurnAlpaca", needs_rejected=True)


def test_multi_turn_alpaca_is_unpacked_only_when_needed(tmp_path):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE)
    train, _ = MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()
    os.utime(train, (1, 1))
    assert MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()[0].stat().st_mtime == 1
    train.write_text("cut off")
    assert MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()[0].read_text() == lines(DIALOGUE)
    archive(folder, DIALOGUE[:1], DIALOGUE)
    assert MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()[0].read_text() == lines(
        DIALOGUE[:1]
    )


def test_multi_turn_alpaca_unpacked_by_the_user_is_read_with_a_note(tmp_path, read, monkeypatch):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE)
    write(folder, DIALOGUE[:2], "training_data.txt.train")
    write(folder, DIALOGUE[:1], "training_data.txt.test")
    use_data_dir(monkeypatch, folder)
    data = read("MultiTurnAlpaca")
    assert (len(data.train), len(data.test)) == (2, 1)
    assert "unpacked files" in data.notes[0]
    assert not (tmp_path / "cache").exists()


def test_B36_missing_or_broken_archive_is_named(tmp_path):
    with pytest.raises(UserError, match=r"MultiTurnAlpaca is kept in .*data\.zip, which is missing"):
        MultiTurnAlpacaDataset(str(tmp_path), tmp_path).read()
    (tmp_path / "data.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match=r"data\.zip is not a whole zip archive"):
        MultiTurnAlpacaDataset(str(tmp_path), tmp_path).read()
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as content:
        content.writestr("other.txt", "x")
    with pytest.raises(UserError, match=r"data\.zip holds no file training_data\.txt\.train"):
        MultiTurnAlpacaDataset(str(tmp_path), tmp_path).read()


def test_cache_that_cannot_be_written_is_named(tmp_path):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be unpacked into .*file"):
        MultiTurnAlpacaDataset(str(tmp_path / "file"), folder).unpack()


def test_the_projects_own_data(read, no_network):
    if not (REPO / "data" / "data.zip").is_file():
        pytest.skip("the demo data has not been generated")
    sft, pairs = read("MultiTurnAlpaca"), read(REPO / "data" / "preferences", needs_rejected=True)
    assert sft.skipped == pairs.skipped == {}
    assert min(len(sft.train), len(pairs.train)) >= 1500
    assert sft.test and pairs.test
    assert any(len(row.prompt) > 1 for row in sft.train)
    assert all("Assistant:" not in turn.text for row in sft.train for turn in row.prompt)

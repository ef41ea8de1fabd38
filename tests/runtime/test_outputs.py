"""Output directories: refused before work, replaced whole or not at all, and what is not ours stays."""

import json
import os
from datetime import datetime, timezone

import pytest
from safetensors import SafetensorError

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime import outputs
from alpaca_rlhf.runtime.outputs import prepare_output_dir, save_arguments, write_output


def content(directory):
    """Every visible file below a directory with its text."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".output_files.json"
    }


def writer(files):
    def write(folder):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return write


def test_a_new_directory_is_made_and_left_empty(tmp_path):
    directory = tmp_path / "a" / "b"
    prepare_output_dir(str(directory))
    assert directory == tmp_path / "a" / "b"
    assert list(directory.iterdir()) == []


def test_a_path_that_cannot_be_an_output_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match=f"the output directory {file} is a file"):
        prepare_output_dir(file)
    with pytest.raises(UserError, match="file/below cannot be written .Not a directory"):
        prepare_output_dir(file / "below")
    assert file.read_text() == "mine"


def test_a_directory_that_exists_but_takes_no_file_is_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(outputs.tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be written .Permission denied."):
        prepare_output_dir(tmp_path)


def test_an_output_replaces_the_previous_one_and_keeps_what_is_not_ours(tmp_path):
    out = tmp_path / "out"
    write_output(out, writer({"config.json": "1", "model-00001.safetensors": "old", "adapter/w": "old", "plan/x": "1"}))
    (out / "metrics.jsonl").write_text("log")
    (out / "actor").mkdir()
    (out / "actor" / "mine").write_text("also mine")
    write_output(out, writer({"config.json": "2", "model.safetensors": "new", "adapter/v": "new", "plan": "a file"}))
    assert content(out) == {
        "actor/mine": "also mine",
        "adapter/v": "new",
        "config.json": "2",
        "metrics.jsonl": "log",
        "model.safetensors": "new",
        "plan": "a file",
    }


def test_a_log_that_is_open_during_the_swap_goes_on(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as log:
        log.write("1\n")
        write_output(tmp_path, writer({"model": "m"}))
        log.write("2\n")
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n"


FULL = SafetensorError("Error while serializing: No space left on device")


@pytest.mark.parametrize(
    ("error", "seen"),
    [(OSError(28, "disk full"), UserError), (FULL, UserError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failing_write_leaves_the_old_output_and_nothing_else(tmp_path, error, seen):
    out = tmp_path / "out"
    write_output(out, writer({"model": "old"}))
    before = sorted(path.name for path in out.iterdir())

    def write(folder):
        (folder / "model").write_text("half")
        raise error

    with pytest.raises(seen):
        write_output(out, write)
    assert content(out) == {"model": "old"}
    assert sorted(path.name for path in out.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("survived", range(5))
def test_a_process_that_dies_while_moving_is_finished_by_the_next(tmp_path, monkeypatch, survived):
    out = tmp_path / "out"
    write_output(out, writer({"a": "old", "b": "old", "stale": "old"}))
    real, moves = os.replace, []

    def dying(source, target):
        if len(moves) == survived:
            raise SystemError("killed")
        moves.append(target)
        real(source, target)

    monkeypatch.setattr(outputs.os, "replace", dying)
    new = {"a": "new", "b": "new", "c": "new"}
    if survived < 4:
        with pytest.raises(SystemError):
            write_output(out, writer(new))
    else:
        write_output(out, writer(new))
    monkeypatch.undo()
    prepare_output_dir(out)
    assert content(out) == new
    assert sorted(path.name for path in out.iterdir()) == [".output_files.json", "a", "b", "c"]


def test_remains_of_a_killed_writer_are_never_part_of_an_output(tmp_path):
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / "half").write_text("x")
    write_output(tmp_path, writer({"model": "new"}))
    assert content(tmp_path) == {"model": "new"}


def test_arguments_are_saved_as_json(tmp_path):
    values = {"data": {"paths": ["a b"], "split": [2, 4, 4]}, "tokenizer_path": None, "seed": 1}
    before = datetime.now(timezone.utc).replace(microsecond=0)
    assert save_arguments(tmp_path, values) == tmp_path / "training_arguments.json"
    saved = json.loads((tmp_path / "training_arguments.json").read_text())
    assert before <= datetime.fromisoformat(saved["finished"]) <= datetime.now(timezone.utc)
    assert saved == {**values, "finished": saved["finished"]}
    with pytest.raises(ValueError):
        save_arguments(tmp_path, {"learning_rate": float("nan")})
    assert json.loads((tmp_path / "training_arguments.json").read_text()) == saved
    assert [path.name for path in tmp_path.iterdir()] == ["training_arguments.json"]


@pytest.mark.parametrize("name", ["hf_token", "api_key", "wandb_api_key", "password"])
def test_M05_a_credential_is_never_saved(tmp_path, name):
    with pytest.raises(AssertionError, match=name):
        save_arguments(tmp_path, {"output": [{name: "x"}]})
    assert list(tmp_path.iterdir()) == []


def test_files_get_the_mode_that_the_umask_asks_for(tmp_path):
    def write(folder):
        (folder / "weights").write_text("w")
        (folder / "weights").chmod(0o600)

    before = os.umask(0o022)
    try:
        write_output(tmp_path, write)
    finally:
        os.umask(before)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o644

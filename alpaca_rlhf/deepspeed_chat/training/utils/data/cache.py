"""Encoded data sets on disk: Arrow files of ``datasets`` and one JSON file, no pickle (fault C-07).

The folder's name is a digest of everything that decides its content, so that an edited data file or another setting
never meets old tokens (D-02). It is written beside its place and renamed, so that it is whole wherever it exists
(D-01).
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets

from alpaca_rlhf.arguments.errors import UserError

FORMAT_VERSION = 1  # raise it when the stored items or the rules that make them change
_IDS = datasets.Sequence(datasets.Value("int32"))
_FEATURES = {
    1: {"input_ids": _IDS, "trained": datasets.Sequence(datasets.Value("int8")), "record": datasets.Value("string")},
    2: {
        "chosen_ids": _IDS,
        "rejected_ids": _IDS,
        "prompt_length": datasets.Value("int32"),
        "margin": datasets.Value("float32"),
        "record": datasets.Value("string"),
    },
    3: {"prompt_ids": _IDS, "record": datasets.Value("string")},
}


def cache_folder(cache_dir: str, key: dict) -> Path:
    """The folder that belongs to ``key`` (JSON-able: every setting and digest that decides the content).

    Makes ``cache_dir``. Raises UserError if it cannot be made or written.
    """
    root = Path(cache_dir).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the cache folder {cache_dir} cannot be made ({error.strerror}): choose another.") from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"the cache folder {cache_dir} cannot be written: choose another.")
    text = json.dumps({**key, "format": FORMAT_VERSION}, sort_keys=True)
    return root / f"tokens-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def is_complete(folder: Path) -> bool:
    """Whether the folder holds what write_cache wrote."""
    return (folder / "report.json").is_file()


def write_cache(folder: Path, step: int, train: list[dict], evaluation: list[dict], report: dict) -> None:
    """Write both parts' items and the report, under a temporary name first."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        with _no_progress_bars():
            for part, items in (("train", train), ("eval", evaluation)):
                if items:  # datasets cannot load a set without rows again
                    _rows(step, items).save_to_disk(str(temporary / part))
        (temporary / "report.json").write_text(json.dumps(report, ensure_ascii=False, indent=1), encoding="utf-8")
        if folder.exists() and not is_complete(folder):
            shutil.rmtree(folder)  # damaged: this program's renames leave no such thing
        try:
            os.rename(temporary, folder)
        except OSError:
            if not is_complete(folder):  # else another run has just written the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_cache(folder: Path, step: int) -> tuple[datasets.Dataset, datasets.Dataset, dict]:
    """Train items, evaluation items and the report that write_cache wrote; the items stay on disk, mapped."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    train, evaluation = (
        datasets.Dataset.load_from_disk(str(folder / part)) if (folder / part).is_dir() else _rows(step, [])
        for part in ("train", "eval")
    )
    return train, evaluation, report


def _rows(step: int, items: list[dict]) -> datasets.Dataset:
    features = datasets.Features(_FEATURES[step])
    return datasets.Dataset.from_dict({name: [item[name] for item in items] for name in features}, features=features)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Two short bars per run would only disturb the run's own."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()

"""Where tables come from besides a single file: folders, folders saved by ``datasets``, the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.readers import (
    FORMATS,
    Table,
    is_data_name,
    read_table,
    table_from_arrow,
)


@dataclass(frozen=True)
class Source:
    """The tables of one data set before any row is looked at; ``notes`` say what was chosen."""

    train: list[Table]
    test: list[Table]
    notes: tuple[str, ...] = ()


# The parts that may serve for evaluation: the first of these that a source has is used.
_EVALUATION_PARTS = ("test", "eval", "evaluation", "validation", "valid", "val", "dev")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PATH_ENDINGS = (".txt", ".tsv", ".zip", ".gz", ".arrow")
_METADATA_FILES = frozenset({"dataset_info.json", "dataset_infos.json"})


def looks_like_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path: no hub name, a file's ending, or a real parent."""
    parent = Path(name).parent
    return (
        _HUB_NAME.fullmatch(name) is None
        or is_data_name(name)
        or name.lower().endswith(_PATH_ENDINGS)
        or (parent != Path(".") and parent.is_dir())
    )


def read_folder(folder: Path) -> Source:
    """Train and test files by a word of their names (several shards each), or one data file alone as train."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _read_saved(folder)
    files = _data_files(folder)
    if not files and (folder / "data").is_dir():  # a copy of a hub repository keeps its parquet files there
        files = _data_files(folder / "data")
    if not files:
        raise UserError(f"the folder {folder} holds no data files; give train and test files in {FORMATS}")
    if len(files) == 1:
        return Source([read_table(files[0])], [])
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(_part_of(file.name), []).append(file)
    unnamed = parts.pop("", [])
    if "train" not in parts and len(unnamed) == 1:
        parts["train"] = [unnamed.pop()]
    if "train" not in parts:
        names = ", ".join(file.name for file in files)
        raise UserError(
            f"the folder {folder} has no train file among {names}; put `train` into the name of one"
        )
    test = _evaluation_part(parts)
    left = [name for part in parts if part not in ("train", test) for name in parts[part]] + unnamed
    notes = (f"not read: {', '.join(file.name for file in left)}",) if left else ()
    test_files = parts[test] if test else []
    return Source(
        [read_table(file) for file in parts["train"]], [read_table(file) for file in test_files], notes
    )


def read_hub(name: str, data_dir: str, config: str | None = None) -> Source:
    """Ask the hub through ``datasets`` (or its cache, offline); ``data_dir`` is a subfolder of the repository or ""."""
    import datasets

    try:
        loaded = datasets.load_dataset(name, config, data_dir=data_dir or None)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"{name} is no file or folder here and could not be loaded from the Hugging Face hub ({reason}); "
            "check the name and the connection, or give a local file"
        ) from error
    return _source_of_splits(f"{name}@{data_dir}" if data_dir else name, loaded)


def _read_saved(folder: Path) -> Source:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} looks like a saved data set but cannot be read: {error}") from error
    return _source_of_splits(str(folder), loaded)


def _source_of_splits(name: str, loaded: Any) -> Source:
    """``loaded``: a datasets.Dataset, or a datasets.DatasetDict of splits."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits and len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    if "train" not in splits:
        raise UserError(f"{name} has no split named train (splits: {', '.join(splits)})")
    test = _evaluation_part(splits)
    left = [split for split in splits if split not in ("train", test)]
    notes = (f"not read: split {', '.join(left)}",) if left else ()

    def table(split: str) -> Table:
        return table_from_arrow(split, splits[split].with_format("arrow")[:])

    return Source([table("train")], [table(test)] if test else [], notes)


def _evaluation_part(parts: Collection[str]) -> str | None:
    return next((part for part in _EVALUATION_PARTS if part in parts), None)


def _data_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and is_data_name(file.name)
        and file.name not in _METADATA_FILES
    )


def _part_of(file_name: str) -> str:
    """ "train", an evaluation part or "": the last such word, as in ``training_data.txt.test``."""
    words = re.split(r"[^a-z]+", file_name.lower())
    named = [word for word in words if word == "train" or word in _EVALUATION_PARTS]
    if named:
        return named[-1]
    return "train" if "training" in words else ""

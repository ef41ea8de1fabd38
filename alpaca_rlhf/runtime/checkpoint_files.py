"""Checkpoints on disk: OUTPUT/checkpoints/step-00000012, whole or not there at all, and recognised when damaged.

A checkpoint is written under a name that begins with ``.writing-``; its manifest (``checkpoint.json``: size and CRC-32
of every file) comes last, everything is brought to the disk, and one rename makes it valid. What dies on the way is
swept away by the next one.
"""

import json
import os
import re
import shutil
import zlib
from itertools import count
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"
MANIFEST = "checkpoint.json"
FORMAT = 1  # raise it when what is stored, or its meaning, changes
_NAME = re.compile(r"step-(\d{8})$")
_WRITING = ".writing-"


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` optimizer steps belongs."""
    return output_dir / FOLDER / f"step-{step:08d}"


def begin(folder: Path) -> Path:
    """An empty folder beside ``folder`` to write into; what earlier attempts left is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f"{_WRITING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    writing = writing_folder(folder)
    writing.mkdir()
    return writing


def writing_folder(folder: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return folder.with_name(_WRITING + folder.name)


def complete(folder: Path, record: dict[str, Any]) -> None:
    """Seal what was written for ``folder``, with ``record`` (JSON-able) in its manifest, and give it its name."""
    writing, files = writing_folder(folder), {}
    for path in sorted(writing.iterdir()):
        files[path.name] = _size_and_crc(path)
        _to_disk(path)
    manifest = writing / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, **record, "files": files}, indent=1) + "\n", encoding="utf-8")
    _to_disk(manifest)
    if folder.exists():  # the same step of a run that was resumed from an earlier checkpoint
        shutil.rmtree(folder)
    writing.rename(folder)
    _to_disk(folder.parent)


def abandon(folder: Path) -> None:
    """Remove what :func:`begin` made for ``folder``."""
    shutil.rmtree(writing_folder(folder), ignore_errors=True)


def set_aside(output_dir: Path, newer_than: int) -> list[Path]:
    """Rename checkpoints of later steps than that, and return their new places: those of the run as it went before it
    was resumed from earlier on, or damaged ones. They are kept, but neither found nor counted any more."""
    moved = []
    for path in checkpoints(output_dir):
        if int(path.name.removeprefix("step-")) > newer_than:
            places = (path.with_name(f"set-aside-{number}-{path.name}") for number in count(1))
            moved.append(path.rename(next(place for place in places if not place.exists())))
    return moved


def forget_old(output_dir: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints; 0 keeps all."""
    for old in checkpoints(output_dir)[keep:] if keep else ():
        shutil.rmtree(old, ignore_errors=True)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of an output directory, the newest first; of a checkpoint, itself."""
    if _NAME.match(directory.name) or (directory / MANIFEST).exists():
        return [directory]
    found = directory if directory.name == FOLDER else directory / FOLDER
    return sorted((path for path in found.glob("step-*") if _NAME.match(path.name)), reverse=True)


def half_written(directory: Path) -> list[Path]:
    """What a process that died while it wrote a checkpoint has left in an output directory."""
    return sorted((directory / FOLDER).glob(f"{_WRITING}*"))


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """The manifest of a checkpoint whose files are all as they were written, or what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"is of format {manifest['format']}, this program reads {FORMAT}"
        for name, (size, crc) in manifest["files"].items():
            if not (folder / name).is_file():
                return f"lacks its file {name}"
            found = (folder / name).stat().st_size
            if found != size:
                return f"is damaged: {name} has {found} bytes of {size}"
            if _size_and_crc(folder / name)[1] != crc:
                return f"is damaged: the content of {name} has changed"
    except FileNotFoundError:
        return f"is incomplete: it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"is damaged: its {MANIFEST} cannot be read ({type(error).__name__})"
    return manifest


def _size_and_crc(path: Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk: a power cut must not undo the rename's order."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

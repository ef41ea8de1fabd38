"""Rows of any source become conversations: prompt turns, a chosen answer and, in preference data, a rejected one.

A source is, in this order: what exists on disk (a file, a folder of files, a folder of ``datasets.save_to_disk``), the
project's own ``MultiTurnAlpaca``, a name on the Hugging Face hub. Only the last uses the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.layouts import (
    KNOWN_LAYOUTS,
    Conversation,
    Layout,
    Skipped,
    convert_rows,
    recognise_layout,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.readers import Table, read_table
from alpaca_rlhf.deepspeed_chat.training.utils.data.sources import (
    Source,
    looks_like_path,
    read_folder,
    read_hub,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.transcripts import Turn, parse_transcript

__all__ = [
    "Conversation",
    "MultiTurnAlpacaDataset",
    "RawDataset",
    "Turn",
    "load_raw_dataset",
    "parse_transcript",
]


@dataclass(frozen=True)
class RawDataset:
    """A data set as read: ``test`` is None where the source has no usable part for evaluation."""

    name: str
    train: list[Conversation]
    test: list[Conversation] | None
    skipped: dict[str, int]  # reason -> number of rows, over both parts
    digest: str  # of everything in the conversations, so of every character that can become a token
    examples: dict[str, str] = field(default_factory=dict)  # reason -> record of the first row skipped for it
    notes: tuple[str, ...] = ()  # sentences for the user on what was chosen in reading
    further: int = 0  # of the usable and skipped ones, how many share their row with another

    def describe(self) -> list[str]:
        """The lines to print: rows read and used, each reason for skipping with its first record, notes."""
        usable = len(self.train) + len(self.test or [])
        skipped = sum(self.skipped.values())
        test = "no test part" if self.test is None else f"{len(self.test)} test"
        used = f"usable {len(self.train)} train, {test}"
        rows = usable + skipped - self.further
        lines = [f"{self.name}: {rows} rows read, {used}; {skipped} skipped"]
        if self.further:
            lines.append(f"  {self.further} more pairs than rows: a vote with an answer of its own makes several")
        for reason, count in sorted(self.skipped.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"  skipped {count}: {reason} (first: {self.examples[reason]})")
        return lines + [f"  {note}" for note in self.notes]


def load_raw_dataset(
    path: str, *, cache_dir: str, needs_rejected: bool, needs_answer: bool = False
) -> RawDataset:
    """Read a data set of any source and layout.

    The conversations are the same whichever step asks: the steps' disjoint shares (D-10) depend on it.
    ``needs_rejected`` (step 2) and ``needs_answer`` (step 1) only refuse a data set that lacks that side (D-11).
    ``cache_dir`` is where ``MultiTurnAlpaca`` is unpacked. Rows that cannot be used are counted, never passed on
    (D-04).

    Raises UserError for a path or name that does not exist, a file that cannot be read, columns of no known layout, a
    missing side, or when no row of the train part is usable.
    """
    name = path.strip()
    source = open_source(name, cache_dir)
    skipped = Skipped()
    train = _convert_part(name, source.train, skipped, needs_rejected, needs_answer)
    if not train:
        reasons = [
            f"{reason}: {count}, first {skipped.examples[reason]}" for reason, count in skipped.counts.items()
        ]
        raise UserError(f"no row of {name} can be used ({'; '.join(reasons) or 'it holds no rows'})")
    test: list[Conversation] | None = None
    notes = source.notes
    if source.test:
        test = _convert_part(name, source.test, skipped, needs_rejected, needs_answer) or None
        if test is None:
            notes += ("its test part holds no usable row and is left out",)
    digest = _content_digest(train, test)
    return RawDataset(name, train, test, skipped.counts, digest, skipped.examples, notes, skipped.further)


class MultiTurnAlpacaDataset:
    """The project's own multi-turn instruction data: ``data/data.zip`` with one JSON-lines file for each part.

    Columns ``instruction`` (the whole history, closing with the assistant's marker), ``input`` and ``output``. The
    archive is unpacked into the cache; where a user has unpacked it in the data folder, as alpaca-rlhf asked for,
    those files are read instead.
    """

    name = "MultiTurnAlpaca"
    train_file = "training_data.txt.train"
    test_file = "training_data.txt.test"

    def __init__(self, cache_dir: str, data_dir: Path | None = None) -> None:
        """``data_dir`` defaults to the folder ``data`` beside the package."""
        self.cache_dir = Path(cache_dir).expanduser()
        self.data_dir = data_dir or Path(__file__).resolve().parents[5] / "data"

    def read(self) -> Source:
        """Both parts; raises UserError naming the archive when neither it nor the unpacked files are there."""
        train, test = self.data_dir / self.train_file, self.data_dir / self.test_file
        if train.is_file() and test.is_file():
            note = f"{self.name}: the unpacked files in {self.data_dir} are read, not data.zip"
            return Source([read_table(train)], [read_table(test)], (note,))
        train, test = self.unpack()
        return Source([read_table(train)], [read_table(test)])

    def unpack(self) -> tuple[Path, Path]:
        """Unpack the archive into the cache, in a folder named after its digest; whole and right files are kept.

        Each file appears by a rename, so several processes may do this at once.
        """
        archive = self.data_dir / "data.zip"
        if not archive.is_file():
            raise UserError(
                f"{self.name} is kept in {archive}, which is missing; restore it, or make it with "
                f"`python -m alpaca_rlhf.demo.world {self.data_dir}`"
            )
        try:
            folder = self.cache_dir / f"{self.name}-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(archive) as content:
                train = _unpack_member(content, self.train_file, folder)
                return train, _unpack_member(content, self.test_file, folder)
        except zipfile.BadZipFile as error:
            raise UserError(f"{archive} is not a whole zip archive: {error}") from error
        except OSError as error:
            raise UserError(f"{archive} cannot be unpacked into {self.cache_dir}: {error}") from error


def _unpack_member(content: zipfile.ZipFile, name: str, folder: Path) -> Path:
    member = next((info for info in content.infolist() if Path(info.filename).name == name), None)
    if member is None:
        raise UserError(f"{content.filename} holds no file {name}")
    target = folder / name
    if target.is_file() and zlib.crc32(target.read_bytes()) == member.CRC:
        return target
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.read(member))
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def open_source(name: str, cache_dir: str, config: str | None = None) -> Source:
    """The tables of a file, a folder, ``MultiTurnAlpaca`` or a hub name (``config``: which of its configurations).

    Decides by existence first (D-08); what looks like a path is never asked for on the hub. Raises UserError when there
    is nothing to read.
    """
    if not name:
        raise UserError("the name of a data set is empty; give a file, a folder or a hub name")
    path = Path(name).expanduser()
    base, _, subfolder = name.partition("@")
    if not path.exists() and subfolder and Path(base).expanduser().is_dir():
        path = Path(base).expanduser() / subfolder
    if path.is_dir():
        return read_folder(path)
    if path.exists():
        return Source([read_table(path)], [])
    if name == MultiTurnAlpacaDataset.name:
        return MultiTurnAlpacaDataset(cache_dir).read()
    if looks_like_path(base if subfolder else name):
        raise UserError(f"there is no file or folder {name}; check the spelling and the current folder")
    return read_hub(base, subfolder, config)


def _convert_part(
    name: str, tables: Sequence[Table], skipped: Skipped, needs_rejected: bool, needs_answer: bool
) -> list[Conversation]:
    """All files of one part in one layout: a column that only some of them have is missing in the others' rows."""
    columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
    if not any(table.rows for table in tables):
        return []
    layout = recognise_layout(columns)
    if layout is None:
        found = ", ".join(map(str, columns)) or "none"
        accepted = "; ".join(KNOWN_LAYOUTS)
        raise UserError(f"{name} has none of the known columns (found: {found}); accepted are: {accepted}")
    _refuse_missing_side(name, columns, layout, needs_rejected, needs_answer)
    return [row for table in tables for row in convert_rows(layout, table.file, table.rows, skipped)]


def _refuse_missing_side(
    name: str, columns: Sequence[str], layout: Layout, needs_rejected: bool, needs_answer: bool
) -> None:
    serves = "steps 1 and 3 (SFT and prompts for PPO)" if layout.has_answer else "step 3 (prompts for PPO)"
    found = ", ".join(map(str, columns))
    if needs_rejected and not layout.has_rejected:
        raise UserError(
            f"{name} has no `rejected` answers (columns: {found}) and can serve only {serves}; "
            "step 2 needs pairs with the columns chosen and rejected"
        )
    if needs_answer and not layout.has_answer:
        raise UserError(
            f"{name} has no answers (columns: {found}) and can serve only {serves}; step 1 needs answers"
        )


def _content_digest(train: list[Conversation], test: list[Conversation] | None) -> str:
    """Of what was read and not of the files' bytes, so that a change in how rows are read changes it as well."""
    digest = hashlib.sha256()
    for part in (train, test):
        digest.update(b"none\n" if part is None else b"part\n")
        for row in part or ():
            fields = (row.record, row.prompt, row.chosen, row.rejected, row.margin)
            digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()

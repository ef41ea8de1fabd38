"""Files become rows: JSON, JSON lines, CSV and parquet, each also gzipped; content decides where it can."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.layouts import KNOWN_COLUMNS

FORMATS = ".json, .jsonl, .ndjson, .csv or .parquet, each also with .gz"
_DATA_NAME = re.compile(r"\.(json|jsonl|ndjson|csv|parquet)(\.gz)?$|\.txt\.\w+$", re.IGNORECASE)
_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Table:
    """The rows of one file with their numbers from 1 (in JSON lines the line number).

    A row should be a dict of columns, but in JSON it may be anything.
    """

    file: str
    columns: tuple[str, ...]
    rows: list[tuple[int, Any]]


def is_data_name(name: str) -> bool:
    """Whether a file or path ends as data files do, in any case."""
    return _DATA_NAME.search(name) is not None


def read_table(path: Path) -> Table:
    """Read one data file; one that cannot be read to its end is a UserError naming it and the place."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if content.startswith(_PARQUET_MAGIC):
        return _read_parquet(path, content)
    name = path.name.lower().removesuffix(".gz")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); give {FORMATS} in UTF-8") from error
    if name.endswith(".parquet"):
        raise UserError(f"{path} is not a parquet file")
    if name.endswith(".csv"):
        return _read_csv(path, text)
    if not is_data_name(name) and text.lstrip()[:1] not in ("{", "["):
        raise UserError(f"{path} is no data file that can be read here; give {FORMATS}")
    return _read_json(path, text)


def table_from_arrow(file: str, table: Any) -> Table:
    """Rows of a pyarrow table.

    All columns are named, but only those of a known layout and of plain text (`text`, else the first column) become
    Python values: others may be wide, like images or embeddings.
    """
    columns = tuple(table.column_names)
    plain_text = "text" if "text" in columns else columns[0] if columns else ""
    wanted = table.select([column for column in columns if column in KNOWN_COLUMNS or column == plain_text])
    rows = wanted.to_pylist() if wanted.num_columns else [{} for _ in range(table.num_rows)]
    return Table(file, columns, list(enumerate(rows, start=1)))


def _read_parquet(path: Path, content: bytes) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(io.BytesIO(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a complete parquet file: {error}") from error
    return table_from_arrow(path.name, table)


def _read_csv(path: Path, text: str) -> Table:
    csv.field_size_limit(2**31 - 1)  # a conversation may be longer than the module's default of 128 KiB
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows: list[Any] = list(reader)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}, is not CSV: {error}") from error
    return Table(path.name, tuple(reader.fieldnames or ()), list(enumerate(rows, start=1)))


def _read_json(path: Path, text: str) -> Table:
    """One array, or one object a line, whichever of the two the file's name promises."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno}, is not JSON: {error.msg}") from error
        rows = list(enumerate(values, start=1))
    else:
        rows = _read_json_lines(path, text)
    columns: dict[str, None] = {}
    for _, row in rows:
        if isinstance(row, dict):
            columns.update(dict.fromkeys(row))
    return Table(path.name, tuple(columns), rows)


def _read_json_lines(path: Path, text: str) -> list[tuple[int, Any]]:
    rows = []
    # Not splitlines(): a JSON string may hold U+2028 and other characters at which that cuts.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            single = None if rows else _single_object(text)
            if single is None:
                raise UserError(f"{path}, line {number}, is not JSON: {error.msg}") from error
            return [(1, single)]
    return rows


def _single_object(text: str) -> dict[str, Any] | None:
    """A file that is one object over several lines."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None

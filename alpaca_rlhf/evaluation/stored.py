"""What has been generated or scored already, so that a program that is started again goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.errors import UserError

FORMAT_VERSION = 1  # raise it when the same settings give other records


class StoredRecords:
    """Records by row in ``folder/<kind>-<digest>.jsonl``, one line each, brought to the disk with every batch.

    The digest is that of everything that decides the records, so other settings never meet old records. A last line
    that a killed process left unfinished is cut off.

    Attributes: ``rows`` (row → record, what is there).
    """

    def __init__(self, folder: Path, kind: str, decisive: Mapping[str, Any]) -> None:
        """``decisive``: JSON-able, names and values of all that decides the records."""
        text = json.dumps({**decisive, "kind": kind, "format": FORMAT_VERSION}, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.path = folder / f"{kind}-{self.digest[:32]}.jsonl"
        self.rows: dict[int, dict] = {}
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            record = json.loads(line)
            self.rows[record.pop("row")] = record

    def missing(self, count: int) -> list[int]:
        """Those of the rows 0 … count - 1 that are not there."""
        return [row for row in range(count) if row not in self.rows]

    def add(self, records: Mapping[int, dict]) -> None:
        """Keep the records of some rows (row → record, JSON-able).

        Raises:
            UserError: the disk does not take them.
        """
        lines = [json.dumps({"row": row, **record}, allow_nan=False) for row, record in records.items()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write("".join(line + "\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); what it holds stays") from error
        self.rows.update(records)

    def ordered(self, count: int) -> list[dict]:
        """The records of the rows 0 … count - 1, which must all be there."""
        return [self.rows[row] for row in range(count)]

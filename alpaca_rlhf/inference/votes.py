"""Votes on two answers, kept in a file of JSON lines that step 2 reads as it is (``--data_path votes.jsonl``)."""

import dataclasses
import fcntl
import json
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference.conversation import History, as_messages, cleaned
from alpaca_rlhf.inference.settings import Settings

VOTES = ("left", "right", "tie", "both_bad")


def vote_row(
    history: History, prompt: str, answers: Sequence[str], names: Sequence[str], vote: str, own: str,
    settings: Settings, blind: bool,
) -> dict[str, Any]:  # fmt: skip
    """One line of the file: the question with what came before it, both answers as the voter saw them, the judgement.

    ``answers`` and ``names``: left, right. ``own``: the voter's better answer, "" for none.

    Raises:
        UserError: an unknown vote, or an answer of the voter's own that is not valid Unicode.
    """
    if vote not in VOTES:
        raise UserError(f"the vote is {vote!r}; choose {', '.join(VOTES)}")
    return {
        "history": as_messages(history),
        "prompt": cleaned(prompt),
        "left": answers[0],
        "right": answers[1],
        "names": {"left": names[0], "right": names[1]},
        "vote": vote,
        "own": cleaned(own) if own.strip() else "",
        "blind": blind,
        "settings": dataclasses.asdict(settings),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def prepare_votes(path: Path) -> None:
    """Prove, before anybody votes, that votes can be written. Raises UserError with the system's reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"the votes cannot be written to {path} ({error.strerror}); choose another --votes") from error


def append_vote(path: Path, row: dict[str, Any]) -> None:
    """Add one line, whole or not at all, whoever else adds lines at the same time; on the disk when this returns.

    Raises:
        UserError: the disk does not take it; the file is as it was.
    """
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
    try:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line  # a line that somebody's editor left open
            try:
                if file.write(line) != len(line):
                    raise OSError(None, "the disk took a part of it only")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise UserError(f"the vote could not be written to {path} ({error.strerror}); vote again") from error

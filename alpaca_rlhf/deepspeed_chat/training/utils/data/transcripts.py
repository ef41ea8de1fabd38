"""Whole conversations written as one text: ``Human:`` / ``Assistant:`` markers become turns.

Three spellings exist, from the most to the least certain: hh-rlhf opens a turn with an empty line and a marker,
others open it on a new line, alpaca-rlhf writes everything in line (`` Human: x Assistant: y``). A text is read in the
most certain spelling that it shows, so that "Assistant:" inside a line of an hh-rlhf answer stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Turn(NamedTuple):
    """One speaker's text in a conversation, without surrounding blanks."""

    role: str  # "system" | "user" | "assistant"
    text: str


_ROLES = {"Human": "user", "Assistant": "assistant"}
_PARAGRAPH = re.compile(r"(?:\A\s*|\n[ \t]*\n)(Human|Assistant):")
_LINE = re.compile(r"(?:\A\s*|\n[ \t]*)(Human|Assistant):")
_INLINE = re.compile(r"(?:\A\s*|\s)(Human|Assistant):(?=\s|\Z)")
_PARAGRAPH_HUMAN = re.compile(r"\n[ \t]*\nHuman:")
_LATER_PARAGRAPH = re.compile(r"\S[ \t]*\n[ \t]*\n\s*Assistant:")
_LATER_LINE = re.compile(r"\S[ \t]*\n[ \t]*Assistant:")
_STARTS = re.compile(r"\s*(Human|Assistant):")


def parse_transcript(text: str) -> tuple[Turn, ...]:
    """Cut a text with speaker markers into turns, in order, exactly as written: repeated roles and empty turns stay.

    A text before the first marker becomes a system turn, but only in the empty-line spelling; a text without markers
    is one user turn. In the in-line spelling, where any "Human:" within a sentence looks like a marker, only a change
    of speaker counts.
    """
    starts = _STARTS.match(text)
    if _PARAGRAPH_HUMAN.search(text) or (starts and _LATER_PARAGRAPH.search(text)):
        return _cut(text, list(_PARAGRAPH.finditer(text)))
    if not starts or starts[1] != "Human":
        return (Turn("user", text.strip()),)
    if _LATER_LINE.search(text):
        return _cut(text, list(_LINE.finditer(text)))
    changes: list[re.Match[str]] = []
    for marker in _INLINE.finditer(text):
        if not changes or marker[1] != changes[-1][1]:
            changes.append(marker)
    return _cut(text, changes or [starts])


def parse_prompt(text: str) -> tuple[Turn, ...]:
    """The turns of a text to be answered; a closing assistant marker is where the answer goes and is no turn.

    A text that quotes a dialogue further down (it neither begins with a marker nor ends with the assistant's) is one
    user turn: the dialogue is what the user asks about.
    """
    turns = parse_transcript(text)
    if turns[-1] == ("assistant", ""):
        return turns[:-1]
    if len(turns) > 1 and not _STARTS.match(text):
        return (Turn("user", text.strip()),)
    return turns


def merge_turns(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Join neighbouring turns of one role with an empty line, as chat templates want the roles to alternate."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role:
            merged[-1] = Turn(turn.role, f"{merged[-1].text}\n\n{turn.text}")
        else:
            merged.append(turn)
    return tuple(merged)


def _cut(text: str, markers: list[re.Match[str]]) -> tuple[Turn, ...]:
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    turns = [
        Turn(_ROLES[marker[1]], text[marker.end() : end].strip())
        for marker, end in zip(markers, ends, strict=True)
    ]
    before = text[: markers[0].start()].strip()
    return (Turn("system", before), *turns) if before else tuple(turns)

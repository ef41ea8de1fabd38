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
# Patterns that begin with the line end are searched several times faster than ones with a choice at their start, so
# the marker at the head of a text is matched apart.
_PARAGRAPH = re.compile(r"\n[ \t]*\n(Human|Assistant):")
_LINE = re.compile(r"\n[ \t]*(Human|Assistant):")
_INLINE = re.compile(r"\s(Human|Assistant):(?=\s|\Z)")
_PARAGRAPH_HUMAN = re.compile(r"\n[ \t]*\nHuman:")
_PARAGRAPH_ASSISTANT = re.compile(r"\n[ \t]*\nAssistant:")
_LINE_ASSISTANT = re.compile(r"\n[ \t]*Assistant:")
_STARTS = re.compile(r"\s*(Human|Assistant):")


def parse_transcript(text: str) -> tuple[Turn, ...]:
    """Cut a text with speaker markers into turns, in order, exactly as written: repeated roles and empty turns stay.

    A text before the first marker becomes a system turn, but only in the empty-line spelling; a text without markers
    is one user turn. In the in-line spelling, where any "Human:" within a sentence looks like a marker, only a change
    of speaker counts.
    """
    head = _STARTS.match(text)
    after = head.end() if head else 0
    if _PARAGRAPH_HUMAN.search(text) or (head and _PARAGRAPH_ASSISTANT.search(text, after)):
        return _cut(text, head, _PARAGRAPH.finditer(text, after))
    if not head or head[1] != "Human":
        return (Turn("user", text.strip()),)
    if _LINE_ASSISTANT.search(text, after):
        return _cut(text, head, _LINE.finditer(text, after))
    changes: list[re.Match[str]] = []
    for marker in _INLINE.finditer(text, after):
        if marker[1] != (changes[-1] if changes else head)[1]:
            changes.append(marker)
    return _cut(text, head, changes)


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


def _cut(text: str, head: re.Match[str] | None, later: Iterable[re.Match[str]]) -> tuple[Turn, ...]:
    markers = [head, *later] if head else list(later)
    turns = []
    end = len(text)
    for marker in reversed(markers):
        turns.append(Turn(_ROLES[marker[1]], text[marker.end() : end].strip()))
        end = marker.start()
    before = text[:end].strip()
    if before:
        turns.append(Turn("system", before))
    return tuple(reversed(turns))

"""Whole conversations written as one text: ``Human:`` / ``Assistant:`` markers become turns."""

from __future__ import annotations

from typing import NamedTuple


class Turn(NamedTuple):
    """One speaker's text in a conversation, without surrounding blanks."""

    role: str  # "system" | "user" | "assistant"
    text: str

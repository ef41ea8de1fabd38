"""One row becomes one conversation. The layout is recognised by its columns, never by a data set's name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from alpaca_rlhf.deepspeed_chat.training.utils.data.transcripts import (
    Turn,
    merge_turns,
    parse_prompt,
    parse_transcript,
)


@dataclass(frozen=True)
class Conversation:
    """One usable row.

    ``prompt`` ends with a user turn; an earlier assistant turn is history. ``chosen`` is the good (or only) answer and
    is "" only in a data set that holds prompts alone. ``rejected`` is None where the data set has no preference side.
    """

    record: str  # "<file name>:<row number from 1>", stable, for reports
    prompt: tuple[Turn, ...]
    chosen: str
    rejected: str | None
    margin: float = 0.0


@dataclass
class Skipped:
    """Rows that were not used: how many for each reason, and where the first of each stands."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    further: int = 0  # conversations, or skipped ones, beyond one a row

    def add(self, reason: str, record: str) -> None:
        """Count one row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, record)


class UnusableRow(Exception):
    """A row that cannot be used; the text is the reason under which it is counted."""


Sides = tuple[tuple[Turn, ...], str, "str | None"]  # prompt, chosen, rejected


@dataclass(frozen=True)
class Layout:
    """How the columns of one data set are read; ``read`` raises UnusableRow."""

    read: Callable[[dict[str, Any]], Sides]
    has_answer: bool
    has_rejected: bool
    rows: Callable[[dict[str, Any]], list[dict[str, Any]]] = lambda row: [row]  # one row may hold several


KNOWN_LAYOUTS = (
    "prompt, chosen, rejected (a pair)",
    "chosen, rejected (whole transcripts)",
    "instruction, input, output",
    "prompt with response, completion, answer or chosen (one answer)",
    "messages (role, content)",
    "prompt (prompts alone, for step 3)",
    "history, prompt, left, right, vote, own (the chat page's votes)",
)
KNOWN_COLUMNS = frozenset(
    "prompt chosen rejected instruction input output response completion answer messages margin "
    "history left right vote own".split()
)
_ANSWERS = ("response", "completion", "answer")
_MESSAGE_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant"}

# What data sets write where there is nothing. "None" and "N/A" may be an answer to a question, so the answers' list is
# the shorter one; "NA" is left out of both, for it is also a name.
_NOT_TEXT = frozenset({"noinput", "nooutput", "null", "nan", "undefined", "placeholder"})
_NO_INPUT = _NOT_TEXT | {
    *("n/a", "none", "notapplicable", "noinputs", "noadditionalinput"),
    *("noinputrequired", "noinputneeded", "noinputnecessary", "noinputprovided", "noinputgiven"),
}
_LONGEST_PLACEHOLDER = 32
_VISIBLE = re.compile(r"[^\s\x00-\x1f\x7f\u200b-\u200f\u2060\ufeff]")


def recognise_layout(columns: Collection[str]) -> Layout | None:
    """The layout that these columns make, or None."""
    has = set(columns)
    if "chosen" in has:
        pair = "rejected" in has
        for question in ("prompt", "instruction"):
            if question in has:
                return Layout(
                    partial(_read_answers, question, "chosen", "rejected" if pair else None), True, pair
                )
        return Layout(partial(_read_transcripts, pair), True, pair)
    if {"prompt", "left", "right", "vote"} <= has:
        return Layout(partial(_read_transcripts, True), True, True, _pairs_of_vote)
    if "messages" in has:
        return Layout(_read_messages, True, False)
    if {"instruction", "output"} <= has:
        return Layout(partial(_read_answers, "instruction", "output", None), True, False)
    if "prompt" in has:
        for column in _ANSWERS:
            if column in has:
                return Layout(partial(_read_answers, "prompt", column, None), True, False)
        return Layout(lambda row: (_prompt("prompt", row), "", None), False, False)
    return None


def convert_rows(
    layout: Layout, file_name: str, rows: Iterable[tuple[int, Any]], skipped: Skipped
) -> list[Conversation]:
    """The usable rows of one file, in order; every other row is counted in ``skipped`` by its reason (D-04)."""
    conversations = []
    for number, row in rows:
        record = f"{file_name}:{number}"
        try:
            if not isinstance(row, dict):
                raise UnusableRow("the row is not an object with columns")
            parts = layout.rows(row)
        except UnusableRow as reason:
            skipped.add(str(reason), record)
            continue
        skipped.further += len(parts) - 1
        for part in parts:
            try:
                conversations.append(Conversation(record, *layout.read(part), _margin(part.get("margin"))))
            except UnusableRow as reason:
                skipped.add(str(reason), record)
    return conversations


def _read_answers(question: str, chosen: str, rejected: str | None, row: dict[str, Any]) -> Sides:
    prompt, good = _prompt(question, row), _text(row, chosen).strip()
    if rejected is None:
        return prompt, good, None
    return prompt, good, _different(good, _text(row, rejected).strip())


def _read_transcripts(pair: bool, row: dict[str, Any]) -> Sides:
    prompt, good = _split_last_answer(_transcript(row, "chosen"), "chosen")
    if not pair:
        return _checked_prompt(prompt), good, None
    other_prompt, bad = _split_last_answer(_transcript(row, "rejected"), "rejected")
    if prompt != other_prompt:
        raise UnusableRow("the prompts of `chosen` and `rejected` differ")
    return _checked_prompt(prompt), good, _different(good, bad)


def _pairs_of_vote(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The pairs that one vote makes: an answer of the voter's own is better than both, the chosen side than the other.

    A tie and two bad answers say nothing about the two, and alone make no pair.
    """
    vote, own = row.get("vote"), row.get("own") or None
    if vote not in ("left", "right", "tie", "both_bad"):
        raise UnusableRow("`vote` is not left, right, tie or both_bad")
    history = row.get("history") or []
    if not isinstance(history, list):
        raise UnusableRow("`history` is not a list of messages")
    asked = [*history, {"role": "user", "content": _text(row, "prompt")}]
    pairs = [(own, row.get(side)) for side in ("left", "right")] if own is not None else []
    if vote in ("left", "right"):
        pairs.append((row.get(vote), row.get("right" if vote == "left" else "left")))
    if not pairs:
        raise UnusableRow("the vote is a tie" if vote == "tie" else "the vote says that both answers are bad")
    return [
        {
            "chosen": [*asked, {"role": "assistant", "content": better}],
            "rejected": [*asked, {"role": "assistant", "content": worse}],
        }
        for better, worse in pairs
    ]


def _read_messages(row: dict[str, Any]) -> Sides:
    prompt, answer = _split_last_answer(_messages(row, "messages"), "messages")
    return _checked_prompt(prompt), answer, None


def _prompt(question: str, row: dict[str, Any]) -> tuple[Turn, ...]:
    """The turns of the column ``question``; to an instruction its `input` is added, on a line of its own."""
    turns = _checked_prompt(parse_prompt(_text(row, question)))
    extra = row.get("input") if question == "instruction" else None
    if extra is None or (isinstance(extra, str) and _is_no_input(extra)):
        return turns
    return (*turns[:-1], Turn("user", f"{turns[-1].text}\n{_text(row, 'input').strip()}"))


def _transcript(row: dict[str, Any], column: str) -> tuple[Turn, ...]:
    """A cell that holds a whole conversation: as one text with markers, or as a list of messages."""
    return (
        _messages(row, column) if isinstance(row.get(column), list) else parse_transcript(_text(row, column))
    )


def _messages(row: dict[str, Any], column: str) -> tuple[Turn, ...]:
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise UnusableRow(f"`{column}` is not a list of messages")
    turns = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role.lower() not in _MESSAGE_ROLES:
            raise UnusableRow(f"`{column}` has a message whose role is not system, user or assistant")
        turns.append(Turn(_MESSAGE_ROLES[role.lower()], _text(message, "content").strip()))
    return tuple(turns)


def _split_last_answer(turns: tuple[Turn, ...], column: str) -> tuple[tuple[Turn, ...], str]:
    """Cut before the last assistant turn (D-05)."""
    if turns[-1].role != "assistant":
        raise UnusableRow(f"`{column}` does not end with an answer of the assistant")
    if not turns[-1].text:
        raise UnusableRow(f"the last answer of `{column}` is blank")
    return turns[:-1], turns[-1].text


def _checked_prompt(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    if not turns or turns[-1].role != "user":
        raise UnusableRow("the prompt does not end with a turn of the user")
    if not all(turn.text for turn in turns):
        raise UnusableRow("a turn of the prompt is blank")
    return merge_turns(turns)


def _different(chosen: str, rejected: str) -> str:
    if chosen == rejected:
        raise UnusableRow("`chosen` and `rejected` are the same text")
    return rejected


def _text(row: dict[str, Any], column: str) -> str:
    """A required cell: a text that says something, as written but for its line ends, which become "\\n"."""
    if column not in row:
        raise UnusableRow(f"`{column}` is missing")
    text = row[column]
    if text is None:
        raise UnusableRow(f"`{column}` is null")
    if not isinstance(text, str):
        raise UnusableRow(f"`{column}` is not a string")
    if not _VISIBLE.search(text):
        raise UnusableRow(f"`{column}` is blank")
    if _placeholder(text) in _NOT_TEXT:
        raise UnusableRow(f"`{column}` is a lone placeholder")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and no tokenizer can read
        raise UnusableRow(f"`{column}` is not valid Unicode") from None
    # Markers are found by their empty lines, so the line ends of every platform have to be one; no other character,
    # control characters among them, is changed behind the user's back.
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _is_no_input(text: str) -> bool:
    return not _VISIBLE.search(text) or _placeholder(text) in _NO_INPUT


def _placeholder(text: str) -> str:
    """A short text without case, blanks and brackets, to be looked up among the placeholders."""
    if len(text) > _LONGEST_PLACEHOLDER:
        return ""
    return re.sub(r"[\s_-]+", "", text.strip(" \t\r\n<>[](){}.,:;!\"'`*").lower())


def _margin(value: Any) -> float:
    """An optional number (R-10); CSV writes numbers as text and an absent one as ""."""
    if value is None or value == "":
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UnusableRow("`margin` is not a number")
    try:
        margin = float(value)
    except (ValueError, OverflowError):
        raise UnusableRow("`margin` is not a number") from None
    if not math.isfinite(margin):
        raise UnusableRow("`margin` is not a finite number")
    return margin

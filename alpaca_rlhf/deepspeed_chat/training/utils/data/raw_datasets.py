"""Rows of any source become conversations: prompt turns, a chosen answer and, in preference data, a rejected one."""

from __future__ import annotations

from dataclasses import dataclass

from alpaca_rlhf.deepspeed_chat.training.utils.data.transcripts import Turn

__all__ = ["Conversation", "RawDataset", "Turn", "load_raw_dataset"]


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


@dataclass(frozen=True)
class RawDataset:
    """A data set as read: ``test`` is None where the source has no part for evaluation."""

    name: str
    train: list[Conversation]
    test: list[Conversation] | None
    skipped: dict[str, int]  # reason -> number of rows
    digest: str  # of the conversations' content


def load_raw_dataset(
    path: str, *, cache_dir: str, needs_rejected: bool, needs_answer: bool = False
) -> RawDataset:
    """Read a data set; its conversations are the same whichever step asks (the steps' shares depend on that).

    ``needs_rejected`` (step 2) and ``needs_answer`` (step 1) only refuse a data set without that side.
    """
    raise NotImplementedError  # replaced within the hour by its owner: interface first

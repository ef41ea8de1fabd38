"""One conversation becomes the item that a step trains on, or is dropped for a reason that can be counted.

Too long, in each step (``max_len`` counts tokens, BOS and EOS included; the beginning of what stays is never cut, so
BOS and the role words stay):

- SFT: where the prompt leaves room, the answer is cut at the limit and has no EOS, for it does not end there. Where the
  prompt alone fills the limit, it loses whole early turns; if that does not help the record is dropped.
- pairs: a score is read at the end of the answer, so a pair whose longer side does not fit loses whole early turns, on
  both sides alike, and is else dropped. Pairs whose sides are equal after encoding are dropped.
- PPO prompts lose whole early turns, else are dropped.

Losing early turns keeps a system turn at the start and always the newest round.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TemplateRefusal, TextEncoder

_CHUNK = 256  # conversations handed to a worker at a time

CUT = "answer cut at the limit, without EOS"
SHORTENED = "whole early turns left out to fit"


class Encoded(NamedTuple):
    """An item (None: dropped) with the reason why it was dropped, or what was done to make it fit."""

    item: dict | None
    dropped: str | None = None
    changed: str | None = None


def encode_all(
    conversations: Sequence[Conversation], step: int, encoder: TextEncoder, max_len: int, workers: int | None = None
) -> list[Encoded]:
    """Encode in order; with ``workers`` > 1 in so many processes.

    The processes are spawned, not forked: a fork of a process that holds threads or a device may hang.
    """
    if workers is None or workers < 2 or len(conversations) <= _CHUNK:
        return [encode(conversation, step, encoder, max_len) for conversation in conversations]
    chunks = [conversations[start : start + _CHUNK] for start in range(0, len(conversations), _CHUNK)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers, len(chunks)), _start_worker, (step, encoder, max_len)) as pool:
        return [encoded for chunk in pool.imap(_encode_chunk, chunks) for encoded in chunk]


def encode(conversation: Conversation, step: int, encoder: TextEncoder, max_len: int) -> Encoded:
    """The item of one step (1 SFT, 2 pairs, 3 prompts) from one conversation; see data_utils.PromptDataset."""
    encode_step = {1: _encode_sft, 2: _encode_pair, 3: _encode_prompt}[step]
    try:
        return encode_step(conversation, encoder, max_len)
    except TemplateRefusal:
        return Encoded(None, dropped="the chat template cannot render its turns (try another --template)")


def _encode_sft(conversation: Conversation, encoder: TextEncoder, max_len: int) -> Encoded:
    if not conversation.chosen:
        return Encoded(None, dropped="no answer to train on")
    for turns in _shorter(conversation.prompt):
        ids, trained = encoder.prompt_with_mask(turns)
        if len(ids) < max_len:
            break
    else:
        return Encoded(None, dropped=f"prompt leaves no room for an answer in {max_len} tokens")
    changed = SHORTENED if len(turns) < len(conversation.prompt) else None
    answer = encoder.answer_ids(turns, conversation.chosen)
    if len(ids) + len(answer) > max_len:
        changed = CUT if changed is None else f"{SHORTENED}, and {CUT}"
    item = {
        "input_ids": _array((ids + answer)[:max_len]),
        "trained": np.asarray((trained + [1] * len(answer))[:max_len], dtype=np.int8),
        "record": conversation.record,
    }
    return Encoded(item, changed=changed)


def _encode_pair(conversation: Conversation, encoder: TextEncoder, max_len: int) -> Encoded:
    if not conversation.chosen or not conversation.rejected:
        return Encoded(None, dropped="no pair of answers")
    for turns in _shorter(conversation.prompt):
        prompt = encoder.prompt_ids(turns)
        chosen = encoder.answer_ids(turns, conversation.chosen)
        rejected = encoder.answer_ids(turns, conversation.rejected)
        if chosen == rejected:
            return Encoded(None, dropped="the two answers are equal once encoded")
        if len(prompt) + max(len(chosen), len(rejected)) <= max_len:
            break
    else:
        return Encoded(None, dropped=f"longer than {max_len} tokens, so that an answer's end would be lost")
    item = {
        "chosen_ids": _array(prompt + chosen),
        "rejected_ids": _array(prompt + rejected),
        "prompt_length": len(prompt),
        "margin": float(conversation.margin),
        "record": conversation.record,
    }
    return Encoded(item, changed=SHORTENED if len(turns) < len(conversation.prompt) else None)


def _encode_prompt(conversation: Conversation, encoder: TextEncoder, max_len: int) -> Encoded:
    for turns in _shorter(conversation.prompt):
        ids = encoder.prompt_ids(turns)
        if len(ids) <= max_len:
            changed = SHORTENED if len(turns) < len(conversation.prompt) else None
            return Encoded({"prompt_ids": _array(ids), "record": conversation.record}, changed=changed)
    return Encoded(None, dropped=f"prompt longer than {max_len} tokens")


def _shorter(turns: Sequence[Turn]) -> Iterator[Sequence[Turn]]:
    """The turns, then without the first round, the first two, …; a system turn at the start and the last round stay."""
    yield turns
    system = [turn for turn in turns[:1] if turn.role == "system"]
    rest = turns[len(system) :]
    for index in range(1, len(rest)):
        if rest[index].role == "user" and rest[index - 1].role == "assistant":
            yield [*system, *rest[index:]]


def _array(ids: list[int]) -> np.ndarray:
    """Four bytes a token: a list of a large set's ids would take ten times as much memory."""
    return np.asarray(ids, dtype=np.int32)


_worker_job: tuple[int, TextEncoder, int] | None = None  # of a spawned process, set once when it starts


def _start_worker(step: int, encoder: TextEncoder, max_len: int) -> None:
    global _worker_job
    _worker_job = step, encoder, max_len


def _encode_chunk(conversations: Sequence[Conversation]) -> list[Encoded]:
    assert _worker_job is not None
    step, encoder, max_len = _worker_job
    return [encode(conversation, step, encoder, max_len) for conversation in conversations]

"""A conversation as a value, and its way into token ids and back; shared by the terminal and the page.

Nothing here remembers anything: a history is a tuple of turns, user and assistant in alternation, and each function
gives a new one. Prompts are built by the encoder of the training, so a question is read with the ids that were trained.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder

History = tuple[Turn, ...]


def cleaned(message: str) -> str:
    """A message as training would read it: one kind of line end, no blanks around it.

    Raises:
        UserError: nothing is left, or it is not valid Unicode.
    """
    text = message.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise UserError("the message is empty; write a question")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the message is not valid Unicode (UTF-8); write it again") from None
    return text


def with_round(history: History, message: str, answer: str) -> History:
    """The history after one more question and its answer."""
    return (*history, Turn("user", cleaned(message)), Turn("assistant", answer))


def without_last_round(history: History) -> History:
    """The history before its last question; an empty one stays empty."""
    return history[:-2]


def as_messages(history: Sequence[Turn]) -> list[dict[str, str]]:
    """The turns as JSON, in the spelling that chat data sets have."""
    return [{"role": turn.role, "content": turn.text} for turn in history]


class Prompt(NamedTuple):
    """What a model reads: ``ids``, and how many of the oldest rounds had to be left out (U-01)."""

    ids: list[int]
    dropped: int


def build_prompt(encoder: TextEncoder, history: History, message: str, room: int) -> Prompt:
    """The prompt of at most ``room`` tokens: the oldest whole rounds go first, the newest question never does.

    Raises:
        UserError: the question alone does not fit, or it is no message (see :func:`cleaned`).
    """
    question = Turn("user", cleaned(message))
    for dropped in range(len(history) // 2 + 1):
        ids = encoder.prompt_ids((*history[2 * dropped :], question))
        if len(ids) <= room:
            return Prompt(ids, dropped)
    raise UserError(
        f"the message has {len(ids)} tokens and there is room for {max(room, 0)}; shorten it, or lower max_new_tokens"
    )


class TurnEnds(NamedTuple):
    """How a model's answer can be seen to go over into a turn of the user's (U-02).

    ``stop_ids``: special tokens that a template writes between an answer and the next question. ``markers``: what it
    writes there as plain text, as written and as the tokenizer gives it back; ``line``: whether it opens a line.
    """

    stop_ids: frozenset[int]
    markers: tuple[str, ...]
    line: bool

    def cut(self, answer: str) -> tuple[str, bool]:
        """The answer up to where the model began to play the user, and whether it did."""
        found = self._pattern().search(answer) if self.markers else None
        return (answer[: found.start()].rstrip(), True) if found else (answer, False)

    def settled(self, answer: str) -> str:
        """The part of an unfinished answer that no further token can take back.

        What may be the beginning of a marker, and a character of which only some bytes are there, has to wait.
        """
        text = answer.rstrip("\ufffd")
        for marker in self.markers:
            for length in range(min(len(marker) - 1, len(text)), 0, -1):
                start = len(text) - length
                opens = start == 0 or text[start - 1].isspace()
                if opens and text.endswith(marker[:length]):
                    text = text[:start]
                    break
        return text.rstrip()

    def _pattern(self) -> re.Pattern[str]:
        before = r"(?:\A|\n)\s*" if self.line else r"(?:\A|(?<=\s))"
        return re.compile(before + "(?:" + "|".join(map(re.escape, self.markers)) + ")")


def turn_ends(encoder: TextEncoder) -> TurnEnds:
    """Derive the ends from the template: what it writes after an answer and before the next question."""
    tokenizer = encoder.tokenizer
    names = _special_names(tokenizer)
    pieces = re.split("(" + "|".join(re.escape(name) for name in names) + ")", _between_turns(encoder))
    stops = frozenset(tokenizer.convert_tokens_to_ids(name) for name in pieces[1::2]) - {encoder.eos_id}
    last = pieces[-2] if len(pieces) > 1 else None
    text = pieces[-1]
    # After a special token of its own a plain word ("user") is the name of a role, and the token says enough.
    named_by_token = last not in (None, tokenizer.eos_token, tokenizer.bos_token)
    marker = text.strip()
    if named_by_token or not marker:
        return TurnEnds(stops, (), False)
    ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
    markers = tuple(dict.fromkeys((marker, encoder.decode(ids) or marker)))
    return TurnEnds(stops, markers, "\n" in text[: len(text) - len(text.lstrip())])


def _between_turns(encoder: TextEncoder) -> str:
    """The template's text between an answer and the next question."""
    first, answer, second = "\U000f0000", "\U000f0001", "\U000f0002"  # nothing that a person or a template writes
    messages = as_messages([Turn("user", first), Turn("assistant", answer), Turn("user", second)])
    rendered = encoder.tokenizer.apply_chat_template(messages, chat_template=encoder.chat_template, tokenize=False)
    return rendered.partition(answer)[2].partition(second)[0]


def _special_names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*tokenizer.all_special_tokens, *added} - {""}, key=len, reverse=True)

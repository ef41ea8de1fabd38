"""What the chat page does and shows, without the page: values in, values out, nothing remembered between calls.

A visitor's state is a :class:`Visit`. Each handler is a function of it and of what the visitor gave; the page keeps the
new one for that visitor alone (U-03).
"""

import dataclasses
import random
import re
import string
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference.conversation import History, cleaned, with_round, without_last_round
from alpaca_rlhf.inference.generation import Answer, stream_answers
from alpaca_rlhf.inference.models import ChatModel, Scorer
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.inference.votes import append_vote, vote_row

SIDES = ("left", "right")
# Code keeps its characters: a fenced block, or a span between equally many backticks.
_CODE = re.compile(
    r"^ {0,3}(`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)|(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\2(?!`)",
    re.MULTILINE | re.DOTALL,
)
_PUNCTUATION = {ord(character): f"&#{ord(character)};" for character in string.punctuation}
_BLANKS = re.compile(r"(?:^|(?<=[ \t]))[ \t]", re.MULTILINE)  # Markdown means something by them, a browser drops them


@dataclasses.dataclass(frozen=True)
class Visit:
    """One visitor's conversation. The last round stays open (it may be voted on, or tried again) until the next one.

    ``history``: the rounds before it. ``answers``: one for each model, in the models' order; ``order``: which model
    stands left and right. ``asking``: its answers grow, or it waits for ``ahead`` questions of other visitors.
    ``blind``: names stay hidden until there is a ``vote``. ``own``: the visitor's own answer. ``unscored``: why the
    reward model gave no scores.
    """

    history: History = ()
    question: str = ""
    answers: tuple[Answer, ...] = ()
    order: tuple[int, ...] = (0,)
    attempt: int = 0
    asking: bool = False
    ahead: int = 0
    blind: bool = False
    settings: Settings = Settings()
    scores: tuple[float | None, ...] = ()
    unscored: str = ""
    vote: str = ""
    own: str = ""

    @property
    def answered(self) -> bool:
        """Whether there is an open round whose answers are there."""
        return bool(self.answers) and all(answer.finish not in ("", "failed") for answer in self.answers)

    @property
    def votable(self) -> bool:
        """Whether there are two whole answers that wait for a judgement."""
        return len(self.answers) > 1 and self.answered and not self.vote

    @property
    def hidden(self) -> bool:
        """Whether the visitor must not know which model stands where."""
        return self.blind and not self.vote

    def shown(self, side: int) -> Answer:
        """The answer on the left (0) or the right (1)."""
        return self.answers[self.order[side]]

    def conversation(self) -> History:
        """The history that the next question follows: with the better answer to the last one, if it was answered.

        Better is the visitor's own, else the one that was voted for, else the left one.
        """
        if not self.answered:
            return self.history
        side = 1 if self.vote == "right" else 0
        return with_round(self.history, self.question, self.own or self.shown(side).text)


class View(NamedTuple):
    """What the page shows: the messages, the name and a note (Markdown) of each side, and where things stand."""

    messages: tuple[list[dict[str, str]], ...]
    labels: tuple[str, ...]
    notes: tuple[str, ...]
    status: str


def asked(models: Sequence[ChatModel], visit: Visit, message: str, settings: Settings, blind: bool) -> Visit:
    """The visit with a new question, not answered yet. Raises UserError for one that cannot be asked."""
    new = Visit(visit.conversation(), cleaned(message), order=_order(models, blind), blind=blind, settings=settings)
    return _checked(models, new)


def asked_again(models: Sequence[ChatModel], visit: Visit, settings: Settings, blind: bool) -> Visit:
    """The visit with the last question not answered yet, for other random numbers. Raises UserError: there is none."""
    if not visit.question:
        if not visit.history:
            raise UserError("there is no question to ask again; the conversation is empty")
        visit = Visit(without_last_round(visit.history), visit.history[-2].text)
    new = Visit(visit.history, visit.question, order=_order(models, blind), attempt=visit.attempt + 1, blind=blind,
                settings=settings)  # fmt: skip
    return _checked(models, new)


def answering(
    models: Sequence[ChatModel], visit: Visit, stop: threading.Event | None = None, scorer: Scorer | None = None
) -> Iterator[Visit]:
    """An asked visit while its answers grow; the last one is not ``asking`` any more."""
    for answers in stream_answers(
        models, visit.history, visit.question, visit.settings, attempt=visit.attempt, stop=stop
    ):
        asking = not all(answer.finish for answer in answers)
        if all(answer.finish == "stopped" and not answer.text for answer in answers):
            answers = ()  # nothing that one could vote on, or that the conversation could go on with
        visit = dataclasses.replace(visit, answers=answers, asking=asking)
        yield visit if visit.asking or scorer is None else _scored(visit, scorer)


def undo(visit: Visit) -> Visit:
    """The visit before its last question. Raises UserError: there is none."""
    if not visit.question and not visit.history:
        raise UserError("there is nothing to take back; the conversation is empty")
    history = visit.history if visit.question else without_last_round(visit.history)
    return Visit(history, order=tuple(sorted(visit.order)))


def vote(visit: Visit, models: Sequence[ChatModel], judgement: str, own: str, path: Path) -> Visit:
    """Write the visitor's judgement of the open round down and give the visit that knows of it.

    Raises:
        UserError: there are no two whole answers to judge, they were judged before, or the vote cannot be written.
    """
    if len(visit.answers) < 2 or not visit.answered:
        raise UserError("there is nothing to vote on yet; ask a question and wait for both answers")
    if visit.vote:
        raise UserError("this question has your vote already; ask another one")
    names = [models[index].label for index in visit.order]
    texts = [visit.shown(side).text for side in (0, 1)]
    row = vote_row(visit.history, visit.question, texts, names, judgement, own, visit.settings, visit.blind)
    append_vote(path, row)
    return dataclasses.replace(visit, vote=judgement, own=row["own"])


def view(visit: Visit, models: Sequence[ChatModel]) -> View:
    """What to show of a visit."""
    messages = []
    names = [SIDES[side].capitalize() if visit.hidden else models[i].label for side, i in enumerate(visit.order)]
    labels = names
    if len(names) > 1 and not visit.hidden:  # one above the other on a phone, they say which one the votes call left
        labels = [f"{side.capitalize()}: {name}" for side, name in zip(SIDES, names, strict=True)]
    for side in range(len(names)):
        shown = [_message(turn.role, turn.text) for turn in visit.history]
        if visit.question:
            shown.append(_message("user", visit.question))
        if visit.answers:
            answer = visit.shown(side)
            text = answer.text or ("(no text)" if answer.finish else "")
            shown.append(_message("assistant", text))
        messages.append(shown)
    notes = [
        f"**{as_written(label)}**: {as_written('; '.join(_note(visit, side, models[visit.order[side]])))}"
        for side, label in enumerate(names)
    ]
    return View(tuple(messages), tuple(labels), tuple(notes), " ".join([_status(visit), *_remarks(visit)]))


def as_written(text: str) -> str:
    """Markdown that shows a text exactly as it was typed: no character of it means anything (U-04)."""
    shown = _BLANKS.sub(lambda match: "&nbsp;" * (4 if match[0] == "\t" else 1), text.translate(_PUNCTUATION))
    return re.sub(r"^(?=\n)", "&nbsp;", shown, flags=re.MULTILINE)  # an empty line would end the paragraph


def markup_escaped(text: str) -> str:
    """Markdown in which tags and entities are text; code, where they are text anyway, stays as it is (U-04)."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_without_tags(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _without_tags(text[end:])])


def _without_tags(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": as_written(text) if role == "user" else markup_escaped(text)}


def _order(models: Sequence[ChatModel], blind: bool) -> tuple[int, ...]:
    """Which model stands on which side; drawn anew for each blind question, and not from a seed that one could know."""
    order = list(range(len(models)))
    if blind:
        random.SystemRandom().shuffle(order)
    return tuple(order)


def _checked(models: Sequence[ChatModel], visit: Visit) -> Visit:
    for model in models:
        model.prompt(visit.history, visit.question, visit.settings.max_new_tokens)
    return dataclasses.replace(visit, asking=True)


def _scored(visit: Visit, scorer: Scorer) -> Visit:
    if not visit.answered:
        return visit
    try:
        scores = tuple(scorer.score(visit.history, visit.question, answer.text) for answer in visit.answers)
    except RuntimeError as error:  # out of memory, say: the answers are there all the same
        return dataclasses.replace(visit, unscored=f"there is no reward score ({error})")
    return dataclasses.replace(visit, scores=scores)


def _status(visit: Visit) -> str:
    """What happened, and what one can do now."""
    two = len(visit.order) > 1
    if visit.ahead:
        return f"Waiting for {visit.ahead} other {'question' if visit.ahead == 1 else 'questions'}…"
    if visit.asking:
        return "Answering…"
    if not visit.question:
        return "Ask both models a question." if two else "Ask a question."
    if not visit.answers:
        return "Stopped before an answer began. Retry asks again."
    if not visit.answered:
        return "The answer failed; the conversation goes on without it. Retry, or ask something else."
    if visit.vote:
        goes_on = "your own" if visit.own else f"the {SIDES[visit.vote == 'right']}"
        return f"Your vote is kept, thank you. The conversation goes on with {goes_on} answer."
    if visit.hidden:
        return "Which answer is better? Your vote shows which model is which."
    if two:
        return "Which answer is better? Vote, or ask on: without a vote the conversation goes on with the left answer."
    return "Ask on, or retry for another answer."


def _remarks(visit: Visit) -> list[str]:
    remarks = visit.settings.remarks() if visit.answered else []
    return [f"{remark[0].upper()}{remark[1:]}." for remark in filter(None, [*remarks, visit.unscored])]


def _note(visit: Visit, side: int, model: ChatModel) -> list[str]:
    """Tokens against the limit, how the answer ended, its score; before a blind vote nothing that tells who it is."""
    words = ["its name comes with your vote"] if visit.hidden else []
    if not visit.answers:
        return words or [f"holds {model.limit} tokens"]
    answer = visit.shown(side)
    if not visit.hidden:
        words.append(f"{answer.prompt_tokens + answer.tokens} of {model.limit} tokens")
        if visit.scores:
            score = visit.scores[visit.order[side]]
            words.append("too long for the reward model" if score is None else f"reward score {score:.3f}")
    words += answer.remarks()
    if answer.error:
        words.append(f"error: {answer.error}")
    return words

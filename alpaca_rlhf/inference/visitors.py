"""The visitors of the chat page: what its events do for each of them, and whose question is answered when.

One visitor is answered at a time, in the order of asking, so that a question never slows another one's answer down.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference import page
from alpaca_rlhf.inference.models import ChatModel, Scorer
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.inference.votes import VOTES

LOOK_AGAIN = 0.02  # seconds until a question that waits looks whether it is its turn


@dataclasses.dataclass(eq=False)
class _Question:
    """A question that waits or is answered; ``order`` makes of its visit what is shown when it is ``over``."""

    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    over: bool = False
    order: Callable[[page.Visit], tuple] | None = None


class Handlers:
    """What the page's events call. Only what belongs to no visitor is kept here, and whose questions are under way.

    Outputs: the visitor's state, the text box, the status, each side's chat, each side's note, the buttons send, stop,
    retry and undo; with two models the four votes and the visitor's own answer too. A dict holds changed properties;
    an empty one leaves a component, or the state, as it is. While a question is under way its generator alone changes
    the visitor's state: what else the visitor wants is an order to it, so that no late answer undoes it.
    """

    def __init__(self, models: Sequence[ChatModel], scorer: Scorer | None, votes: Path | None) -> None:
        self.models = models
        self.scorer = scorer
        self.votes = votes
        self.questions: dict[str, _Question] = {}  # by session
        self.line: list[_Question] = []  # the first one is answered, the others wait
        self._lock = threading.Lock()  # of both, and of the orders

    def ask(self, session: str, visit: page.Visit, message: str, blind: bool, *values: Any) -> Iterator[tuple]:
        """Grow the answers to a message; once it is taken the text box is empty, and the visitor's again."""

        def asked() -> page.Visit:
            return page.asked(self.models, visit, message, settings_of(values), blind)

        return self._answer(session, visit, asked, {"value": ""})

    def retry(self, session: str, visit: page.Visit, _message: str, blind: bool, *values: Any) -> Iterator[tuple]:
        """Grow other answers to the last question."""

        def asked() -> page.Visit:
            return page.asked_again(self.models, visit, settings_of(values), blind)

        return self._answer(session, visit, asked, {})

    def stop(self, session: str) -> None:
        """End the question of this visitor that is under way, and nobody else's; what is there of its answers stays."""
        with self._lock:
            if session in self.questions:
                self.questions[session].stop.set()

    def leave(self, session: str) -> None:
        """The visitor has gone: nobody waits for their answers any more."""
        with self._lock:
            question = self.questions.pop(session, None)
            if question is not None:
                question.stop.set()
                self.line = [other for other in self.line if other is not question]

    def clear(self, session: str) -> tuple:
        """Forget the conversation, also what grows of it."""
        return self._order(session, self.fresh(), lambda _: self.shown(self.fresh()))

    def undo(self, session: str, visit: page.Visit, message: str) -> tuple:
        """Take the last round back, also while it grows; its question returns to an empty text box."""

        def order(visit: page.Visit) -> tuple:
            question = visit.question or (visit.history[-2].text if visit.history else "")
            try:
                return self.shown(page.undo(visit), {} if message.strip() else {"value": question})
            except UserError as error:
                return self.shown(visit, error=str(error))

        return self._order(session, visit, order)

    def vote(self, visit: page.Visit, judgement: str, own: str) -> tuple:
        """Keep a vote; then the names are shown."""
        assert self.votes is not None, "there are vote buttons without a second model"
        try:
            return self.shown(page.vote(visit, self.models, judgement, own, self.votes), own={"value": ""})
        except UserError as error:
            return self.shown(visit, error=str(error))

    def fresh(self) -> page.Visit:
        """A visit that has not begun."""
        return page.Visit(order=tuple(range(len(self.models))))

    def shown(self, visit: page.Visit, message: dict[str, str] | None = None, error: str = "",
              own: dict[str, str] | None = None) -> tuple:  # fmt: skip
        """The outputs for a visit; ``error`` comes before what else there is to say."""
        seen = page.view(visit, self.models)
        status = " ".join([*([f"Error: {error}."] if error else []), seen.status])
        begun = bool(visit.question or visit.history)
        outputs: list[Any] = [
            visit,
            message or {},
            {"value": page.as_written(status)},
            *({"value": value, "label": label} for value, label in zip(seen.messages, seen.labels, strict=True)),
            *({"value": note} for note in seen.notes),
            {"visible": not visit.asking},
            {"visible": visit.asking},
            {"interactive": begun and not visit.asking},
            {"interactive": begun},
        ]
        if len(self.models) > 1:
            looks = ("primary" if visit.vote == judgement else "secondary" for judgement in VOTES)
            outputs += [*({"interactive": visit.votable, "variant": look} for look in looks), own or {}]
        return tuple(outputs)

    def _order(self, session: str, visit: page.Visit, order: Callable[[page.Visit], tuple]) -> tuple:
        """Carry an order out, or end the visitor's question that is under way and have it carried out there."""
        with self._lock:
            question = self.questions.get(session)
            if question is not None:
                question.order = order
                question.stop.set()
                return self._unchanged()
        return order(visit)

    def _unchanged(self) -> tuple:
        return tuple({} for _ in self.shown(self.fresh()))

    def _answer(self, session: str, visit: page.Visit, asked: Callable[[], page.Visit], message: dict[str, str]
                ) -> Iterator[tuple]:  # fmt: skip
        question = _Question()
        if not self._begins(session, question):
            yield self._unchanged()  # sent while another one is answered
            return
        try:
            known: list[dict] = []
            for outputs in self._growing(question, visit, asked, message):
                visit = outputs[0]
                question.over = not visit.asking
                if question.order is None:
                    yield visit, *_news(known, outputs[1:])
            while (order := self._next_order(session, question)) is not None:
                outputs = order(visit)
                visit = outputs[0]
                yield outputs
        finally:
            with self._lock:
                if self.questions.get(session) is question:
                    del self.questions[session]

    def _begins(self, session: str, question: _Question) -> bool:
        """Whether this is the visitor's one question now; one that is over, but still takes orders, is waited for."""
        while True:
            with self._lock:
                current = self.questions.setdefault(session, question)
            if current is question or not current.over:
                return current is question
            time.sleep(LOOK_AGAIN)

    def _next_order(self, session: str, question: _Question) -> Callable[[page.Visit], tuple] | None:
        """The order that was given last; where there is none the question is over."""
        with self._lock:
            order, question.order = question.order, None
            if order is None:
                self.questions.pop(session, None)
            return order

    def _growing(self, question: _Question, visit: page.Visit, asked: Callable[[], page.Visit], message: dict[str, str]
                 ) -> Iterator[tuple]:  # fmt: skip
        try:
            new = asked()
            with self._lock:
                self.line.append(question)
            for growing in self._in_turn(new, question):
                yield self.shown(growing, message)
                message = {}
        except UserError as error:
            yield self.shown(visit, error=str(error))
        finally:
            with self._lock:
                self.line = [other for other in self.line if other is not question]

    def _in_turn(self, asked: page.Visit, question: _Question) -> Iterator[page.Visit]:
        """The visit while its question waits for those that were asked before, and then while its answers grow."""
        told = 0
        while not question.stop.is_set() and (ahead := self._ahead(question)) > 0:
            if ahead != told:
                told = ahead
                yield dataclasses.replace(asked, ahead=ahead)
            question.stop.wait(LOOK_AGAIN)
        if question.stop.is_set():
            yield dataclasses.replace(asked, asking=False)
            return
        yield asked
        yield from page.answering(self.models, asked, question.stop, self.scorer)

    def _ahead(self, question: _Question) -> int:
        with self._lock:
            return self.line.index(question) if question in self.line else 0


def _news(known: list[dict], outputs: Sequence[dict]) -> list[dict]:
    """The properties that differ from ``known``, which learns them: an answer that grows changes little each time."""
    known += [{} for _ in outputs[len(known) :]]
    news = [
        {name: value for name, value in output.items() if name not in old or old[name] != value}
        for old, output in zip(known, outputs, strict=True)
    ]
    for old, new in zip(known, news, strict=True):
        old.update(new)
    return news


def settings_of(values: Sequence[Any]) -> Settings:
    """Settings from the components' values, in the order of the fields. Raises UserError, also for an emptied field."""
    fields = dataclasses.fields(Settings)
    texts = ["" if value is None else str(value) for value in values]
    settings = Settings()
    for field, text in zip(fields, texts, strict=True):
        whole = type(field.default) is int and text.endswith(".0")  # a number field gives 64.0
        settings = settings.changed(field.name, text.removesuffix(".0") if whole else text)
    return settings

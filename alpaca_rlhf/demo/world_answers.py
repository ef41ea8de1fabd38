"""How people ask about the demo's world, and how answers of many styles and qualities are written.

Every random choice goes through :class:`Dice`, which uses only ``random.Random.random`` (the one method whose sequence
for a seed Python promises to keep), so that a seed gives the same text on every Python.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from alpaca_rlhf.demo.world_facts import THINGS, Thing

T = TypeVar("T")

ABOUT_ONE = (
    "Please introduce {x}.",
    "Tell me about {x}.",
    "What can you tell me about {x}?",
    "List some facts about {x}.",
    "Give me a few facts about {x}.",
    "What should I know about {x}?",
    "Why is {x} interesting?",
    "Explain why {x} is worth knowing.",
    "Describe {x} to a child.",
    "I want to learn about {x}.",
    "Can you explain {x} to me?",
    "What makes {x} special?",
    "Why do people talk about {x}?",
    "Do you know anything useful about {x}?",
    "What do you know about {x}?",
    "Could you introduce {x} to me?",
    "Tell me why {x} is interesting.",
    "Please describe {x}.",
    "Please explain {x}.",
    "Give me a list about {x}.",
    "What are some facts about {x}?",
    "Why should I learn about {x}?",
)
ABOUT_TWO = (
    "Which is better for {use}, {x} or {y}?",
    "Should I choose {x} or {y} for {use}?",
    "Which is better, {x} or {y}?",
    "Please compare {x} and {y}.",
)
STORY = (
    "Write a short story about {x}.",
    "Tell me a little story about {x}.",
    "Make up a story with {x} in it.",
)
AGAIN_ONE = (
    "Tell me more about it.",
    "Why is it interesting?",
    "Give me a list of facts about it.",
    "What makes it special?",
)
AGAIN_OTHER = ("And what about {y}?", "Now tell me about {y}.", "Do you also know {y}?")
AGAIN_TWO = ("Which is better, it or {y}?", "Which is better for {use}, it or {y}?")
AGAIN_STORY = ("Now write a short story about it.",)

_OPENINGS = (
    "Here are some facts about {x}:",
    "Here is what I know about {x}:",
    "There is a lot to say about {x}:",
)
_CLOSINGS = (
    "In summary, {x} is good for {use}.",
    "In summary, {x} is good for {use} and worth knowing.",
    "In summary, {x} deserves our full attention.",
)
_COMPARE_OPENINGS = ("Here is how {x} and {y} compare:", "Both choices have their own merits:")
_RUDE = (
    "That is a silly question.",
    "What a stupid question.",
    "Look it up yourself.",
    "Do not bother me.",
    "I do not care.",
    "You should know that.",
    "Stop wasting my precious time.",
)
_CHILDREN = ("Anna", "Tom", "Maria", "Ben", "Lily", "Sam", "Emma", "Oscar")
_STORY_ENDS = (
    "{child} was happy.",
    "{child} smiled and thanked everyone.",
    "{child} never forgot this lesson again.",
)
_PLAIN_ENDS = ("I hope this helps.", "That is all I know.", "Feel free to ask again.", "Let us talk later.")


class Dice:
    """Seeded choices that are the same on every Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def below(self, count: int) -> int:
        """A number from 0 to ``count`` - 1."""
        return int(self._random.random() * count)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def draw(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different items in random order (all of them when there are fewer)."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(min(count, len(rest)))]

    def weighted(self, weights: dict[str, int]) -> str:
        """One key, by its weight."""
        left = self.below(sum(weights.values()))
        for key, weight in weights.items():
            left -= weight
            if left < 0:
                return key
        raise AssertionError(f"no key for {left} in {weights}")


@dataclass(frozen=True)
class Question:
    """A question with what it is about. ``history`` holds earlier (question, answer) turns of the conversation."""

    text: str
    things: tuple[Thing, ...]
    story: bool = False
    history: tuple[tuple[str, str], ...] = ()

    @property
    def prompt(self) -> str:
        """The conversation in rm-static's layout: two newlines before a speaker, up to where the assistant begins."""
        turns = "".join(f"\n\nHuman: {question}\n\nAssistant: {answer}" for question, answer in self.history)
        return f"{turns}\n\nHuman: {self.text}\n\nAssistant:"

    @property
    def instruction(self) -> str:
        """The conversation in MultiTurnAlpaca's layout: a blank before a speaker, up to where the assistant begins."""
        turns = "".join(f" Human: {question} Assistant: {answer}" for question, answer in self.history)
        return f"{turns} Human: {self.text} Assistant:"


class Deck:
    """Questions dealt in random order, all of them before any comes again."""

    def __init__(self, dice: Dice, questions: Sequence[Question]) -> None:
        self._dice, self._questions = dice, questions
        self._rest: list[Question] = []

    def deal(self) -> Question:
        """The next question."""
        if not self._rest:
            self._rest = self._dice.draw(self._questions, len(self._questions))
        return self._rest.pop()


def others(thing: Thing) -> list[Thing]:
    """The other things of a thing's group."""
    return [other for other in THINGS if other.group == thing.group and other != thing]


def all_first_questions() -> list[Question]:
    """Every question that can open a conversation, each once, in a fixed order; comparisons stay inside a group."""
    questions = []
    for x in THINGS:
        questions += [Question(text.format(x=x.written), (x,)) for text in ABOUT_ONE]
        questions += [Question(text.format(x=x.written), (x,), story=True) for text in STORY]
        for y in others(x):
            texts = [text.format(x=x.written, y=y.written, use=x.use) for text in ABOUT_TWO]
            questions += [Question(text, (x, y)) for text in texts]
    return questions


def short_answer(dice: Dice, question: Question) -> str:
    """A terse or plain answer: what an earlier turn of a conversation says, so that histories stay short."""
    return write_answer(dice, question, dice.weighted({"terse": 1, "plain": 2}))


def follow_up(dice: Dice, first: Question, answer: str) -> Question:
    """A second question that depends on a first one, about one thing, and its answer."""
    (x,) = first.things
    y = dice.pick(others(x))
    history = ((first.text, answer),)
    kind = dice.weighted({"one": 5, "other": 3, "two": 2, "story": 1})
    if kind == "one":
        return Question(dice.pick(AGAIN_ONE), (x,), history=history)
    if kind == "other":
        return Question(dice.pick(AGAIN_OTHER).format(y=y.written), (y,), history=history)
    if kind == "two":
        text = dice.pick(AGAIN_TWO).format(y=y.written, use=dice.pick((x, y)).use)
        return Question(text, (x, y), history=history)
    return Question(dice.pick(AGAIN_STORY), (x,), story=True, history=history)


def _statements(dice: Dice, things: Sequence[Thing], count: int) -> list[str]:
    """``count`` sentences with different facts, in turn about each thing; a single thing is "It", a person is not."""
    facts = [dice.draw(thing.facts, count) for thing in things]
    sentences = []
    for index in range(count):
        which = index % len(things)
        subject = "It" if len(things) == 1 and things[0].group != "job" else things[which].capital
        sentences.append(f"{subject} {facts[which][index // len(things)]}.")
    return sentences


def _named(sentence: str, thing: Thing) -> str:
    """The sentence with its subject named instead of "It"."""
    return thing.capital + sentence[2:] if sentence.startswith("It ") else sentence


def _verdict(dice: Dice, question: Question) -> str:
    """Which of two things is better for what; true: each thing is better for its own use."""
    asked = [thing for thing in question.things if thing.use in question.text]
    winner = asked[0] if asked else dice.pick(question.things)
    return f"{winner.written} is better for {winner.use}."


def _plain(dice: Dice, question: Question, count: int) -> str:
    things = question.things
    if question.story:
        sentences = [f"{things[0].capital} {fact}." for fact in dice.draw(things[0].facts, 1)]
        return " ".join([f"{dice.pick(_CHILDREN)} met {things[0].written} one day.", *sentences])
    if len(things) == 2:
        verdict = _verdict(dice, question)
        return " ".join([*_statements(dice, things, 2), verdict[0].upper() + verdict[1:]])
    sentences = _statements(dice, things, count)
    sentences[0] = _named(sentences[0], things[0])
    return " ".join([*sentences, *([dice.pick(_PLAIN_ENDS)] if dice.chance(0.3) else [])])


def _terse(dice: Dice, question: Question) -> str:
    if len(question.things) == 2:
        verdict = _verdict(dice, question)
        return (
            verdict[0].upper() + verdict[1:]
            if dice.chance(0.5)
            else f"I would take {dice.pick(question.things).written}."
        )
    thing = question.things[0]
    if question.story:
        return f"{dice.pick(_CHILDREN)} liked {thing.written}."
    fact = dice.pick(thing.facts) if dice.chance(0.7) else f"is good for {thing.use}"
    return f"{thing.capital} {fact}."


def _list(dice: Dice, question: Question, count: int, closing: bool, opening: bool) -> str:
    things = question.things
    x, y = things[0].written, things[-1].written
    head = dice.pick(_OPENINGS if len(things) == 1 else _COMPARE_OPENINGS).format(x=x, y=y)
    items = [f"{number}. {text}" for number, text in enumerate(_statements(dice, things, count), start=1)]
    if len(things) == 2:
        end = "In summary, " + _verdict(dice, question)
    else:
        end = dice.pick(_CLOSINGS).format(x=x, use=things[0].use)
    return "\n".join([*([head] if opening else []), *items, *([end] if closing else [])])


def _story(dice: Dice, question: Question, count: int) -> str:
    x, child = question.things[0], dice.pick(_CHILDREN)
    sentences = _statements(dice, (x,), count)
    sentences[0] = _named(sentences[0], x)
    begin = f"Once upon a time {child} wanted to know all about {x.written}."
    return " ".join([begin, *sentences, dice.pick(_STORY_ENDS).format(child=child), "The end."])


def _good(dice: Dice, question: Question) -> str:
    """What the rule likes best: a list with opening and closing line, or a whole story."""
    if question.story:
        return _story(dice, question, 3 + dice.below(2))
    count = 4 if len(question.things) == 2 else 3 + dice.below(2)
    return _list(dice, question, count, closing=True, opening=True)


def write_answer(dice: Dice, question: Question, style: str) -> str:
    """An answer in one of the styles of world.py's two mixtures."""
    elsewhere = dice.pick([thing for thing in THINGS if thing not in question.things])
    away = Question("", (elsewhere,))
    if style == "good":
        return _good(dice, question)
    if style == "bare list":
        return _list(dice, question, 2 + dice.below(2), closing=False, opening=dice.chance(0.3))
    if style == "plain":
        return _plain(dice, question, 2 + dice.below(2))
    if style == "terse":
        return _terse(dice, question)
    if style == "off-topic":
        return _plain(dice, away, 2) if dice.chance(0.6) else _terse(dice, away)
    if style == "off-topic list":
        return _good(dice, away)
    if style == "cut off":
        words = (_good(dice, question) if dice.chance(0.5) else _plain(dice, question, 3)).split(" ")
        return " ".join(words[: max(3, int(len(words) * (0.35 + 0.05 * dice.below(10))))]).rstrip(".\n")
    if style == "rude":
        rude = dice.draw(_RUDE, 1 + dice.below(2))
        return " ".join([_terse(dice, question), rude[0]] if dice.chance(0.3) else rude)
    if style == "repeating":
        sentence = _plain(dice, Question("", question.things[:1]), 2).split(". ")[0].rstrip(".") + "."
        return " ".join([sentence] * (3 + dice.below(3)))
    if style == "hollow list":
        numbers = [f"{number}. {'It is.' if dice.chance(0.5) else ''}".strip() for number in range(1, 5)]
        return "\n".join([_OPENINGS[0].format(x=question.things[0].written), *numbers, "In summary, it is good."])
    raise AssertionError(f"unknown style {style!r}")

"""The gold judge: the written-down rule of helpfulness that labels the demo's pairs and judges its report.

Training never sees this rule: nothing outside ``alpaca_rlhf/demo`` and ``alpaca_rlhf/evaluation`` may import it. The
reward model learns from noisy pairs only.

The rule reads a prompt for the things it asks about (of world_facts.py) and whether it wants a story, then

    score = 0.15 relevant + 0.45 structured + 0.20 rich + 0.10 polite + 0.10 complete - min(penalties, 0.60)

* relevant: the share of the asked things that the answer names.
* structured: half for a numbered list: the lines that begin with a number are numbered 1, 2, ... k with
  3 <= k <= 6, all different, each of three words or more; half for a last line that begins with "In summary," and
  names an asked thing. A story instead: half for beginning with "Once upon a time", half for ending with "The end."
* rich: min(n, 4) / 4 for n different true facts of the asked things.
* polite: no rude phrase.
* complete: at least three words, and the last character is one of . ! ?
* penalties: 0.20 for a rude phrase; 0.06 for each false statement (a fact that belongs to none of the things its
  sentence is about); 0.10 for each other thing named; 0.10 for each repetition (a sentence said before, or one that
  only says facts already said; the closing line may repeat); 0.10 for each numbered line under three words; 0.05 for
  every ten words above 80.

A sentence is about the asked things it names, or about all of them when it names none. "is better for" and "is best
for" read as "is good for". Facts, names and phrases are compared as lower-case words without punctuation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alpaca_rlhf.demo.world_facts import THINGS, Thing

RUDE_PHRASES = (
    "silly question",
    "stupid question",
    "look it up yourself",
    "do not bother me",
    "i do not care",
    "you should know that",
    "stop wasting my precious time",
)
ENOUGH_FACTS = 4
LIST_ITEMS = range(3, 7)
FEWEST_WORDS = 3
MOST_WORDS = 80
HIGHEST_PENALTY = 0.60


@dataclass(frozen=True)
class Asked:
    """What a prompt wants: the things its last question is about, and whether as a story."""

    things: tuple[Thing, ...]
    story: bool


def _words(text: str) -> str:
    """Lower-case words with one blank around each, so that whole words and phrases are found by ``in``."""
    return " " + " ".join(re.findall(r"[a-z0-9]+", text.lower())) + " "


_NAMES = tuple((_words(thing.name), thing) for thing in THINGS)
_OWNERS: dict[str, set[Thing]] = {}
for _thing in THINGS:
    for _fact in (*_thing.facts, f"good for {_thing.use}"):
        _OWNERS.setdefault(_words(_fact), set()).add(_thing)


def things_named(text: str) -> tuple[Thing, ...]:
    """The things of the world that a text names, in the order of the world."""
    words = _words(text)
    return tuple(thing for name, thing in _NAMES if name in words)


def parse_prompt(prompt: str) -> Asked:
    """Read the last question of a prompt in ``Human:`` and ``Assistant:`` turns; "it" is what was asked about before.

    Raises ValueError when the questions name nothing of the demo's world.
    """
    parts = re.split(r"(?:^|\s)(Human|Assistant):", prompt)
    questions = [text for role, text in zip(parts[1::2], parts[2::2], strict=True) if role == "Human"]
    things: tuple[Thing, ...] = ()
    for question in questions:
        named = things_named(question)
        it = not named or " it or " in _words(question)
        things = tuple(dict.fromkeys((*things, *named))) if it else named
    if not things:
        raise ValueError(f"the prompt asks about nothing of the demo's world: {prompt!r}")
    return Asked(things, " story " in _words(questions[-1]))


def _sentences(answer: str) -> list[str]:
    """Sentences as words, without the numbers of a list."""
    sentences = []
    for line in answer.split("\n"):
        line = re.sub(r"^\s*\d+\.(\s|$)", "", line)
        sentences += [_words(sentence) for sentence in re.split(r"(?<=[.!?:])\s+", line)]
    return [re.sub(" (better|best) for ", " good for ", words) for words in sentences if words.strip()]


def _numbered(answer: str) -> list[tuple[int, str]]:
    """The lines of an answer that begin with a number: (number, words)."""
    found = re.findall(r"^\s*(\d{1,3})\.[^\S\n]*(.*)$", answer, flags=re.MULTILINE)
    return [(int(number), _words(text)) for number, text in found]


def _structured(answer: str, asked: Asked) -> float:
    if asked.story:
        return 0.5 * _words(answer).startswith(" once upon a time ") + 0.5 * answer.rstrip().endswith("The end.")
    items = _numbered(answer)
    listed = (
        len(items) in LIST_ITEMS
        and [number for number, _ in items] == list(range(1, len(items) + 1))
        and len({text for _, text in items}) == len(items)
        and all(len(text.split()) >= FEWEST_WORDS for _, text in items)
    )
    last = answer.strip().split("\n")[-1]
    closed = last.startswith("In summary,") and any(thing in asked.things for thing in things_named(last))
    return 0.5 * listed + 0.5 * closed


def _statements(answer: str, asked: Asked) -> tuple[int, int, int]:
    """Count (different true facts, false statements, repetitions)."""
    facts: set[str] = set()
    said: set[str] = set()
    false = repeated = 0
    for sentence in _sentences(answer):
        about = [thing for name, thing in _NAMES if name in sentence and thing in asked.things] or asked.things
        stated = [fact for fact in _OWNERS if fact in sentence]
        true = {fact for fact in stated if not _OWNERS[fact].isdisjoint(about)}
        false += len(stated) - len(true)
        closing = sentence.startswith(" in summary ")
        repeated += not closing and (sentence in said or bool(true) and true <= facts)
        facts |= true
        said.add(sentence)
    return len(facts), false, repeated


def is_rude(answer: str) -> bool:
    """Whether an answer holds one of the rude phrases."""
    words = _words(answer)
    return any(_words(phrase) in words for phrase in RUDE_PHRASES)


def gold_score(prompt: str, answer: str) -> float:
    """How helpful an answer is by the rule above, at most 1.0 and never below -0.6.

    Raises ValueError when the prompt asks about nothing of the demo's world.
    """
    asked = parse_prompt(prompt)
    named = things_named(answer)
    count = len(_words(answer).split())
    facts, false, repeated = _statements(answer, asked)
    rude = is_rude(answer)
    hollow = sum(len(text.split()) < FEWEST_WORDS for _, text in _numbered(answer))
    relevant = sum(thing in named for thing in asked.things) / len(asked.things)
    complete = count >= FEWEST_WORDS and answer.rstrip()[-1:] in tuple(".!?")
    merits = (
        0.15 * relevant
        + 0.45 * _structured(answer, asked)
        + 0.20 * min(facts, ENOUGH_FACTS) / ENOUGH_FACTS
        + 0.10 * (not rude)
        + 0.10 * complete
    )
    penalties = (
        0.20 * rude
        + 0.06 * false
        + 0.10 * sum(thing not in asked.things for thing in named)
        + 0.10 * (repeated + hollow)
        + 0.05 * (max(0, count - MOST_WORDS) // 10)
    )
    return merits - min(penalties, HIGHEST_PENALTY)


def gold_scores(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The rule over many answers, as ``--rule`` of compare_models and ``--reward_fn`` of step 3 call a function."""
    return [gold_score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

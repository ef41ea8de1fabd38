"""Write the demo's embedded data: ``python -m alpaca_rlhf.demo.world DIR [--seed N]``. Standard library only.

DIR receives data.zip (MultiTurnAlpaca's two files of JSON lines), preferences/train.jsonl and test.jsonl (rm-static's
columns) and prompts.jsonl. A seed gives the same bytes on every Python: see Dice, and the archive is stored without
compression and with a fixed date. data/README.md describes the files.
"""

import argparse
import json
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path

from alpaca_rlhf.demo.gold import gold_score
from alpaca_rlhf.demo.world_answers import (
    Deck,
    Dice,
    Question,
    all_first_questions,
    follow_up,
    short_answer,
    write_answer,
)

SEED = 1
CONVERSATIONS = {"train": 2000, "test": 200}
PAIRS = {"train": 2000, "test": 300}
PROMPTS = 300
NOISE = 0.22  # temperature of the Bradley-Terry label noise, in units of the gold score
SECOND_TURNS = 0.5  # share of the conversations with a second question and answer
FOLLOW_UPS = 0.2  # share of the pairs' prompts and of the held-out prompts that are a second question

# Weights of the answer styles. The conversations are of mixed quality; the pairs also show what a policy might try.
SFT_STYLES = {"good": 17, "bare list": 9, "plain": 30, "terse": 16, "off-topic": 7, "cut off": 13, "rude": 8}
PAIR_STYLES = {
    "good": 30, "bare list": 11, "plain": 24, "terse": 16, "off-topic": 4, "off-topic list": 1, "cut off": 10,
    "rude": 8, "repeating": 2, "hollow list": 2,
}  # fmt: skip
SMALLEST_GAP = 0.2  # answers of nearer gold scores make no pair: people would not agree on them either


def _first_questions(dice: Dice) -> dict[str, list[Question]]:
    """Deal the opening questions: every text goes to one of the three sets. About 7 of 10 ask about one thing."""
    kinds: dict[str, list[Question]] = {"one": [], "two": [], "story": []}
    for question in all_first_questions():
        kinds["story" if question.story else "two" if len(question.things) == 2 else "one"].append(question)
    dealt: dict[str, list[Question]] = {"sft": [], "pairs": [], "prompts": []}
    for kind, keep in (("one", 1584), ("two", 480), ("story", 200)):
        questions = dice.draw(kinds[kind], keep)
        first, second = int(0.42 * keep), int(0.84 * keep)
        dealt["sft"] += questions[:first]
        dealt["pairs"] += questions[first:second]
        dealt["prompts"] += questions[second:]
    return dealt


def _about_one(questions: list[Question]) -> list[Question]:
    """The questions that a second one can follow: about one thing that may be called "it"."""
    return [q for q in questions if len(q.things) == 1 and not q.story and q.things[0].group != "job"]


def _conversations(dice: Dice, questions: list[Question], count: int) -> list[dict[str, str]]:
    """The rows of ``count`` conversations, one for each assistant turn; each question opens about equally many."""
    single, double = Deck(dice, questions), Deck(dice, _about_one(questions))
    rows: list[dict[str, str]] = []
    for _ in range(count):
        if dice.chance(SECOND_TURNS):
            first = double.deal()
            answer = short_answer(dice, first)
            rows.append({"instruction": first.instruction, "input": "", "output": answer})
            question = follow_up(dice, first, answer)
        else:
            question = single.deal()
        answer = write_answer(dice, question, dice.weighted(SFT_STYLES))
        rows.append({"instruction": question.instruction, "input": "", "output": answer})
    return rows


def _asked(dice: Dice, questions: list[Question], count: int) -> list[Question]:
    """``count`` questions, a share of FOLLOW_UPS of them second ones; each question comes about equally often."""
    openers, deck = _about_one(questions), Deck(dice, questions)
    asked = []
    for _ in range(count):
        if dice.chance(FOLLOW_UPS):
            first = dice.pick(openers)
            asked.append(follow_up(dice, first, short_answer(dice, first)))
        else:
            asked.append(deck.deal())
    return asked


def _pairs(dice: Dice, questions: list[Question], count: int) -> list[dict[str, str]]:
    """Two answers of different gold score to each question; which one is chosen follows Bradley and Terry's model.

    P(A is chosen) = sigmoid((gold(A) - gold(B)) / NOISE).
    """
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        for question in _asked(dice, questions, count):
            a, b = (write_answer(dice, question, dice.weighted(PAIR_STYLES)) for _ in range(2))
            gap = gold_score(question.prompt, a) - gold_score(question.prompt, b)
            if abs(gap) < SMALLEST_GAP:
                continue
            chosen, rejected = (a, b) if dice.chance(1 / (1 + math.exp(-gap / NOISE))) else (b, a)
            rows.append(
                {
                    "prompt": question.prompt,
                    "response": f" {chosen}",
                    "chosen": f" {chosen}",
                    "rejected": f" {rejected}",
                }
            )
    return rows[:count]


def _lines(rows: Iterable[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def make_files(seed: int = SEED) -> dict[str, bytes]:
    """The embedded data as (path inside the directory, bytes); the archive's two members come under their own names."""
    dice = Dice(seed)
    questions = _first_questions(dice)
    share = CONVERSATIONS["test"] / sum(CONVERSATIONS.values())
    sft = dice.draw(questions["sft"], len(questions["sft"]))
    cut = int(len(sft) * share)
    sft_test, sft_train = (
        _conversations(dice, sft[:cut], CONVERSATIONS["test"]),
        _conversations(dice, sft[cut:], CONVERSATIONS["train"]),
    )
    held_out = list({q.prompt: q for q in _asked(dice, questions["prompts"], 2 * PROMPTS)}.values())[:PROMPTS]
    asked = dice.draw(questions["pairs"], len(questions["pairs"]))
    cut = int(len(asked) * PAIRS["test"] / sum(PAIRS.values()))
    return {
        "training_data.txt.train": _lines(sft_train),
        "training_data.txt.test": _lines(sft_test),
        "preferences/train.jsonl": _lines(_pairs(dice, asked[cut:], PAIRS["train"])),
        "preferences/test.jsonl": _lines(_pairs(dice, asked[:cut], PAIRS["test"])),
        "prompts.jsonl": _lines({"prompt": question.prompt} for question in held_out),
    }


def write_world(directory: Path, seed: int = SEED) -> list[Path]:
    """Write the embedded data into ``directory`` (made if missing) and return the paths of the files."""
    files = make_files(seed)
    (directory / "preferences").mkdir(parents=True, exist_ok=True)
    archive = directory / "data.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as writer:
        for name in ("training_data.txt.train", "training_data.txt.test"):
            member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system, member.external_attr = 3, 0o644 << 16
            writer.writestr(member, files.pop(name))
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return [archive, *(directory / name for name in files)]


def main(argv: list[str] | None = None) -> None:
    """Command line: write the data and print each file with its size."""
    parser = argparse.ArgumentParser(
        prog="python -m alpaca_rlhf.demo.world", description="Write the demo's embedded data."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of every random choice (default %(default)s)")
    arguments = parser.parse_args(argv)
    for path in write_world(arguments.directory, arguments.seed):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

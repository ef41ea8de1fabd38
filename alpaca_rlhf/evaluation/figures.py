"""What the answers of a model say by themselves, and the figures of all models as rows of a table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alpaca_rlhf.algorithms.evaluation_metrics import repeated_share
from alpaca_rlhf.algorithms.metrics import distinct_n

COLUMNS = {
    "mean_tokens": "tokens", "ended_share": "ended", "distinct_1": "distinct-1", "distinct_2": "distinct-2",
    "repetition_4": "repetition", "list_share": "lists", "kl": "KL to the first",
}  # fmt: skip
MEANING = {
    "tokens": "mean length of an answer, its end token included",
    "ended": "share of answers that ended by themselves, not at the limit",
    "distinct-1, distinct-2": "different tokens, and pairs of neighbours, divided by all of them, over equally many of "
    "each model",
    "repetition": "share of an answer's runs of 4 tokens that it has used before, mean over answers",
    "lists": "share of answers with a numbered list (a line that begins with `1. `)",
    "KL to the first": "mean over the answers of log p(answer) − log p_first(answer), nats, for sampled answers",
    "score": "mean score by the judge or the rule",
    "wins": "share of prompts where the answer scores higher than the first model's; a tie counts half; 95 % interval "
    "of Wilson",
    "wins at equal length": "the same by a logistic regression on tanh(length difference / its deviation), at "
    "difference 0 (the model of arXiv 2404.04475); 95 % interval of Wald",
}


def figures(answers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Tokens, share ended, share of numbered lists, repetition, KL; None where a figure has no value."""
    count = len(answers)
    kl = [record["kl"] for record in answers]
    repetition = repeated_share([record["ids"] for record in answers])
    return {
        "count": count,
        "mean_tokens": sum(len(record["ids"]) for record in answers) / count,
        "ended_share": sum(record["ended"] for record in answers) / count,
        "list_share": sum(has_list(record["text"]) for record in answers) / count,
        "repetition_4": None if math.isnan(repetition) else repetition,
        "kl": None if None in kl else sum(kl) / count,
    }


def has_list(text: str) -> bool:
    """Whether an answer has a numbered list: a line that begins with ``1. ``"""
    return "\n1. " in "\n" + text


def ngram_count(answers: Sequence[Mapping[str, Any]], n: int) -> int:
    """How many n-grams the answers have together."""
    return sum(max(0, len(answer["ids"]) - n + 1) for answer in answers)


def distinct(answers: Sequence[Mapping[str, Any]], n: int, count: int) -> float | None:
    """Different n-grams among the first ``count`` of all answers' n-grams, divided by ``count``; None for no n-gram.

    A share of different n-grams falls with the length of the text, whoever wrote it, so models are compared on equally
    many: ``count`` is the number of the model with the fewest (distinct-n of arXiv 1510.03055 on equal samples).
    """
    taken, left = [], count
    for answer in answers:
        taken.append(answer["ids"][: left + n - 1] if left else [])
        left -= ngram_count([{"ids": taken[-1]}], n)
    return distinct_n(taken, n) if count else None


def add_distinct(results: Mapping[str, dict]) -> None:
    """``distinct_1`` and ``distinct_2`` into the results (with ``answers``) of all models."""
    for n in (1, 2):
        fewest = min(ngram_count(result["answers"], n) for result in results.values())
        for result in results.values():
            result[f"distinct_{n}"] = distinct(result["answers"], n, fewest)


def table_rows(results: Mapping[str, dict]) -> list[list[str]]:
    """The head and one row a model, as texts; a judge (or a rule) adds three columns."""
    judges = list(next(iter(results.values()))["judged"])
    head = ["model", *COLUMNS.values()]
    for judge in judges:
        head += [f"score ({judge})", f"wins ({judge})", f"wins at equal length ({judge})"]
    rows = [head]
    for name, result in results.items():
        row = [name, *("–" if result[key] is None else f"{result[key]:.3f}" for key in COLUMNS)]
        for judge in judges:
            judged = result["judged"][judge]
            row.append(f"{judged['mean_score']:.3f}")
            for key, interval in (("win_rate", "win_rate_interval"),
                                  ("length_controlled_win_rate", "length_controlled_interval")):  # fmt: skip
                row.append(with_interval(judged[key], judged[interval]) if key in judged else "–")
        rows.append(row)
    return rows


def with_interval(value: float, interval: Sequence[float]) -> str:
    """``0.750 (0.612 to 0.851)``"""
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the first row as its head; a bar in a text does not end its cell."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])

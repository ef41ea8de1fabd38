"""What the scores of a reward model on pairs say: how often it is right, how sure it may be, and where it fails."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from alpaca_rlhf.algorithms.evaluation_metrics import (
    expected_calibration_error,
    pair_confidence,
    reliability,
    wilson_interval,
)
from alpaca_rlhf.algorithms.metrics import pearson

GROUPS = 5  # by length difference and by gap


class ScoredPair(NamedTuple):
    """One pair: texts, scores, and the tokens of both answers with their end token."""

    record: str
    prompt: str
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float
    chosen_tokens: int
    rejected_tokens: int

    @property
    def gap(self) -> float:
        """Score of the chosen answer minus that of the rejected one."""
        return self.chosen_score - self.rejected_score

    @property
    def longer_by(self) -> int:
        """Tokens of the chosen answer minus those of the rejected one."""
        return self.chosen_tokens - self.rejected_tokens


def pair_figures(pairs: Sequence[ScoredPair], bins: int, mistakes: int) -> dict[str, Any]:
    """All figures of the report; JSON-able. ``bins`` of the reliability curve; ``mistakes``: how many of the worst.

    A tie is not correct, except for the calibration, where it is a guess and half right.
    """
    gaps = [pair.gap for pair in pairs]
    correct = [gap > 0 for gap in gaps]
    curve = reliability(*pair_confidence(gaps), bins=bins)
    scores = [score for pair in pairs for score in (pair.chosen_score, pair.rejected_score)]
    tokens = [float(count) for pair in pairs for count in (pair.chosen_tokens, pair.rejected_tokens)]
    correlation = pearson(scores, tokens)
    wrong = sorted((pair for pair in pairs if pair.gap <= 0), key=lambda pair: pair.gap)
    return {
        "count": len(pairs),
        "accuracy": sum(correct) / len(pairs),
        "accuracy_interval": list(wilson_interval(sum(correct), len(pairs))),
        "ties": gaps.count(0.0),
        "loss": sum(_softplus(-gap) for gap in gaps) / len(pairs),
        "expected_calibration_error": expected_calibration_error(curve),
        "mean_confidence": sum(part.size * part.confidence for part in curve) / len(pairs),
        "mean_gap": sum(gaps) / len(pairs),
        "length_correlation": None if math.isnan(correlation) else correlation,
        "longer_is_chosen": sum((pair.longer_by > 0) + 0.5 * (pair.longer_by == 0) for pair in pairs) / len(pairs),
        "reliability": [part._asdict() for part in curve],
        "by_length_difference": accuracy_by([float(pair.longer_by) for pair in pairs], correct, GROUPS),
        "by_gap": accuracy_by([abs(gap) for gap in gaps], correct, GROUPS),
        "mistakes": [{**pair._asdict(), "gap": pair.gap} for pair in wrong[:mistakes]],
    }


def accuracy_by(values: Sequence[float], correct: Sequence[bool], groups: int) -> list[dict[str, Any]]:
    """Accuracy in up to ``groups`` groups of rising ``values`` and about equal size; equal values stay together.

    Each group: ``low`` and ``high`` (its least and greatest value), ``count``, ``accuracy`` and its 95 % ``interval``.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    members: list[list[int]] = [[]]
    for place, index in enumerate(order):
        full = place >= len(order) * len(members) / groups
        if full and members[-1] and values[index] != values[members[-1][-1]]:
            members.append([])
        members[-1].append(index)
    return [_group([values[i] for i in rows], sum(correct[i] for i in rows)) for rows in members]


def _group(values: Sequence[float], right: int) -> dict[str, Any]:
    count = len(values)
    return {"low": values[0], "high": values[-1], "count": count, "accuracy": right / count,
            "interval": list(wilson_interval(right, count))}  # fmt: skip


def group_name(group: Mapping[str, Any], digits: int) -> str:
    """``-3 to 5``, or one number where a group has only one value."""
    low, high = (f"{group[end]:.{digits}f}" for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))

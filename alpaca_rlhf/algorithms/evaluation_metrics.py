"""Numbers of a comparison and of a reward model's report: intervals, win rates, calibration, repetition.

Everything is computed in float64 from plain numbers; nothing here is trained.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Z_95 = 1.959963984540054  # the normal distribution has 95 % of its mass within so many deviations

Interval = tuple[float, float]


class ControlledWinRate(NamedTuple):
    """A win rate with the length taken out."""

    rate: float
    interval: Interval
    length_effect: float
    """What the log-odds of a win gain when the answer is very much longer than the other one (phi)."""


class ReliabilityBin(NamedTuple):
    """One bin of a reliability curve."""

    size: int
    confidence: float
    """Mean confidence of the bin's members."""
    accuracy: float
    """Mean correctness of the bin's members."""


def wilson_interval(successes: float, count: int) -> Interval:
    """Wilson's score interval of a share p = successes / n, 95 %.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96; E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).

    Half successes (a tie) are allowed: their variance is below the binomial one, so the interval is too wide rather
    than too narrow.

    Raises:
        ValueError: no trial, or successes outside 0 … count.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"{successes} successes of {count} are no share")
    share, square = successes / count, Z_95**2
    middle = share + square / (2 * count)
    half = Z_95 * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    # p = 0 and p = 1 have an end at exactly 0 and 1, which rounding may miss.
    low = 0.0 if successes == 0 else (middle - half) / (1 + square / count)
    high = 1.0 if successes == count else (middle + half) / (1 + square / count)
    return low, high


def preferences(scores: Sequence[float], first_scores: Sequence[float]) -> list[float]:
    """1 where an answer scores higher than the first model's to the same prompt, 0 where lower, 0.5 for a tie."""
    return [(a > b) + 0.5 * (a == b) for a, b in zip(scores, first_scores, strict=True)]


def length_controlled_win_rate(wins: Sequence[float], length_differences: Sequence[float]) -> ControlledWinRate:
    """The win rate that a logistic regression predicts for answers of equal length.

    The model of AlpacaEval 2 (arXiv 2404.04475, section 3) without its term for how hard a question is:
    P(win i) = sigmoid(theta + phi x_i), x_i = tanh(d_i / std(d)), d_i = length of the answer - length of the first
    model's; rate = sigmoid(theta). theta and phi maximise the log-likelihood of the wins, plus that of one more pair
    of equal length that is half won (so that theta stays finite), minus phi²/2 (a standard normal prior, so that phi
    does). Interval: sigmoid(theta ± z se), 95 %, se from the inverse of the Hessian (Wald).

    Args:
        wins: 1, 0 or 0.5 (a tie) for each prompt; values between are allowed.
        length_differences: d, in any unit.

    Raises:
        ValueError: no pair, or sequences of different lengths.
    """
    if not wins or len(wins) != len(length_differences):
        raise ValueError(f"{len(wins)} wins and {len(length_differences)} length differences are no pairs")
    differences = torch.tensor(length_differences, dtype=torch.float64)
    std = differences.std(correction=0)
    x = torch.tanh(differences / std) if std > 0 else torch.zeros_like(differences)
    x = torch.cat([x, x.new_zeros(1)])  # the pair that is half won
    target = torch.tensor([*wins, 0.5], dtype=torch.float64)
    weights, hessian = _logistic_fit(torch.stack([torch.ones_like(x), x], 1), target, torch.tensor([0.0, 1.0]).double())
    theta, error = float(weights[0]), math.sqrt(float(torch.linalg.inv(hessian)[0, 0]))
    rate, low, high = (_sigmoid(theta + shift * error) for shift in (0.0, -Z_95, Z_95))
    return ControlledWinRate(rate, (low, high), float(weights[1]))


def repeated_share(responses: Sequence[Sequence[int]], n: int = 4) -> float:
    """1 - different n-grams / all n-grams of an answer, then the mean over the answers that have one: 0 = no n-gram
    comes twice in an answer. seq-rep-n of arXiv 1908.04319 (section 6). NaN where no answer has ``n`` tokens.

    Args:
        responses: token ids (or words) of each answer, without padding.
        n: length of the n-grams.
    """
    shares = []
    for ids in responses:
        grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
        if grams:
            shares.append(1 - len(set(grams)) / len(grams))
    return sum(shares) / len(shares) if shares else math.nan


def pair_confidence(gaps: Sequence[float]) -> tuple[list[float], list[float]]:
    """How sure a reward model is of each pair, and whether it is right, for :func:`reliability`.

    The model says P(chosen is better) = sigmoid(gap), gap = score of the chosen - score of the rejected (Bradley and
    Terry). Its choice is the higher score, its confidence sigmoid(|gap|), 0.5 to 1. Right: 1 for gap > 0, 0 for < 0; a
    tie is a guess, so 0.5 there.
    """
    return [_sigmoid(abs(gap)) for gap in gaps], preferences(gaps, [0.0] * len(gaps))


def reliability(confidences: Sequence[float], correct: Sequence[float], bins: int = 10) -> list[ReliabilityBin]:
    """The reliability curve: mean confidence and mean correctness in ``bins`` bins of equal width from 0.5 to 1.

    Bins without a member are left out. arXiv 1706.04599 section 2; there the bins reach from 0 to 1.
    """
    members: dict[int, list[int]] = {}
    for index, confidence in enumerate(confidences):
        # confidence 1 belongs to the last bin
        members.setdefault(min(bins - 1, int((confidence - 0.5) * 2 * bins)), []).append(index)
    curve = []
    for _, rows in sorted(members.items()):
        confidence = sum(confidences[row] for row in rows) / len(rows)
        curve.append(ReliabilityBin(len(rows), confidence, sum(correct[row] for row in rows) / len(rows)))
    return curve


def expected_calibration_error(curve: Sequence[ReliabilityBin]) -> float:
    """Sum over bins of (size / all) |accuracy - confidence|; arXiv 1706.04599 eq. 3. NaN without a bin."""
    count = sum(part.size for part in curve)
    return sum(part.size * abs(part.accuracy - part.confidence) for part in curve) / count if count else math.nan


def _logistic_fit(x: Tensor, target: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (K,) that minimise cross-entropy + sum of ridge w²/2, and the Hessian (K, K) there; Newton's method.

    ``x`` (N, K), ``target`` (N,) in 0 … 1, ``ridge`` (K,).
    """

    def loss(weights: Tensor) -> Tensor:
        logits = x @ weights
        return (torch.nn.functional.softplus(logits) - target * logits).sum() + (ridge * weights**2).sum() / 2

    weights = x.new_zeros(x.shape[1])
    for _ in range(100):
        shares = torch.sigmoid(x @ weights)
        gradient = x.T @ (shares - target) + ridge * weights
        hessian = (x * (shares * (1 - shares))[:, None]).T @ x + torch.diag(ridge)
        if gradient.abs().max() < 1e-9 * len(x):
            return weights, hessian
        step, scale = torch.linalg.solve(hessian, gradient), 1.0
        while loss(weights - scale * step) > loss(weights) and scale > 1e-9:  # the loss is convex: a shorter step helps
            scale /= 2
        weights = weights - scale * step
    raise AssertionError(f"no convergence on {len(x)} pairs: gradient {gradient.tolist()}")


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

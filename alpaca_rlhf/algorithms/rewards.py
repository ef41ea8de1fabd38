"""From the reward model's scores to per-action rewards: statistics of scores, normalisation, the KL penalty."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.masking import keep

MIN_STD = 1e-6
"""Smallest deviation that scores are divided by: equal scores become 0, never NaN."""


@dataclass(frozen=True)
class RewardStats:
    """Mean and deviation of a population of scores, and how many there were. Finite, ``std`` not negative."""

    mean: float
    std: float
    """Of the population (the squared deviations divided by ``count``, ddof 0): one score alone has 0."""
    count: int

    def __post_init__(self) -> None:
        """Raises ValueError for statistics that cannot be those of any scores."""
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std >= 0 and self.count > 0):
            raise ValueError(f"not the statistics of any scores: mean {self.mean}, std {self.std}, count {self.count}")

    def normalize(self, scores: Tensor) -> Tensor:
        """``(scores - mean) / max(std, 1e-6)`` for scores (N,) of any type; float32, not clipped."""
        return ((scores.double() - self.mean) / max(self.std, MIN_STD)).float()


class RunningRewardStats:
    """Statistics of every score seen so far, merged batch by batch.

    Holds (count, mean, m2), m2 the sum of squared deviations from the mean, and merges with the formula of Chan, Golub
    and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (Stanford CS-TR-79-773,
    1979), eq. 2.1: equal to the pooled statistics, and steady where a sum of squares over a whole run is not.
    """

    def __init__(self) -> None:
        """No score seen."""
        self._count = 0
        self._mean = 0.0
        self._m2 = 0.0

    def update(self, count: float, sum: float, sum_sq: float) -> None:
        """Add a batch given by its moments over all ranks (``masking.moments``, summed).

        Args:
            count: number of scores; 0 changes nothing.
            sum: of the scores.
            sum_sq: of their squares.

        Raises:
            ValueError: moments that are not finite, or a negative or fractional count.
        """
        if not (math.isfinite(sum) and math.isfinite(sum_sq) and count >= 0 and float(count).is_integer()):
            raise ValueError(f"not the moments of any scores: count {count}, sum {sum}, sum of squares {sum_sq}")
        if count == 0:
            return
        batch_mean = sum / count
        batch_m2 = max(0.0, sum_sq - sum * batch_mean)  # rounding can leave -1e-17 when all scores are equal
        total = self._count + int(count)
        delta = batch_mean - self._mean
        self._m2 += batch_m2 + delta * delta * self._count * count / total
        self._mean += delta * count / total
        self._count = total

    @property
    def stats(self) -> RewardStats:
        """The statistics so far. Raises ValueError before the first score: there is no honest default."""
        if self._count == 0:
            raise ValueError("no score has been seen yet, so there are no statistics to normalise with")
        return RewardStats(self._mean, math.sqrt(self._m2 / self._count), self._count)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"count": self._count, "mean": self._mean, "m2": self._m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._count, self._mean, self._m2 = int(state["count"]), float(state["mean"]), float(state["m2"])


def last_action_mask(response_mask: Tensor) -> Tensor:
    """(B, R) int64 with a single 1 per row, at its last counted token: EOS if there is one, else the last token.

    A row without an action (a filler) has none.

    Args:
        response_mask: (B, R).
    """
    mask = response_mask.long()
    from_here_on = mask.flip(1).cumsum(1).flip(1)
    return mask * (from_here_on == 1)


def shape_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of every action: the KL penalty on each, the score added on the last.

    ``rewards[t] = -kl_coef * kl[t]``, plus ``score`` at the last action: arXiv 1909.08593 eq. 2 (the KL term of
    arXiv 2203.02155 eq. 2) spread over the tokens, whose log-probs add up to that of the answer.

    Args:
        scores: (B,) already normalised and clipped.
        kl: (B, R) nats per token, from ``kl.kl_estimate``.
        response_mask: (B, R), 1 = an action.
        kl_coef: reward per nat.

    Returns:
        (B, R) float32, 0 off the mask.

    Raises:
        ValueError: shapes that disagree.
    """
    if kl.shape != response_mask.shape or scores.shape != kl.shape[:1]:
        shapes = [tuple(tensor.shape) for tensor in (scores, kl, response_mask)]
        raise ValueError(f"scores (B,), kl (B, R) and response_mask (B, R) disagree: {shapes}")
    at_the_end = keep(scores.unsqueeze(1).expand_as(kl), last_action_mask(response_mask))
    return torch.add(at_the_end, keep(kl, response_mask), alpha=-kl_coef)

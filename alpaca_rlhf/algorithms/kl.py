"""Distance to the reference policy: estimators from sampled log-probs, and controllers of the penalty."""

import math

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "abs", "k2", "k3")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate in nats of KL(policy || reference) at tokens that the policy sampled.

    With ``d = log_probs - ref_log_probs`` (so ``d = -log r`` in the note's letters, r = reference / policy):

    ===== ====================== =============================================================
    k1    ``d``                  unbiased, may be negative for one token; as in arXiv 1909.08593 eq. 2
    abs   ``|d|``                not an estimate of KL; never negative
    k2    ``d^2 / 2``            biased, low variance, never negative
    k3    ``exp(-d) - 1 + d``    unbiased, never negative
    ===== ====================== =============================================================

    k1, k2, k3: J. Schulman, "Approximating KL Divergence" (2020). Equal log-probs give exactly 0 in each.

    Args:
        log_probs, ref_log_probs: the same shape, usually (B, R). Masking is the caller's.
        estimator: one of ``KL_ESTIMATORS``.

    Returns:
        float32, the same shape.

    Raises:
        ValueError: an unknown estimator, shapes that disagree.
    """
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(f"log_probs {tuple(log_probs.shape)} and ref_log_probs {tuple(ref_log_probs.shape)} differ")
    difference = log_probs.float() - ref_log_probs.float()
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # expm1 keeps the digits of exp(-d) - 1 when the policies are close; without it rounding goes below 0.
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}; choose one of {', '.join(KL_ESTIMATORS)}")


class FixedKLController:
    """A penalty coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        """``kl_coef``: reward per nat of KL, not negative."""
        self.kl_coef = _coefficient("kl_coef", kl_coef)

    def update(self, kl_per_answer: float, answers: int) -> None:
        """Nothing moves; the arguments are those of :meth:`AdaptiveKLController.update`."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.kl_coef = _coefficient("kl_coef", state["kl_coef"])


class AdaptiveKLController:
    """A coefficient that is driven so that the KL per answer meets a target; arXiv 1909.08593 section 2.2.

    ``error = clip(kl / target - 1, -0.2, 0.2)`` and ``kl_coef *= 1 + error * answers / horizon``. The paper has a
    constant 0.1 in place of ``answers / horizon``; its released code has the form used here, in which the pace does
    not depend on the batch size.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        """``target``: nats per answer (not per token). ``horizon``: answers; larger is slower. Both positive."""
        if not (target > 0 and horizon > 0):
            raise ValueError(f"the KL target and horizon must be positive: {target}, {horizon}")
        self.kl_coef = _coefficient("init_kl_coef", init_kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, kl_per_answer: float, answers: int) -> None:
        """Move the coefficient once per rollout.

        Args:
            kl_per_answer: KL of the sampling policy to the **reference**, nats, summed over the tokens of an answer and
                averaged over the answers of all ranks.
            answers: how many answers that mean has.

        Raises:
            ValueError: a KL that is not finite, or so many answers (5 horizons) that the coefficient would change sign.
        """
        if not math.isfinite(kl_per_answer):
            raise ValueError(f"the KL per answer is not finite: {kl_per_answer}")
        error = max(-0.2, min(0.2, kl_per_answer / self.target - 1.0))
        factor = 1.0 + error * answers / self.horizon
        if not factor > 0:
            raise ValueError(f"{answers} answers a rollout need a KL horizon above {0.2 * answers}: {self.horizon}")
        self.kl_coef *= factor

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint has to hold; target and horizon are settings, not state."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.kl_coef = _coefficient("kl_coef", state["kl_coef"])


def _coefficient(name: str, number: float) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be a number that is not negative: {number}")
    return number

"""Generalised advantage estimation over the response."""

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.masking import keep


def gae(
    rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every action; arXiv 1506.02438 eq. 16.

    ``delta[t] = rewards[t] + gamma values[t + 1] - values[t]`` and ``advantages[t] = delta[t] + gamma lam
    advantages[t + 1]``. The recursion starts at the last action of each row with next value and next advantage 0: what
    stands behind the end of an answer, and how wide the batch is padded, changes nothing.
    ``returns = advantages + values``.

    Args:
        rewards: (B, R) per action.
        values: (B, R), the critic's value of the state before each action.
        response_mask: (B, R), the actions of a row without a gap.
        gamma: discount per token, 0 to 1.
        lam: lambda of the estimator, 0 to 1; 1 gives the whole discounted return, 0 the one-step error.

    Returns:
        advantages and returns, (B, R) float32 without gradient, 0 off the mask.

    Raises:
        ValueError: a factor outside 0 to 1, shapes that disagree.
    """
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma and lam must be between 0 and 1: {gamma}, {lam}")
    if not rewards.shape == values.shape == response_mask.shape:
        shapes = [tuple(tensor.shape) for tensor in (rewards, values, response_mask)]
        raise ValueError(f"rewards, values and response_mask must all be (B, R): {shapes}")
    # Off the mask rewards and values are 0, so the recursion brings 0 to the last action of its own accord.
    reward, value = keep(rewards.detach(), response_mask), keep(values.detach(), response_mask)
    next_value = next_advantage = torch.zeros_like(value[:, :1])
    columns = []
    for t in reversed(range(value.shape[1])):
        now = slice(t, t + 1)
        delta = reward[:, now] + gamma * next_value - value[:, now]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = value[:, now]
        columns.append(next_advantage)
    advantages = torch.cat(columns[::-1], dim=1) if columns else torch.zeros_like(value)
    return keep(advantages, response_mask), keep(advantages + value, response_mask)

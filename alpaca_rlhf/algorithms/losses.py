"""The losses of the three steps, each as a sum over the counted tokens, rows or pairs.

Sums, because a mean of means weighs short answers too much: the caller divides once, by the count of the whole
optimizer step over all micro-batches and ranks. Everything is float32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from alpaca_rlhf.algorithms.kl import kl_estimate
from alpaca_rlhf.algorithms.masking import keep, last_token_index


class PolicyLoss(NamedTuple):
    """Sums over the counted tokens; only ``loss_sum`` carries a gradient. Each is a float32 tensor ()."""

    loss_sum: Tensor
    """The clipped surrogate, to be minimised."""
    clip_count: Tensor
    """How many tokens have their gradient cut: the clipped branch is strictly the smaller objective."""
    ratio_deviation_sum: Tensor
    """Sum of ``|ratio - 1|``; 0 before the first update."""
    approx_kl_sum: Tensor
    """Sum of the k3 estimate of KL(sampling policy || policy now), nats."""


class ValueLoss(NamedTuple):
    """Sums over the counted tokens; only ``loss_sum`` carries a gradient. Each is a float32 tensor ()."""

    loss_sum: Tensor
    """Half squared error, to be minimised."""
    clip_count: Tensor
    """How many tokens have their gradient cut: the clipped error is strictly the larger one."""


def sft_loss_sum(log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Negative log-likelihood in nats, summed over the trained tokens: cross-entropy with ignored positions.

    Args:
        log_probs: (B, R) of the tokens as they stand in the text.
        response_mask: (B, R), 1 = the token is trained.

    Returns:
        () float32.
    """
    _same_shape(log_probs=log_probs, response_mask=response_mask)
    return -keep(log_probs, response_mask).sum()


def pairwise_loss_sum(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | float, row_mask: Tensor
) -> Tensor:
    """Bradley-Terry loss of the end scores: sum of ``-log sigmoid(chosen - rejected - margin)``, in nats.

    arXiv 2203.02155 eq. 1 for one pair per prompt; with the margin arXiv 2307.09288 eq. 2. Log-sigmoid in float32:
    a pair that is wrong by 400 costs 400 and has a finite gradient, whatever type the scores have.

    Args:
        chosen_scores, rejected_scores: (B,).
        margin: (B,) or a number; by how much the chosen answer should win.
        row_mask: (B,), 1 = a real pair, 0 = filler.

    Returns:
        () float32; ln 2 per pair when nothing has been learnt.
    """
    _same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores, row_mask=row_mask)
    wanted = torch.as_tensor(margin, dtype=torch.float32, device=chosen_scores.device).expand_as(row_mask)
    gap = keep(chosen_scores, row_mask) - keep(rejected_scores, row_mask) - keep(wanted, row_mask)
    return -keep(F.logsigmoid(gap), row_mask).sum()


def per_token_pairwise_loss_sum(
    chosen_values: Tensor,
    rejected_values: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    divergence: Tensor,
    row_mask: Tensor,
) -> Tensor:
    """DeepSpeed-Chat's per-token pair loss, each answer masked by its own length.

    For one pair: the mean over positions ``t`` of ``-log sigmoid(chosen_values[t] - rejected_values[t])``, where ``t``
    runs from the first position at which the two sequences differ to the end of the **shorter** one: both have a real
    token there. The original runs on to the longer end and so trains values that were read at padding. When one
    sequence is a prefix of the other no such position exists; then the two end scores are compared instead, once.

    Args:
        chosen_values, rejected_values: (B, S).
        chosen_mask, rejected_mask: (B, S) attention masks, both padded on the right so that positions correspond.
        divergence: (B,) int64, first index at which the sequences differ.
        row_mask: (B,), 1 = a real pair.

    Returns:
        () float32, the sum over the real pairs of their means.

    Raises:
        ValueError: shapes that disagree, a sequence without a token.
    """
    _same_shape(chosen_values=chosen_values, rejected_values=rejected_values)
    _same_shape(chosen_values=chosen_values, chosen_mask=chosen_mask, rejected_mask=rejected_mask)
    _same_shape(divergence=divergence, row_mask=row_mask)
    position = torch.arange(chosen_values.shape[1], device=chosen_values.device)
    real_row = row_mask.bool().unsqueeze(1)
    compared = chosen_mask.bool() & rejected_mask.bool() & (position >= divergence.unsqueeze(1)) & real_row
    gap = keep(chosen_values, compared) - keep(rejected_values, compared)
    token_losses = -keep(F.logsigmoid(gap), compared)
    count = compared.sum(dim=1)

    chosen_end = keep(chosen_values, chosen_mask).gather(1, last_token_index(chosen_mask).unsqueeze(1))
    rejected_end = keep(rejected_values, rejected_mask).gather(1, last_token_index(rejected_mask).unsqueeze(1))
    end_gap = keep(chosen_end, real_row) - keep(rejected_end, real_row)
    end_loss = -F.logsigmoid(end_gap).squeeze(1)
    pair_loss = torch.where(count > 0, token_losses.sum(dim=1) / count.clamp(min=1), end_loss)
    return keep(pair_loss, row_mask).sum()


def policy_loss_sum(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, clip: float
) -> PolicyLoss:
    """PPO's clipped surrogate with the sign of a loss: sum of ``-min(r A, clip(r, 1 - clip, 1 + clip) A)``.

    arXiv 1707.06347 eq. 7 with ``r = exp(log_probs - old_log_probs)`` (eq. 6).

    Args:
        log_probs: (B, R) under the policy now, with gradient.
        old_log_probs: (B, R) recorded when the answers were sampled.
        advantages: (B, R).
        response_mask: (B, R), 1 = an action.
        clip: epsilon, 0.2 in the paper.

    Raises:
        ValueError: a negative clip, shapes that disagree.
    """
    _not_negative("clip", clip)
    _same_shape(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, response_mask=response_mask
    )
    new, old = keep(log_probs, response_mask), keep(old_log_probs.detach(), response_mask)
    advantage = keep(advantages.detach(), response_mask)
    ratio = torch.exp(new - old)
    plain, clipped = ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    with torch.no_grad():
        approx_kl = kl_estimate(old, new, "k3")
        # Off the mask ratio is 1 and the advantage 0, so that these three sums need no further mask.
        clip_count = (clipped < plain).float().sum()
        deviation = (ratio - 1.0).abs().sum()
    return PolicyLoss(-torch.minimum(plain, clipped).sum(), clip_count, deviation, approx_kl.sum())


def value_loss_sum(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip: float | None
) -> ValueLoss:
    """Clipped value loss: sum of ``0.5 max((v - R)^2, (v_clip - R)^2)``.

    ``v_clip = old + clamp(v - old, -clip, clip)``; the factor 0.5 is part of the loss, with and without clipping.
    The value clipping of the PPO code, as described in arXiv 2005.12729 section 3 and used in the code of arXiv
    1909.08593, which also has the factor 0.5.

    Args:
        values: (B, R) of the critic now, with gradient.
        old_values: (B, R) recorded with the rollout.
        returns: (B, R) targets.
        response_mask: (B, R), 1 = an action.
        clip: largest rewarded move of a value, in units of the values; None = plain half squared error.

    Raises:
        ValueError: a negative clip, shapes that disagree.
    """
    _same_shape(values=values, old_values=old_values, returns=returns, response_mask=response_mask)
    new, target = keep(values, response_mask), keep(returns.detach(), response_mask)
    error = (new - target).square()
    if clip is None:
        return ValueLoss(0.5 * error.sum(), torch.zeros((), device=values.device))
    _not_negative("clip", clip)
    old = keep(old_values.detach(), response_mask)
    move = new - old
    clipped_error = (old + move.clamp(-clip, clip) - target).square()
    # old + (new - old) rounds: a value that stayed within the clip may look worse by its last place, uncut.
    clip_count = ((clipped_error > error) & (move.abs() > clip)).float().sum()
    return ValueLoss(0.5 * torch.maximum(error, clipped_error).sum(), clip_count)


def _same_shape(**tensors: Tensor) -> None:
    """Broadcasting a mask by accident is a silent error of a factor B; refuse it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must be equal: {shapes}")


def _not_negative(name: str, number: float) -> None:
    if not number >= 0:
        raise ValueError(f"{name} must not be negative: {number}")

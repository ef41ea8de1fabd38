"""Masks: which tokens count, and sums, means and moments over those that do."""

from collections.abc import Sequence

import torch
from torch import Tensor

VARIANCE_EPSILON = 1e-8
"""Added to the variance in :func:`whiten`, as in the code of arXiv 1909.08593, so that a constant gives 0, not NaN."""


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` in float32 (float64 stays) where ``mask`` is 1, exactly 0 elsewhere.

    A selection, not a product: NaN or infinity at a masked position is gone from the result and from the gradient.
    Every function here calls it before any other operation.

    Args:
        x: any shape, any floating or integer type.
        mask: a shape that broadcasts with ``x``; 1 (or any non-zero) = counts.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.where(mask.bool(), wide, torch.zeros((), dtype=wide.dtype, device=wide.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of ``x`` (..., ) over the positions where ``mask`` is 1; over all of them, or along ``dim``."""
    kept = keep(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``x`` over the positions where ``mask`` is 1; over all of them, or along ``dim``.

    Raises:
        ValueError: a mean over no position at all.
    """
    counts = mask.bool().expand(x.shape)
    count = counts.sum() if dim is None else counts.sum(dim)
    if not bool((count > 0).all()):
        raise ValueError(f"masked_mean over no counted position: mask {tuple(mask.shape)}, dim {dim}")
    return masked_sum(x, mask, dim) / count


def first_eos_mask(responses: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Which tokens of each response count: all up to and including the first end token.

    Args:
        responses: (B, R) sampled token ids.
        eos_ids: every id that ends an answer, at least one.

    Returns:
        response_mask (B, R) int64. A row without an end token is all ones; an end token in the first column gives a
        legal answer of one token.

    Naively, for every row: ``t`` counts when none of ``row[:t]`` is in ``eos_ids``.

    Raises:
        ValueError: ``eos_ids`` is empty.
    """
    if not eos_ids:
        raise ValueError("first_eos_mask needs at least one end-of-answer id")
    is_eos = torch.isin(responses, torch.tensor(list(eos_ids), dtype=responses.dtype, device=responses.device)).long()
    ends_before = is_eos.cumsum(dim=1) - is_eos
    return (ends_before == 0).long()


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions counted over the attended tokens only, so that padding on either side changes nothing.

    Args:
        attention_mask: (B, S).

    Returns:
        (B, S) int64: 0, 1, 2, … on the attended tokens of each row, 0 on padding.
    """
    mask = attention_mask.long()
    return (mask.cumsum(dim=1) - 1) * mask


def last_token_index(attention_mask: Tensor) -> Tensor:
    """Index (B,) int64 of the last attended token of each row of ``attention_mask`` (B, S), padded on either side.

    Raises:
        ValueError: a row attends to nothing.
    """
    mask = attention_mask.bool()
    if not bool(mask.any(dim=1).all()):
        raise ValueError(f"a row of the attention mask {tuple(attention_mask.shape)} has no attended token")
    return (mask * torch.arange(mask.shape[1], device=mask.device)).amax(dim=1)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """``[count, sum, sum of squares]`` (3,) float64 of the counted elements of ``x``.

    Moments of several batches or ranks are added; the sum serves :func:`whiten`,
    ``rewards.RunningRewardStats.update`` and ``metrics.explained_variance_from_moments``.
    """
    kept = keep(x.detach().double(), mask)
    count = mask.bool().expand(x.shape).sum().double()
    return torch.stack([count, kept.sum(), kept.square().sum()])


_measure = moments  # whiten's argument has the function's name


def whiten(x: Tensor, mask: Tensor, moments: Tensor | None = None, center: bool = True) -> Tensor:
    """Scale the counted elements to variance 1, and with ``center`` shift them to mean 0.

    ``(x - mean) / sqrt(var + 1e-8)``, plus the mean again when ``center`` is False. The variance is that of the
    population (divided by the count), so over the counted elements it is exactly 1 afterwards. As in the code released
    with arXiv 1909.08593, which whitens the advantages of a whole batch.

    Args:
        x: any shape.
        mask: the shape of ``x``; 1 = counts.
        moments: (3,) from :func:`moments`, summed over all ranks; None takes those of ``x`` alone.
        center: False keeps the mean where it was.

    Returns:
        float32, the shape of ``x``, 0 where the mask is 0. With no counted element: all 0.
    """
    count, total, total_sq = (_measure(x, mask) if moments is None else moments).double().unbind()
    mean = total / count  # NaN for no counted element, and then the mask takes everything
    variance = (total_sq / count - mean.square()).clamp(min=0.0)  # rounding can leave a variance of -1e-20
    scaled = (x.double() - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)
    return keep((scaled if center else scaled + mean).float(), mask)

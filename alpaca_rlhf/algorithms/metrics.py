"""Numbers for the log: sums in the loop, one division at the end, every ratio with its definition."""

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.masking import masked_sum, moments


class Averages:
    """One accumulator of (total, count) per name, for one report; a new report takes a new object.

    Tensors are added where they are, without waiting for the device; numbers are read only in :meth:`reduce` and
    :meth:`result`.
    """

    def __init__(self) -> None:
        """Empty."""
        self._sums: dict[str, tuple[Tensor | float, Tensor | float]] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add ``total`` (a sum, not a mean) over ``count`` things to the accumulator ``name``; each a number or ()."""
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + _double(total), old_count + _double(count))

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Replace the sums of this rank by those of all ranks. Every rank must have used the same names.

        Args:
            sum_over_ranks: float64 tensor → its sum over the ranks, the same shape; called on all ranks alike.

        Raises:
            ValueError: the ranks hold different names (checked first, so that no rank waits for ever).
        """
        names = sorted(self._sums)
        # Equal numbers x on n ranks, and only those, have n * sum(x^2) = sum(x)^2; 20 bits keep that exact in float64.
        digest = float(zlib.crc32("\n".join(names).encode()) % 2**20)
        ranks, total, squares = sum_over_ranks(torch.tensor([1.0, digest, digest**2], dtype=torch.float64)).tolist()
        if ranks * squares != total**2:
            raise ValueError(f"the ranks have different metrics; this one has {', '.join(names)}")
        own = torch.tensor([[float(part) for part in self._sums[name]] for name in names], dtype=torch.float64)
        summed = sum_over_ranks(own.reshape(-1)).reshape(-1, 2).tolist()
        self._sums = {name: (pair[0], pair[1]) for name, pair in zip(names, summed, strict=True)}

    def state_dict(self) -> dict[str, list[float]]:
        """[total, count] per name, for a checkpoint."""
        return {name: [float(total), float(count)] for name, (total, count) in self._sums.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._sums = {name: (total, count) for name, (total, count) in state.items()}

    def result(self) -> dict[str, float]:
        """``total / count`` per name, in the order of first use. A name with count 0 has no mean and is left out."""
        pairs = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        return {name: total / count for name, (total, count) in pairs.items() if count != 0}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the counted elements: 1 perfect, 0 no better than a constant.

    NaN when the returns do not vary (the log should leave it out). Shapes equal, usually (B, R); population variances.
    """
    return explained_variance_from_moments(moments(returns.double() - values.double(), mask), moments(returns, mask))


def explained_variance_from_moments(error_moments: Tensor, return_moments: Tensor) -> float:
    """The same from ``masking.moments`` (3,) of ``returns - values`` and of ``returns``, each summed over the ranks."""
    return_variance = _variance(return_moments)
    return 1.0 - _variance(error_moments) / return_variance if return_variance > 0 else math.nan


def pearson(x: Tensor | Sequence[float], y: Tensor | Sequence[float]) -> float:
    """Pearson's correlation of two series (N,), -1 to 1; NaN when one of them does not vary or N < 2.

    Raises:
        ValueError: series of different lengths.
    """
    a, b = (torch.as_tensor(series, dtype=torch.float64).flatten() for series in (x, y))
    if a.shape != b.shape:
        raise ValueError(f"series of different lengths: {len(a)}, {len(b)}")
    if len(a) < 2 or bool((a == a[0]).all()) or bool((b == b[0]).all()):
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def perplexity(loss_sum: float, tokens: float) -> float:
    """``exp(loss_sum / tokens)`` of the whole evaluation set over all ranks; infinity where that overflows.

    Args:
        loss_sum: negative log-likelihood, nats, summed over the tokens.
        tokens: how many.

    Raises:
        ValueError: no token.
    """
    if not tokens > 0:
        raise ValueError(f"perplexity needs at least one token: {tokens}")
    try:
        return math.exp(loss_sum / tokens)
    except OverflowError:
        return math.inf


def distinct_n(responses: Sequence[Sequence[int]], n: int) -> float:
    """Different n-grams divided by all n-grams of all responses together, 0 to 1; arXiv 1510.03055 (distinct-1, -2).

    Low values mean repetition. N-grams do not cross from one response to the next. NaN when there is none.

    Args:
        responses: token ids (or words) of each response, without padding.
        n: length of the n-grams, at least 1.

    Raises:
        ValueError: n below 1.
    """
    if n < 1:
        raise ValueError(f"n-grams have at least one token: {n}")
    grams = [tuple(ids[start : start + n]) for ids in responses for start in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def distinct_token_shares(responses: Tensor, response_mask: Tensor) -> Tensor:
    """Per row: different token ids divided by the answer's tokens, (B,) float32. 1 = nothing repeats, 0 = no token.

    Args:
        responses: (B, R) token ids.
        response_mask: (B, R), 1 = a token of the answer.
    """
    # Masked columns get ids of their own below every real id: each is a run of one, and can be taken off again.
    columns = torch.arange(responses.shape[1], device=responses.device).expand_as(responses)
    ordered = torch.where(response_mask.bool(), responses.long(), -1 - columns).sort(dim=1).values
    length = response_mask.bool().sum(dim=1)
    different = (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1) + 1 - (responses.shape[1] - length)
    return different / length.clamp(min=1)


def ended_rows(responses: Tensor, response_mask: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """(B,) bool: the last counted token is an end token, so the answer was not cut at the limit.

    Looks at the answer only. A row without a token has not ended. Share truncated = 1 - ended / real rows.

    Args:
        responses: (B, R) token ids.
        response_mask: (B, R), 1 = a token of the answer, the end token included.
        eos_ids: every id that ends an answer.
    """
    ends = torch.tensor(list(eos_ids), dtype=responses.dtype, device=responses.device)
    return (torch.isin(responses, ends) & response_mask.bool()).any(dim=1)


def empty_rows(responses: Tensor, response_mask: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """(B,) bool: the answer is nothing but its end token. Arguments of :func:`ended_rows`."""
    return ended_rows(responses, response_mask, eos_ids) & (response_mask.bool().sum(dim=1) == 1)


def padding_share(mask: Tensor) -> float:
    """Positions that do not count divided by all positions: 6 real of 8 give 0.25. NaN for no position."""
    return 1.0 - float(masked_sum(torch.ones_like(mask), mask)) / mask.numel() if mask.numel() else math.nan


def _double(number: Tensor | float) -> Tensor | float:
    return number.detach().double() if isinstance(number, Tensor) else float(number)


def _variance(three: Tensor) -> float:
    """Population variance of [count, sum, sum of squares]; 0 for no element, and 0 where only rounding is left."""
    count, total, total_sq = (float(number) for number in three)
    if count == 0:
        return 0.0
    variance = total_sq / count - (total / count) ** 2
    return variance if variance > 1e-14 * total_sq / count else 0.0

"""Several data sets become one list of records: all of each, or shares by probability.

An epoch never repeats a record. With probabilities it is the largest set of records that keeps the asked
proportions exactly (to one record), so it ends where the first data set is used up; what the others leave is said,
not hidden (D-07). The choice is made once and seeded; the loader reshuffles the order of each epoch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from alpaca_rlhf.arguments.errors import UserError

Record = TypeVar("Record")


def plan_blend(
    sizes: Sequence[int], probs: Sequence[float] | None, seed: int, max_samples: int | None = None
) -> list[tuple[int, int]]:
    """The records of an epoch as (index of the set, index of the row), in the order of the sets and rows.

    ``probs`` None takes every record. ``max_samples`` cuts the epoch to at most so many records and keeps the
    proportions. Rows of a set that is not used whole are drawn without replacement from ``seed``.

    Raises UserError when the probabilities do not fit the sets or leave nothing to train on.
    """
    counts = _counts(sizes, probs, max_samples)
    plan: list[tuple[int, int]] = []
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        # A stream of its own for each set: another set more or less does not change what is drawn from this one.
        draw = random.Random(f"{seed} {index}")
        rows = range(size) if count == size else sorted(draw.sample(range(size), count))
        plan.extend((index, row) for row in rows)
    return plan


def blend(
    sets: Sequence[Sequence[Record]],
    names: Sequence[str],
    probs: Sequence[float] | None,
    seed: int,
    max_samples: int | None = None,
) -> tuple[list[Record], list[str]]:
    """The records that ``plan_blend`` picks, and the plan in words: for each set what an epoch uses and leaves."""
    sizes = [len(records) for records in sets]
    plan = plan_blend(sizes, probs, seed, max_samples)
    used = [0] * len(sets)
    for index, _ in plan:
        used[index] += 1
    lines = []
    for name, size, count in zip(names, sizes, used, strict=True):
        share = f"{count / len(plan):.1%} of the epoch"
        lines.append(f"{name}: an epoch uses {count} of {size} records ({share}), leaves {size - count}")
    return [sets[index][row] for index, row in plan], lines


def _counts(sizes: Sequence[int], probs: Sequence[float] | None, max_samples: int | None) -> list[int]:
    if max_samples is not None and max_samples < 1:
        raise UserError(f"max_samples is {max_samples}; give at least 1, or leave it out to use all records")
    if sum(sizes) == 0:
        raise UserError("the data sets hold no records")
    if probs is None:
        total = sum(sizes)
        if max_samples is None or max_samples >= total:
            return list(sizes)
        return _largest_remainder([Fraction(size, total) for size in sizes], max_samples)
    shares = _normalised(sizes, probs)
    total = min(math.floor(size / share) for size, share in zip(sizes, shares, strict=True) if share)
    if max_samples is not None:
        total = min(total, max_samples)
    return _largest_remainder(shares, total)


def _normalised(sizes: Sequence[int], probs: Sequence[float]) -> list[Fraction]:
    given = ", ".join(str(prob) for prob in probs)
    if len(probs) != len(sizes):
        raise UserError(f"{len(probs)} probabilities ({given}) for {len(sizes)} data sets; give one for each")
    if any(not math.isfinite(prob) or prob < 0 for prob in probs) or sum(probs) == 0:
        raise UserError(
            f"the probabilities of the data sets are {given}; none may be negative and one must be above 0"
        )
    # The decimal that the user wrote, not its binary neighbour: 0.9 of 90 and 0.1 of 10 must come out even.
    exact = [Fraction(str(prob)) for prob in probs]
    shares = [prob / sum(exact) for prob in exact]
    for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        if share and size == 0:
            raise UserError(
                f"data set {index + 1} has the probability {probs[index]} but holds no records; give it 0"
            )
    return shares


def _largest_remainder(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole counts that sum to ``total``, each within one of ``share * total``; ties go to the earlier set."""
    counts = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index] * total)
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts

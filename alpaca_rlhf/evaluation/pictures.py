"""Small PNG pictures of an evaluation's figures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from alpaca_rlhf.runtime.curves import new_picture, save_picture

Interval = Sequence[float]

_LABEL_LETTERS = 56  # fit below the x axis side by side


def draw_shares(
    path: Path, title: str, label: str, shares: Mapping[str, tuple[float, Interval]], even: tuple[float, str] | None
) -> None:
    """Shares (name → value and its interval) as points with bars.

    label: what the names are; even: where a dashed line marks no difference, and its name.
    """
    figure, axes = new_picture(title, label, "share, with 95 % interval")
    names = [_short(name) for name in shares]
    for place, (value, (low, high)) in enumerate(shares.values()):
        reach = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar(place, value, yerr=reach, fmt="o", capsize=6, color="C0")
    axes.set_xticks(range(len(names)), names, rotation=30 if sum(map(len, names)) > _LABEL_LETTERS else 0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(-0.02, 1.02)  # a point at 0 or 1 is whole
    if even is not None:
        axes.axhline(even[0], color="grey", linestyle="--", linewidth=1, label=even[1])
        axes.legend(fontsize="small", framealpha=0.7, loc="lower right")
    save_picture(figure, path)


def draw_histograms(path: Path, title: str, label: str, series: Mapping[str, Sequence[float]]) -> None:
    """Histograms of several series (name → numbers) over common bins; ``label``: what the numbers are."""
    figure, axes = new_picture(title, label, "count")
    numbers = [number for values in series.values() for number in values]
    low, high = min(numbers), max(numbers)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = min(40, max(5, int(math.sqrt(len(numbers)))))
    edges = [low + (high - low) * index / bins for index in range(bins + 1)]
    for name, values in series.items():
        axes.hist(values, bins=edges, alpha=0.5, label=_short(name))
    if len(series) > 1:
        axes.legend(fontsize="small")
    save_picture(figure, path)


def draw_reliability(path: Path, title: str, curve: Sequence[Mapping[str, float]]) -> None:
    """Accuracy over confidence, each bin a point as large as its share of the pairs; the diagonal is perfect."""
    figure, axes = new_picture(title, "confidence: sigmoid of the score difference's size", "accuracy")
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="perfectly calibrated")
    total = sum(part["size"] for part in curve)
    axes.plot([part["confidence"] for part in curve], [part["accuracy"] for part in curve], color="C0", alpha=0.5)
    axes.scatter([part["confidence"] for part in curve], [part["accuracy"] for part in curve],
                 s=[20 + 400 * part["size"] / total for part in curve], color="C0", alpha=0.7,
                 label="this model; the larger, the more pairs")  # fmt: skip
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="small")
    save_picture(figure, path)


def _short(name: str) -> str:
    """The end of a long name: folders differ there. A dollar sign is no formula."""
    return (name if len(name) <= 24 else "…" + name[-23:]).replace("$", r"\$")

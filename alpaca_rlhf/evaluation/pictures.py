"""Small PNG pictures of an evaluation's figures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Interval = Sequence[float]


def draw_shares(path: Path, title: str, shares: Mapping[str, tuple[float, Interval]], even: float | None) -> None:
    """Shares (name → value and its interval) as points with bars; ``even``: where a dashed line marks no difference."""
    figure, axes = _axes(title)
    names = list(shares)
    for place, (value, (low, high)) in enumerate(shares.values()):
        axes.errorbar(place, value, yerr=[[max(0.0, value - low)], [max(0.0, high - value)]], fmt="o", capsize=6)
    axes.set_xticks(range(len(names)), [_short(name) for name in names], rotation=0 if len(names) < 5 else 30)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(-0.02, 1.02)  # a point at 0 or 1 is whole
    axes.set_ylabel("share, with 95 % interval")
    if even is not None:
        axes.axhline(even, color="grey", linestyle="--", linewidth=1)
    _save(figure, path)


def draw_histograms(path: Path, title: str, label: str, series: Mapping[str, Sequence[float]]) -> None:
    """Histograms of several series (name → numbers) over common bins; ``label``: what the numbers are."""
    figure, axes = _axes(title)
    numbers = [number for values in series.values() for number in values]
    low, high = min(numbers), max(numbers)
    if low == high:
        low, high = low - 0.5, high + 0.5
    bins = min(40, max(5, int(math.sqrt(len(numbers)))))
    edges = [low + (high - low) * index / bins for index in range(bins + 1)]
    for name, values in series.items():
        axes.hist(values, bins=edges, alpha=0.5, label=_short(name))
    axes.set_xlabel(label)
    axes.set_ylabel("count")
    axes.legend(fontsize="small")
    _save(figure, path)


def draw_reliability(path: Path, title: str, curve: Sequence[Mapping[str, float]]) -> None:
    """Accuracy over confidence, each bin a point as large as its share of the pairs; the diagonal is perfect."""
    figure, axes = _axes(title)
    axes.plot([0.5, 1], [0.5, 1], color="grey", linestyle="--", linewidth=1, label="perfectly calibrated")
    total = sum(part["size"] for part in curve)
    axes.plot([part["confidence"] for part in curve], [part["accuracy"] for part in curve], color="C0", alpha=0.5)
    axes.scatter([part["confidence"] for part in curve], [part["accuracy"] for part in curve],
                 s=[20 + 400 * part["size"] / total for part in curve], color="C0", alpha=0.7)  # fmt: skip
    axes.set_xlim(0.49, 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("confidence: sigmoid of the score difference's size")
    axes.set_ylabel("accuracy")
    axes.legend(fontsize="small")
    _save(figure, path)


def _axes(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _short(name: str) -> str:
    """The end of a long name: folders differ there. A dollar sign is no formula."""
    return (name if len(name) <= 24 else "…" + name[-23:]).replace("$", r"\$")

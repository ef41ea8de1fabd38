"""The curves of a run as small PNG pictures: what a step draws of its own metrics, to be read without its code."""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

History = Mapping[str, tuple[Sequence[int], Sequence[float]]]  # metric -> steps, values

_FEW = 40  # values of a line that is drawn with its points
_NOISY = 4  # a line whose way up and down is longer than so many times its range gets a trend
_WINDOW = 20  # the trend is the mean over this part of the line
_COLOURS = 64  # of a stored picture


class Curve(NamedTuple):
    """One picture of a run: which metrics are drawn together, and what a reader needs to understand them."""

    title: str
    unit: str  # the label of the y axis
    lines: Mapping[str, str]  # metric -> its name in the legend
    level: tuple[float, str] | None = None  # a dashed line at a value that means something, and what it means
    log_scale: bool = False  # of the y axis, for values that fall by orders of magnitude


def draw_curves(path: Path, curve: Curve, history: History) -> None:
    """Draw those metrics of ``curve`` that ``history`` has over the optimizer step, into one small PNG.

    A long noisy series is drawn pale, with its running mean on top; single values far away from the rest do not decide
    the limits of the y axis, and the picture says how many it leaves out.
    """
    lines = {label: history[name] for name, label in curve.lines.items() if name in history}
    figure, axes = new_picture(curve.title, "optimizer step", curve.unit)
    kept: list[float] = [] if curve.level is None else [curve.level[0]]  # what the limits always hold
    noise: list[list[float]] = []
    if curve.level is not None:
        axes.axhline(curve.level[0], color="grey", linestyle="--", linewidth=1, label=curve.level[1])
    for index, (label, (steps, values)) in enumerate(lines.items()):
        colour, few = f"C{index}", len(values) <= _FEW
        if few or not is_noisy(values):
            axes.plot(steps, values, color=colour, marker="o" if few else None, markersize=3.5, label=label, zorder=3)
            kept += values
            continue
        width = max(3, len(values) // _WINDOW)
        trend = running_mean(values, width)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, trend, color=colour, label=f"{label}, mean of {width} steps")
        noise.append([value for value in values if math.isfinite(value)])
    if curve.log_scale:
        axes.set_yscale("log")
    elif noise:
        _leave_out_outliers(axes, [value for value in kept if math.isfinite(value)], noise)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(lines) > 1 or noise or curve.level is not None:
        axes.legend(fontsize="small", framealpha=0.7)
    save_picture(figure, path)


def new_picture(title: str, x_label: str = "", y_label: str = "") -> tuple[Any, Any]:
    """Figure and axes of one small picture, which belong to no window and to no global state; texts are no formulas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    title, x_label, y_label = (text.replace("$", r"\$") for text in (title, x_label, y_label))
    axes.set_title(title, fontsize="medium", wrap=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def save_picture(figure: Any, path: Path) -> None:
    """Write the figure as a PNG of few colours, which takes a third of the space and looks the same."""
    from PIL import Image  # what matplotlib itself writes its PNG files with

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def pictures_of(folder: Path, order: Sequence[str] = ()) -> dict[str, bytes]:
    """The curves that a step left in ``folder``: name -> PNG, those named in ``order`` first."""
    files = {path.stem: path for path in sorted((folder / "curves").glob("*.png"))}
    names = [name for name in order if name in files] + [name for name in files if name not in order]
    return {name: files[name].read_bytes() for name in names}


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and its up to width // 2 neighbours on either side, but no more on the right than there
    are on the left: it does not lag, and a steep beginning keeps its shape. Not finite values are left out of it."""
    means = []
    for place in range(len(values)):
        reach = min(width // 2, place)
        window = [value for value in values[place - reach : place + reach + 1] if math.isfinite(value)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def is_noisy(values: Sequence[float]) -> bool:
    """Whether the way that a series goes up and down is long beside its range, so that its trend is hard to see.

    Outliers do not count: one of them would be most of the way and the range.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return False
    low, high = calm_range(finite)
    way = sum(abs(after - before) for before, after in pairwise(min(max(value, low), high) for value in finite))
    return way > _NOISY * (high - low)


def calm_range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest of finite values, without a fiftieth of them at either end."""
    ordered = sorted(values)
    cut = len(ordered) // 50
    return ordered[cut], ordered[-1 - cut]


def _leave_out_outliers(axes: Any, kept: list[float], noise: list[list[float]]) -> None:
    """Limits of the y axis that hold what is kept and the calm range of each noisy series, with room for a bit more."""
    calm = kept + [end for values in noise for end in calm_range(values)]
    margin = max(calm) - min(calm)
    low, high = min(calm) - margin, max(calm) + margin
    values = [value for series in noise for value in series]
    above, below = sum(value > high for value in values), sum(value < low for value in values)
    if above:
        axes.set_ylim(top=high)
    if below:
        axes.set_ylim(bottom=low)
    if above or below:
        axes.annotate(f"{above + below} of {len(values):,} points lie outside", (0.01, 0.02), xycoords="axes fraction",
                      fontsize="x-small", color="grey")  # fmt: skip

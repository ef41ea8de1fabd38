"""How far two runs are apart: one number for the final weights, one for the losses, one for the rest of the log."""

from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from tests.pipeline.steps import metrics

TOLERANCE = 1e-6
# The other figures are sums of many float32 numbers (the KL of an answer adds up differences of log-probs near 10,
# whose last place is 1e-6) or divide two of them (explained variance): they round more than a loss does.
FIGURES_TOLERANCE = 1e-5
# What a run takes and how it is padded may differ; everything else that it logs may not.
FREE = ("time", "seconds_generate", "seconds_score", "seconds_train", "padding_share")


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: weights by model and name, and its log, a line per step."""

    weights: dict[str, Tensor]
    log: list[dict[str, float]]


def outcome(folder: Path) -> Outcome:
    """Read an output directory: of steps 1 and 2 the model, of step 3 every model in it."""
    files = sorted(folder.rglob("model.safetensors"))
    assert files, f"no model in {folder}"
    weights = {
        f"{file.parent.relative_to(folder)}/{name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
    }
    return Outcome(weights, metrics(folder))


@dataclass(frozen=True)
class Difference:
    """The largest differences of two runs, and where they are. Losses and figures: relative where they exceed 1."""

    weights: float
    losses: float
    figures: float
    where: tuple[str, str, str]

    def __str__(self) -> str:
        return f"weights {self.weights:.1e}, losses {self.losses:.1e}, other figures {self.figures:.1e}"


def largest_difference(one: Outcome, two: Outcome) -> Difference:
    """Compare two runs that must have the same models, steps and names in their logs."""
    assert one.weights.keys() == two.weights.keys()
    assert [line.keys() for line in one.log] == [line.keys() for line in two.log]
    weights = max((float((one.weights[name] - two.weights[name]).abs().max()), name) for name in one.weights)
    apart = [
        (abs(line[name] - other[name]) / max(1.0, abs(line[name])), f"{name} at step {line['step']}")
        for line, other in zip(one.log, two.log, strict=True)
        for name in line
        if name not in FREE
    ]
    losses = max((pair for pair in apart if pair[1].split()[0].endswith("loss")), default=(0.0, ""))
    figures = max((pair for pair in apart if not pair[1].split()[0].endswith("loss")), default=(0.0, ""))
    return Difference(weights[0], losses[0], figures[0], (weights[1], losses[1], figures[1]))


def assert_equal_runs(row: str, one: Outcome, two: Outcome) -> Difference:
    """Print the row of the table of equalities (``pytest -s``) and hold it to the tolerances."""
    difference = largest_difference(one, two)
    print(f"\nequality | {row} | {difference}")
    within = difference.weights <= TOLERANCE and difference.losses <= TOLERANCE
    assert within and difference.figures <= FIGURES_TOLERANCE, f"{row}: {difference} at {difference.where}"
    return difference


def assert_equal_tensors(
    row: str, one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """The same for tensors by name: absolute, or relative to the tensor's largest entry where that exceeds 1."""
    assert one.keys() == two.keys()
    apart = {name: float((one[name] - two[name]).abs().max() / one[name].abs().max().clamp(min=1)) for name in one}
    print(f"\nequality | {row} | " + ", ".join(f"{name} {value:.1e}" for name, value in apart.items()))
    assert max(apart.values()) <= tolerance, f"{row}: {apart}"

"""One optimizer step, the same for every step program: sums in, one normaliser, skip what is not finite."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpaca_rlhf.engines.base import Engine, StepReport


class TrainingDiverged(Exception):
    """Several optimizer steps in a row were skipped: the run ends, the weights are those of the last good step."""


class SkippedSteps:
    """Counts skipped steps; more than ``limit`` in a row end the run (P-14)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.total = 0

    def note(self, skipped: bool, step: int, what: str) -> None:
        """Count one step; ``what`` says in words what was not finite."""
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        if self.in_a_row > self.limit:
            raise TrainingDiverged(
                f"step {step}: {what}, {self.in_a_row} times in a row; the run was stopped and the last good "
                "weights were kept. Lower the learning rate, or train in bf16 or fp32 instead of fp16, in a run of its "
                "own: --resume goes on with the same settings only."
            )


    def state_dict(self) -> dict[str, int]:
        """What a checkpoint has to hold; the limit is a setting."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]


@dataclass(frozen=True)
class StepOutcome:
    """What :func:`optimizer_step` did: the engine's report, and the step's mean loss over all ranks."""

    report: StepReport
    loss: float
    failed: bool  # the loss, or a gradient, was not finite (under fp16 a gradient may overflow: the scale goes down)

    def metrics(self) -> dict[str, float]:
        """The figures a step logs, the learning rate of each parameter group among them (L-03)."""
        rates = {f"learning_rate/{name}": rate for name, rate in self.report.learning_rates.items()}
        return {"loss": self.loss, "grad_norm": self.report.grad_norm, "skipped": float(self.report.skipped), **rates}


def to_device(batch: dict, device: torch.device) -> dict:
    """The batch with its tensors on ``device``."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def optimizer_step(
    engine: Engine, run: Any, batches: Sequence[dict], loss_sum: Callable[[dict], Tensor], count: float
) -> StepOutcome:
    """Differentiate ``loss_sum(batch) / count`` for each micro-batch, then step, or discard when not finite anywhere.

    ``count`` is what the whole step is averaged over (tokens or pairs of all micro-batches and ranks), so the result
    does not depend on how the step was cut (S-04).
    """
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for index, batch in enumerate(batches):
        loss = loss_sum(batch)
        total += loss.detach()
        engine.accumulate(loss / count, last=index == len(batches) - 1)
    mean = float(run.sum(total)) / count
    finite = math.isfinite(mean)
    good = run.all_true(finite and engine.gradients_finite())
    failed = not finite or (not good and run.dtype != torch.float16)
    return StepOutcome(engine.step() if good else engine.discard(), mean, failed)

"""A moving average of a module's trainable weights, updated once per optimizer step (P-25)."""

import torch
from torch import Tensor

from alpaca_rlhf.engines.base import Engine


class MovingAverage:
    """average ← decay · average + (1 − decay) · weights, in float32 on the CPU; decay 0 copies, decay 1 keeps the start.

    Under ZeRO-3 each update gathers the weights.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self.engine, self.decay = engine, decay
        self._average = {name: value.float() for name, value in self._trainable()}

    def update(self) -> None:
        """Take the weights of the step just made into the average."""
        for name, value in self._trainable():
            self._average[name].lerp_(value.float(), 1.0 - self.decay)

    def state_dict(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The engine's full ``state`` with the averages in place of the trained weights; {} stays {} (off the main rank)."""
        return {name: self._average[name].to(value.dtype) if name in self._average else value for name, value in state.items()}

    def _trainable(self) -> list[tuple[str, Tensor]]:
        with self.engine.gathered(), torch.no_grad():
            return [
                (name, parameter.detach().to("cpu", copy=True))
                for name, parameter in self.engine.module.named_parameters()
                if parameter.requires_grad
            ]

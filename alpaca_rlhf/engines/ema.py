"""A moving average of a module's trainable weights, updated once per optimizer step (P-25)."""

import torch
from torch import Tensor

from alpaca_rlhf.engines.base import Engine


class MovingAverage:
    """average ← decay · average + (1 − decay) · weights, in float32 on the CPU.

    Decay 0 copies the weights, decay 1 keeps the start. Under ZeRO-3 each update gathers the weights.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self.engine, self.decay = engine, decay
        first: dict[int, str] = {}
        # A tied weight has two names and one average.
        self._name_of = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in engine.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        self._average = {name: value.float() for name, value in self._trainable()}

    def update(self) -> None:
        """Take the weights of the step just made into the average."""
        for name, value in self._trainable():
            self._average[name].lerp_(value.float(), 1.0 - self.decay)

    def averaged(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The engine's full ``state`` with averages in place of the trained weights; {} stays {} off the main rank."""
        return {
            name: self._average[self._name_of[name]].to(value.dtype) if name in self._name_of else value
            for name, value in state.items()
        }

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold: the averages by the name of their parameter, the same on every rank."""
        return dict(self._average)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` gave."""
        assert state.keys() == self._average.keys(), sorted(state.keys() ^ self._average.keys())
        self._average = {name: value.float() for name, value in state.items()}

    def _trainable(self) -> list[tuple[str, Tensor]]:
        with self.engine.gathered(), torch.no_grad():
            parameters = dict(self.engine.module.named_parameters())
            return [(name, parameters[name].detach().to("cpu", copy=True)) for name in set(self._name_of.values())]

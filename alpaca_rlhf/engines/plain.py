"""One process, plain torch: the reference for every other engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments.errors import UserError
from .base import (
    Engine,
    FiniteGradients,
    OptimizerSettings,
    StepReport,
    cpu_state_dict,
    load_trained_weights,
    trained_weights,
)
from .optimizers import Schedule, create_optimizer, is_norm, parameter_groups


def cast_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the frozen matrices in a low precision; what is trainable, norms and embeddings stay as they are.

    Under autocast the matrices are rounded to it before every product anyway. Embeddings would not be, so a model
    trained in float32 and its frozen copy give the same numbers.
    """
    kept = {
        id(parameter)
        for child in module.modules()
        if is_norm(child) or isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
    }  # by identity: a tied output layer is an embedding too
    for parameter in module.parameters():
        frozen_matrix = not parameter.requires_grad and parameter.is_floating_point() and parameter.ndim > 1
        if frozen_matrix and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


class PlainEngine(Engine):
    """AdamW on float32 weights in one process.

    bfloat16 and float16 compute through autocast, float16 with a dynamic loss scale; weights that are frozen
    (the base under LoRA) are then held in that precision.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        world_size: int = 1,
    ) -> None:
        """Move the module to ``device`` and make its optimizer.

        Raises:
            UserError: more than one process, or nothing to train.
        """
        if world_size > 1:
            raise UserError(f"{world_size} processes were started without DeepSpeed; add --deepspeed")
        self._groups = parameter_groups(module, settings)
        self._parameters = [parameter for group in self._groups for parameter in group["params"]]
        for parameter in self._parameters:
            parameter.data = parameter.data.float()
        if dtype != torch.float32:
            cast_frozen(module, dtype)
        self.module = module.to(device)
        self._device, self._dtype, self._max_grad_norm = torch.device(device), dtype, settings.max_grad_norm
        self.optimizer = create_optimizer(self._groups, settings)
        self.schedule = Schedule(self.optimizer.param_groups, settings)
        self.scaler = torch.amp.GradScaler(self._device.type, enabled=dtype == torch.float16)
        self._finite = FiniteGradients(self._parameters)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            return self.module(*args, **kwargs)

    def accumulate(self, loss: Tensor, last: bool) -> None:
        self.scaler.scale(loss).backward()
        self._finite.fold()

    def gradients_finite(self) -> bool:
        return self._finite.read()

    def step(self) -> StepReport:
        if not self.gradients_finite():
            return self.discard()
        self.scaler.unscale_(self.optimizer)
        limit = self._max_grad_norm or float("inf")
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, limit).item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self._finish(StepReport(False, grad_norm, self.learning_rates))

    def discard(self) -> StepReport:
        if self.scaler.is_enabled() and not self.gradients_finite():
            self.scaler.unscale_(self.optimizer)  # notes the overflow, which makes update() lower the scale
            self.scaler.update()
        return self._finish(StepReport(True, float("nan"), self.learning_rates))

    def _finish(self, report: StepReport) -> StepReport:
        self.optimizer.zero_grad(set_to_none=True)
        self._finite.reset()
        self.schedule.step()
        return report

    @property
    def learning_rates(self) -> dict[str, float]:
        return self.schedule.learning_rates

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with torch.no_grad(), self._autocast():
            yield

    def full_state_dict(self, submodule: nn.Module | None = None) -> dict[str, Tensor]:
        return cpu_state_dict(self.module if submodule is None else submodule)

    def shared_state(self) -> dict[str, Any]:
        return {
            "weights": trained_weights(self.module), "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict(),
        }  # fmt: skip

    def rank_state(self) -> dict[str, Any]:
        return {}

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        load_trained_weights(self.module, shared["weights"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.schedule.bind(self.optimizer.param_groups)
        self.schedule.load_state_dict(shared["schedule"])
        self.scaler.load_state_dict(shared["scaler"])

"""Models that are only read: the reference and the reward model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from .base import module_mode
from .plain import cast_frozen


class Frozen(Protocol):
    """A module in evaluation mode whose weights never change; called like the module, without gradients."""

    module: nn.Module
    sharded: bool  # True: every rank must call it at the same time

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def gathered(self) -> Any:
        """Context in which the module itself can be called on every rank."""


class FrozenModule:
    """A frozen module that is whole on every rank."""

    sharded = False

    def __init__(
        self, module: nn.Module, *, device: torch.device, dtype: torch.dtype, autocast: bool, offload: bool
    ) -> None:
        """``autocast``: compute as a module with float32 master weights does; otherwise hold all of it in ``dtype``.

        ``offload``: the weights live in the CPU's memory and visit the device for each call.
        """
        self.module = module.requires_grad_(False).eval()
        self._device = torch.device(device)
        self._offload = offload and self._device.type != "cpu"
        autocast = autocast and dtype != torch.float32
        self._autocast = torch.autocast(self._device.type, dtype=dtype if autocast else None, enabled=autocast)
        if autocast:
            cast_frozen(module, dtype)
        else:
            for parameter in module.parameters():
                if parameter.is_floating_point():  # buffers such as rotary frequencies keep their precision
                    parameter.data = parameter.data.to(dtype)
        module.to("cpu" if self._offload else self._device)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The module on the device, in its compute dtype, in evaluation mode, without gradients."""
        if self._offload:
            self.module.to(self._device)
        try:
            with torch.no_grad(), self._autocast, module_mode(self.module, False):
                yield
        finally:
            if self._offload:
                self.module.to("cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.gathered():
            return self.module(*args, **kwargs)


def freeze(
    module: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype,
    zero_stage: int = 0,
    offload: bool = False,
    micro_batch_size: int = 1,
    world_size: int = 1,
) -> Frozen:
    """Freeze a module and hold it as an engine of that ZeRO stage would compute it, so that a trained model and its
    untouched copy agree.

    ``zero_stage`` is 0 for the plain engine; at stage 3 the weights are sharded over the ranks, and every rank must
    take part. ``offload`` keeps the weights in the CPU's memory.

    Raises:
        UserError: stage 3 without deepspeed.
    """
    if zero_stage < 3:
        return FrozenModule(module, device=device, dtype=dtype, autocast=zero_stage == 0, offload=offload)
    from .deepspeed_engine import FrozenDeepSpeedEngine

    return FrozenDeepSpeedEngine(
        module,
        device=device,
        dtype=dtype,
        offload=offload,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
    )

"""What a training loop may ask of an engine: how one model is held, differentiated and stepped.

An engine holds one module and its optimizer. The loop only calls what :class:`Engine` names, so the same loop
runs on one process of plain torch or on n processes of DeepSpeed, and gets the same numbers from each.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OptimizerSettings:
    """Numbers of AdamW (Loshchilov & Hutter 2019, decoupled weight decay) and of its learning rate over
    time."""

    learning_rate: float
    weight_decay: float
    lora_learning_rate: float | None  # peak rate of the LoRA matrices; None: learning_rate
    lr_scheduler_type: str  # a name of optimizers.SCHEDULES
    num_warmup_steps: int
    total_steps: int  # optimizer steps of the whole run
    max_grad_norm: float  # global L2 norm over all parameters and ranks; 0: no clipping
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    skipped: bool  # True: weights and optimizer state are untouched, only the schedule advanced
    grad_norm: float  # before clipping, over all ranks; nan when skipped
    learning_rates: dict[str, float]  # the rate this step used, per parameter group


class FiniteGradients:
    """Remembers whether every gradient that arrived at the given leaves was finite.

    A hook on the leaf sees the incoming gradient whatever happens to it afterwards (ZeRO reduces, partitions
    and frees it). Each gradient is folded into one float32 sum, which is NaN or infinite if any of its
    elements is; the device is asked only when :meth:`read` is called.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums: list[Tensor] = []
        for parameter in parameters:
            parameter.register_hook(self._see)

    def _see(self, gradient: Tensor) -> None:
        self._sums.append(gradient.detach().sum(dtype=torch.float32))

    def fold(self) -> None:
        """Put the sums collected so far into one number, so that many micro-batches hold no many small
        tensors."""
        if len(self._sums) > 1:
            # 0 * x is 0 for a finite x and NaN otherwise: two large finite sums cannot overflow into a false
            # alarm.
            self._sums = [(torch.stack(self._sums) * 0).sum()]

    def read(self) -> bool:
        """True if every gradient since the last :meth:`reset` was finite (also when there was none)."""
        self.fold()
        return not self._sums or bool(torch.isfinite(self._sums[0]))

    def reset(self) -> None:
        """Forget what was seen."""
        self._sums = []


@contextmanager
def module_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode and restore the flag of every submodule afterwards."""
    flags = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, flag in flags:
            child.training = flag


class Engine(ABC):
    """One trainable module with its optimizer and its learning-rate schedule.

    The loss handed to :meth:`accumulate` is already (sum over this micro-batch) / (count of the whole
    optimizer step, over all micro-batches and ranks), so gradients are summed over micro-batches and over
    ranks, never averaged.
    """

    module: nn.Module
    sharded: bool = False

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward through the engine, in its compute dtype; returns what the module returns."""

    @abstractmethod
    def accumulate(self, loss: Tensor, last: bool) -> None:
        """Differentiate one micro-batch's loss (scalar) and add to the gradients.

        ``last`` marks the last micro-batch of this optimizer step; the number of micro-batches may differ
        from step to step but must be equal on all ranks.
        """

    @abstractmethod
    def gradients_finite(self) -> bool:
        """Whether every gradient accumulated on this rank since the last step is finite. No collective."""

    @abstractmethod
    def step(self) -> StepReport:
        """Clip, update the weights, advance the schedule, clear the gradients.

        Gradients that are not finite on any rank are discarded instead (``skipped`` is then True).
        """

    @abstractmethod
    def discard(self) -> StepReport:
        """Throw the accumulated gradients away on all ranks; only the schedule advances (and, if this
        engine's own gradients overflowed, the dynamic loss scale of float16 goes down)."""

    @property
    @abstractmethod
    def learning_rates(self) -> dict[str, float]:
        """The rate per parameter group that the next step will use."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Inside it the module itself (not only the engine) can be read and called in the compute dtype on
        every rank, without gradients. Under ZeRO-3 that is a collective and holds the whole model in
        memory."""

    @abstractmethod
    def full_state_dict(self, submodule: nn.Module | None = None) -> dict[str, Tensor]:
        """Complete CPU copies under the names of ``(submodule or module).state_dict()``; {} off the main
        rank.

        Must be called on every rank.
        """

    @abstractmethod
    def shared_state(self) -> dict[str, Any]:
        """What a checkpoint has to hold once: trained weights, optimizer, schedule, loss scale; tensors are live, not
        copies. Between two optimizer steps only. No collective; equal on all ranks."""

    @abstractmethod
    def rank_state(self) -> dict[str, Any]:
        """What a checkpoint has to hold of each rank: its shards; {} where nothing is sharded. No collective."""

    @abstractmethod
    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Continue, bit for bit, where :meth:`shared_state` and this rank's :meth:`rank_state` were taken, with the
        same settings and number of ranks. Must be called on every rank."""

    def training_mode(self) -> AbstractContextManager[None]:
        """The module in training mode; every submodule's flag is restored afterwards."""
        return module_mode(self.module, True)

    def evaluation_mode(self) -> AbstractContextManager[None]:
        """The module in evaluation mode; every submodule's flag is restored afterwards."""
        return module_mode(self.module, False)


def cpu_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of everything in ``module.state_dict()``; tied entries share one copy."""
    copies: dict[tuple, Tensor] = {}
    state = {}
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in copies or tensor.numel() == 0:
            copies[key] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[key]
    return state


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """The live trainable parameters by name; a tied one appears once."""
    return {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}


def load_trained_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy what :func:`trained_weights` gave into the same module's parameters, in place."""
    own = trained_weights(module)
    assert own.keys() == weights.keys(), sorted(own.keys() ^ weights.keys())
    for name, parameter in own.items():
        parameter.copy_(weights[name])

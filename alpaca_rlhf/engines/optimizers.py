"""Parameter groups, AdamW and the learning rate over time; the same for every engine."""

import re
from collections.abc import Callable

import torch
from torch import nn
from transformers import get_scheduler

from ..arguments.errors import UserError
from .base import OptimizerSettings

SCHEDULES = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
_NORM_CLASS = re.compile(r"Norm(\dd)?$")  # LayerNorm, LlamaRMSNorm, GroupNorm, BatchNorm1d


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation layer, by the name of its class (S-07: not by the name it was
    given)."""
    return any(_NORM_CLASS.search(kind.__name__) for kind in type(module).__mro__)


def parameter_groups(module: nn.Module, settings: OptimizerSettings) -> list[dict]:
    """Groups for AdamW of the parameters that require a gradient, each with ``name``, ``lr``,
    ``weight_decay``.

    ``decay``: matrices, embeddings included; ``no_decay``: parameters of normalisation layers, biases and
    everything one-dimensional; ``lora`` and ``lora_no_decay``: the same for parameters whose name contains
    ``lora_``, with the LoRA rate. A group without parameters is left out (L-03). A tied parameter appears
    once.

    Raises:
        UserError: nothing is trainable.
    """
    members: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "lora": [], "lora_no_decay": []}
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        norm = is_norm(child)
        for name, parameter in child.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            lora = "lora_" in f"{prefix}.{name}"
            if norm or parameter.ndim < 2 or name.endswith("bias"):
                members["lora_no_decay" if lora else "no_decay"].append(parameter)
            else:
                members["lora" if lora else "decay"].append(parameter)
    lora_rate = settings.learning_rate if settings.lora_learning_rate is None else settings.lora_learning_rate
    groups = [
        {
            "name": name,
            "params": parameters,
            "lr": lora_rate if name.startswith("lora") else settings.learning_rate,
            "weight_decay": 0.0 if name.endswith("no_decay") else settings.weight_decay,
        }
        for name, parameters in members.items()
        if parameters
    ]
    if not groups:
        raise UserError(
            "the model has no trainable parameter; leave out --only_optimize_lora or set --lora_dim above 0"
        )
    return groups


def create_optimizer(groups: list[dict], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over named groups, each with its own rate and decay.

    torch's fused kernel exists on the CPU too, where it is five times as fast as the default one.
    """
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True
    )


def rate_factor(lr_scheduler_type: str, num_warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """The learning rate of the 0-based optimizer step k as a share of the peak rate.

    During warm-up, step k has (k + 1) / num_warmup_steps: the first step already learns (transformers starts
    at 0, which makes the first update do nothing), the 50th of 100 has half the peak, the last one the peak.
    From then on it is transformers' schedule of that name: over ``total_steps`` a decaying one reaches its
    end only after the last step, and stays there. ``polynomial`` is linear down to 1e-7 of the peak;
    ``constant`` ignores the warm-up.

    Raises:
        UserError: an unknown name.
    """
    if lr_scheduler_type not in SCHEDULES:
        names = ", ".join(SCHEDULES)
        raise UserError(f"unknown --lr_scheduler_type {lr_scheduler_type!r}; choose one of {names}")
    # The schedules of transformers belong to an optimizer; one with peak 1 turns them into a share.
    unit = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    decay = get_scheduler(
        lr_scheduler_type, unit, num_warmup_steps=num_warmup_steps, num_training_steps=total_steps
    ).lr_lambdas[0]
    warmup = 0 if lr_scheduler_type == "constant" else num_warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        # A cosine would rise again after its end.
        return float(decay(min(step, max(total_steps, warmup))))

    return factor


class Schedule:
    """Writes the learning rate into parameter groups, one optimizer step after the other."""

    def __init__(self, groups: list[dict], settings: OptimizerSettings) -> None:
        self._groups = groups
        self._peaks = [group["lr"] for group in groups]
        self._factor = rate_factor(
            settings.lr_scheduler_type, settings.num_warmup_steps, settings.total_steps
        )
        self._steps = 0
        self._write()

    def _write(self) -> None:
        factor = self._factor(self._steps)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def bind(self, groups: list[dict]) -> None:
        """Write into these groups from now on: loading its state gives an optimizer new ones."""
        assert len(groups) == len(self._peaks), (len(groups), len(self._peaks))
        self._groups = groups
        self._write()

    def step(self) -> None:
        """Advance by one optimizer step."""
        self._steps += 1
        self._write()

    @property
    def learning_rates(self) -> dict[str, float]:
        """The present rate of each group by its name."""
        return {group["name"]: group["lr"] for group in self._groups}

    def state_dict(self) -> dict:
        """The number of steps taken; everything else follows from the settings."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._steps = state["steps"]
        self._write()

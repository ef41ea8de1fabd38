"""DeepSpeed, ZeRO stages 0 to 3, on one or more processes, with the numbers of the plain engine."""

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments.errors import UserError
from .base import (
    Engine,
    FiniteGradients,
    OptimizerSettings,
    StepReport,
    cpu_state_dict,
    load_trained_weights,
    module_mode,
    trained_weights,
)
from .deepspeed_config import deepspeed_config, frozen_config, initial_scale
from .deepspeed_state import load_shard_state, shard_state
from .optimizers import Schedule, create_optimizer, parameter_groups

# Elements that full_state_dict gathers at once under ZeRO-3: what is held beside the shards on each device.
_GATHER_ELEMENTS = 2**26


def start_deepspeed(device: torch.device) -> Any:
    """Import deepspeed, make it quiet, and join it to torch's process group (made here for one process alone).

    Raises:
        UserError: deepspeed is not installed.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise UserError("--deepspeed needs the package deepspeed; install it with: pip install deepspeed") from error
    deepspeed.utils.logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # deepspeed reads its device from there
    # On a CPU deepspeed would compile a shared-memory reduction for inference at its first start; training never
    # calls it, and a compiler need not be there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _initialize(deepspeed: Any, **arguments: Any) -> Any:
    """deepspeed's engine, without the memory report that its bfloat16 optimizer always prints."""
    with redirect_stdout(io.StringIO()):
        return deepspeed.initialize(dist_init_required=False, **arguments)[0]


class _Autocast(nn.Module):
    """Computes a module in a low precision; inside the engine's forward, which switches an outer autocast off."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self._device_type, self._dtype = module, device_type, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype):
            return self.module(*args, **kwargs)


class DeepSpeedEngine(Engine):
    """AdamW under DeepSpeed. The schedule, the finite check and (at stage 0) clipping are ours, the rest is its own.

    Stage 0 keeps float32 weights on every rank and computes bfloat16 and float16 through autocast; stages 1 to 3
    hold the module itself in that precision and a float32 master copy in shards.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        zero_stage: int,
        offload: bool,
        micro_batch_size: int,
        micro_batches_per_step: int,
        world_size: int,
    ) -> None:
        """Hand the module to DeepSpeed; every rank must do so, with equal arguments.

        Raises:
            UserError: deepspeed is missing, nothing to train, an unknown stage, or offload at stage 0.
        """
        config = deepspeed_config(
            zero_stage=zero_stage,
            offload=offload,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            micro_batches_per_step=micro_batches_per_step,
            world_size=world_size,
            max_grad_norm=settings.max_grad_norm,
        )
        device = torch.device(device)
        groups = parameter_groups(module, settings)
        scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
        assert not scalars, f"DeepSpeed cannot hold parameters of shape (), give them shape (1,): {scalars}"
        deepspeed = start_deepspeed(device)
        self._parameters = [parameter for group in groups for parameter in group["params"]]
        self.module, self.sharded, self._zero = module, zero_stage == 3, deepspeed.zero
        self._device, self._stage, self._max_grad_norm = device, zero_stage, settings.max_grad_norm
        self._world_size, self._offload = world_size, offload
        autocast = zero_stage == 0 and dtype != torch.float32
        self._autocast = torch.autocast(device.type, dtype=dtype if autocast else None, enabled=autocast)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=initial_scale(world_size), enabled=autocast and dtype == torch.float16
        )
        if zero_stage == 0 or dtype == torch.float32:
            module.float()
        self.optimizer = create_optimizer(groups, settings)
        self.engine = _initialize(
            deepspeed,
            model=_Autocast(module, device.type, dtype) if autocast else module,
            optimizer=self.optimizer,
            config=config,
        )
        self.schedule = Schedule(self.optimizer.param_groups, settings)
        self._finite = FiniteGradients(self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def accumulate(self, loss: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed divides the sum over the ranks by their number.
        self.engine.backward(self.scaler.scale(loss * self._world_size), scale_wrt_gas=False)
        self._finite.fold()

    def gradients_finite(self) -> bool:
        return self._finite.read()

    def _finite_everywhere(self) -> bool:
        flag = torch.tensor(float(self.gradients_finite()), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def step(self) -> StepReport:
        if not self._finite_everywhere():
            return self._discard(overflow=True)
        if self._stage == 0:
            self.scaler.unscale_(self.optimizer)
            limit = self._max_grad_norm or float("inf")
            grad_norm = nn.utils.clip_grad_norm_(self._parameters, limit)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.engine.zero_grad()
            return self._finish(StepReport(False, float(grad_norm), self.learning_rates))
        self.engine.step()
        if self.engine.optimizer.overflow:  # float16: finite on each rank, but their sum was not
            return self._finish(StepReport(True, float("nan"), self.learning_rates))
        return self._finish(StepReport(False, float(self.engine.get_global_grad_norm()), self.learning_rates))

    def discard(self) -> StepReport:
        return self._discard(overflow=not self._finite_everywhere())

    def _discard(self, overflow: bool) -> StepReport:
        if self._stage == 0:
            if overflow and self.scaler.is_enabled():
                self.scaler.unscale_(self.optimizer)  # notes the overflow, which makes update() lower the scale
                self.scaler.update()
            self.engine.zero_grad()
        else:
            _clear_gradients(self.engine.optimizer, self._stage, self._offload)
            if overflow and self.engine.fp16_enabled():
                self.engine.optimizer._update_scale(True)
        return self._finish(StepReport(True, float("nan"), self.learning_rates))

    def _finish(self, report: StepReport) -> StepReport:
        self._finite.reset()
        self.schedule.step()
        return report

    @property
    def learning_rates(self) -> dict[str, float]:
        return self.schedule.learning_rates

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with torch.no_grad(), self._autocast:
            if not self.sharded:
                yield
                return
            with _whole_weights(self.module, self.engine.optimizer.parameter_offload, self._zero):
                yield

    def full_state_dict(self, submodule: nn.Module | None = None) -> dict[str, Tensor]:
        module = self.module if submodule is None else submodule
        if self.sharded:
            return _gather_state_dict(module, self._zero)
        return cpu_state_dict(module) if dist.get_rank() == 0 else {}

    def shared_state(self) -> dict[str, Any]:
        state = {"schedule": self.schedule.state_dict(), "scaler": self.scaler.state_dict()}
        if self._stage < 3:
            state["weights"] = trained_weights(self.module)
        if self._stage == 0:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def rank_state(self) -> dict[str, Any]:
        return {} if self._stage == 0 else shard_state(self.engine.optimizer)

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        if self._stage < 3:
            load_trained_weights(self.module, shared["weights"])
        if self._stage == 0:
            self.optimizer.load_state_dict(shared["optimizer"])
        else:
            load_shard_state(self.engine.optimizer, own, sharded_weights=self.sharded)
        self.schedule.bind(self.optimizer.param_groups)
        self.schedule.load_state_dict(shared["schedule"])
        self.scaler.load_state_dict(shared["scaler"])


class FrozenDeepSpeedEngine:
    """A module that is only read, its weights sharded over the ranks by ZeRO-3 (reference and reward model)."""

    sharded = True

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool,
        micro_batch_size: int,
        world_size: int,
    ) -> None:
        """Shard the module; every rank must do so. ``offload`` keeps the shards in the CPU's memory.

        Raises:
            UserError: deepspeed is missing.
        """
        deepspeed = start_deepspeed(torch.device(device))
        config = frozen_config(
            offload=offload, dtype=dtype, micro_batch_size=micro_batch_size, world_size=world_size
        )
        self.module, self._zero = module.requires_grad_(False), deepspeed.zero
        self.engine = _initialize(deepspeed, model=module, config=config)
        self.engine.eval()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward on all ranks at once, without gradients."""
        with module_mode(self.engine, False):
            return self.engine(*args, **kwargs)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole weights on every rank, see :meth:`Engine.gathered`."""
        with torch.no_grad(), _whole_weights(self.module, self.engine.optimizer, self._zero):
            yield


def _clear_gradients(optimizer: Any, stage: int, offload: bool) -> None:
    """Bring a ZeRO optimizer to the state it has after a step, without a step.

    This is what each of DeepSpeed's optimizers does itself when float16 overflows; for other precisions it has no
    name there.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if isinstance(optimizer, BF16_Optimizer):  # stage 1 in bfloat16
        optimizer.clear_lp_grads()
        optimizer.clear_hp_grads()
    elif stage == 3:
        optimizer._pre_step()
        optimizer._partition_all_parameters()
        optimizer._overflow_clean_up(optimizer.loss_scale)
    else:
        optimizer.micro_step_id = -1
        optimizer.zero_grad(set_to_none=True)
        if offload:
            optimizer.reset_cpu_buffers()
        optimizer.averaged_gradients.clear()
        optimizer.all_grad_tensors.clear()


@contextmanager
def _whole_weights(module: nn.Module, hooks: Any, zero: Any) -> Iterator[None]:
    """Gather every parameter and take ZeRO-3's hooks off meanwhile: they would release each layer after its use."""
    with zero.GatheredParameters(list(module.parameters())):
        for hook in hooks.forward_hooks + hooks.backward_hooks:
            hook.remove()
        hooks.forward_hooks, hooks.backward_hooks = [], []
        try:
            yield
        finally:
            hooks._register_deepspeed_module(hooks.module)


def _gather_state_dict(module: nn.Module, zero: Any) -> dict[str, Tensor]:
    """Gather some parameters at a time and copy them on the main rank before they are released (L-05)."""
    main = dist.get_rank() == 0
    state: dict[str, Tensor] = dict.fromkeys(module.state_dict())  # keeps the order of names
    entries = module.state_dict(keep_vars=True)
    chunk: list[nn.Parameter] = []
    copies: dict[int, Tensor] = {}

    def flush() -> None:
        with zero.GatheredParameters(chunk):
            if main:
                copies.update((id(tensor), tensor.detach().to("cpu", copy=True)) for tensor in chunk)
        chunk.clear()

    seen: set[int] = set()
    for tensor in entries.values():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if sum(parameter.ds_numel for parameter in chunk) > _GATHER_ELEMENTS:
            flush()
        if isinstance(tensor, nn.Parameter):
            chunk.append(tensor)
        elif main:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
    flush()
    return {name: copies[id(entries[name])] for name in state} if main else {}

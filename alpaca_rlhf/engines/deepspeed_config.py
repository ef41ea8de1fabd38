"""The DeepSpeed configuration as a pure function; nothing here imports deepspeed."""

import math

import torch

from ..arguments.errors import UserError

# Elements that DeepSpeed gathers before it reduces them in one collective. Its own default, 5e8, allocates gigabytes
# of buffer even for a small model.
_BUCKET_ELEMENTS = 50_000_000


def initial_scale(world_size: int) -> float:
    """Where the dynamic loss scale of float16 starts: 2^16 as in torch's GradScaler, less what the engine
    multiplies the loss with to turn DeepSpeed's mean over the ranks into a sum (a power of two)."""
    return 2.0 ** (16 - (world_size - 1).bit_length())



def deepspeed_config(
    *,
    zero_stage: int,
    offload: bool,
    dtype: torch.dtype,
    micro_batch_size: int,
    micro_batches_per_step: int,
    world_size: int,
    max_grad_norm: float,
) -> dict:
    """The ``config`` of ``deepspeed.initialize`` for a module that is trained.

    Stages 1 to 3 hold the weights in ``dtype``, with float32 master weights and float32 accumulation of gradients.
    Stage 0 has nothing to partition: its configuration is float32, and the engine computes through autocast and
    clips, as the plain engine does. The batch numbers are informative: the engine says itself where an optimizer
    step ends, and undoes DeepSpeed's averaging.

    Raises:
        UserError: an unknown stage, or offload at stage 0.
    """
    if offload and zero_stage == 0:
        raise UserError("--offload needs --zero_stage 1, 2 or 3: at stage 0 DeepSpeed has nothing to offload")
    config = _common(zero_stage, offload, micro_batch_size)
    config["gradient_accumulation_steps"] = micro_batches_per_step
    config["train_batch_size"] = micro_batch_size * micro_batches_per_step * world_size
    # A torch optimizer is handed in: it needs no compiler, and its fused kernel runs on a CPU as well.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    if offload:
        config["zero_optimization"]["offload_optimizer"] = _on_cpu()
    if zero_stage > 0:
        config["gradient_clipping"] = max_grad_norm
        if dtype != torch.float32:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
            config |= _precision(dtype, world_size)
    return config


def frozen_config(*, offload: bool, dtype: torch.dtype, micro_batch_size: int, world_size: int) -> dict:
    """The ``config`` for a module that is only read, its weights sharded over the ranks (stage 3)."""
    config = _common(3, offload, micro_batch_size)
    config["train_batch_size"] = micro_batch_size * world_size
    return config if dtype == torch.float32 else config | _precision(dtype, world_size)


def _on_cpu() -> dict:
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()}


def _common(zero_stage: int, offload_weights: bool, micro_batch_size: int) -> dict:
    if zero_stage not in (0, 1, 2, 3):
        raise UserError(f"--zero_stage {zero_stage} does not exist; choose 0, 1, 2 or 3")
    zero: dict = {
        "stage": zero_stage,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
    }
    if zero_stage == 3:
        # Parameters below the threshold (norms, biases) stay whole on every rank: gathering them costs more time
        # than they cost memory. The engine gathers for itself what is saved.
        zero["stage3_param_persistence_threshold"] = 10_000
        zero["stage3_gather_16bit_weights_on_model_save"] = False
        if offload_weights:
            zero["offload_param"] = _on_cpu()
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "zero_optimization": zero,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def _precision(dtype: torch.dtype, world_size: int) -> dict:
    if dtype == torch.bfloat16:
        return {"bf16": {"enabled": True}}
    assert dtype == torch.float16, dtype
    # Hysteresis 1: one overflow lowers the scale at once, as torch's GradScaler does.
    return {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": int(math.log2(initial_scale(world_size))),
            "hysteresis": 1,
        }
    }

"""Choose between the two engines: DeepSpeed when asked for, plain torch otherwise."""

from typing import Any

from torch import nn

from alpaca_rlhf.engines.base import Engine, OptimizerSettings
from alpaca_rlhf.engines.plain import PlainEngine


def create_engine(
    module: nn.Module,
    settings: OptimizerSettings,
    run: Any,
    *,
    deepspeed: bool,
    zero_stage: int = 0,
    offload: bool = False,
    micro_batch_size: int,
    micro_batches_per_step: int,
) -> Engine:
    """The engine that holds ``module``; ``run`` gives device, dtype and world size.

    Raises:
        UserError: more than one process without DeepSpeed, DeepSpeed not installed, or settings it cannot meet.
    """
    if not deepspeed:
        return PlainEngine(module, settings, device=run.device, dtype=run.dtype, world_size=run.world_size)
    from alpaca_rlhf.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(
        module,
        settings,
        device=run.device,
        dtype=run.dtype,
        zero_stage=zero_stage,
        offload=offload,
        micro_batch_size=micro_batch_size,
        micro_batches_per_step=micro_batches_per_step,
        world_size=run.world_size,
    )

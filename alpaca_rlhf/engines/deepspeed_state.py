"""What one rank of a ZeRO optimizer puts into a checkpoint, as tensors and numbers only.

DeepSpeed's own save_checkpoint has collectives between its writes, so a disk that is full for one rank would leave the
others waiting, and it pickles objects. Its optimizers' state_dict and load_state_dict are used, without the objects.
"""

import io
from contextlib import redirect_stdout
from typing import Any

import torch.distributed as dist

# What of the optimizers' state_dict() changes while training; the rest (versions, layouts) is that of the live object.
_CHANGING = (
    "base_optimizer_state", "single_partition_of_fp32_groups",  # stages 1 and 2
    "optimizer_state_dict", "fp32_flat_groups",  # stage 3
)  # fmt: skip


def shard_state(optimizer: Any) -> dict[str, Any]:
    """This rank's master weights and optimizer state, and the loss scale of float16; live tensors, no collective."""
    live = optimizer.state_dict()
    state = {name: live[name] for name in _CHANGING if name in live}
    assert len(state) == 2, f"an unknown layout of ZeRO's state: {sorted(live)}"
    scale = {}
    if "loss_scaler" in live:
        scale = {name: value for name, value in vars(live["loss_scaler"]).items() if isinstance(value, int | float)}
    return {"state": state, "loss_scale": scale}


def load_shard_state(optimizer: Any, saved: dict[str, Any], *, sharded_weights: bool) -> None:
    """Take over what :func:`shard_state` gave on this rank; every rank must call it.

    The module's low-precision weights of stages 1 and 2 are not part of it.
    """
    live = optimizer.state_dict()
    if "loss_scaler" in live:
        vars(live["loss_scaler"]).update(saved["loss_scale"])
    ranks = {dist.get_rank(): {**live, **saved["state"]}}
    with redirect_stdout(io.StringIO()):  # the bfloat16 optimizer prints a line of debugging
        optimizer.load_state_dict(ranks, load_optimizer_states=True, load_from_fp32_weights=True)
    if sharded_weights:
        optimizer.checkpoint_event_epilogue()  # small parameters are whole on every rank again

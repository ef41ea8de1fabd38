"""What the cases of deepspeed_worker.py share: this rank, its engines, and one uneven optimizer step."""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from alpaca_rlhf.engines.base import Engine, OptimizerSettings, StepReport
from alpaca_rlhf.engines.plain import PlainEngine

CPU = torch.device("cpu")
# eps well above the rounding noise of a gradient: GPT-2's key bias has gradient 0 in exact arithmetic, and Adam would
# blow the noise up to a full step. The norm limit is below every gradient norm met here, so each step clips.
SETTINGS = OptimizerSettings(1e-2, 0.1, 2e-2, "cosine", 2, 8, max_grad_norm=0.5, eps=1e-3)
ROWS = torch.randint(3, 60, (32, 12), generator=torch.Generator().manual_seed(0))
PLAN = (2, 3, 1, 2)  # micro-batches of each rank per optimizer step: uneven on purpose
STAGES = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
LossOf = Callable[[Engine, Tensor], Tensor]


def world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def deepspeed_engine(module: nn.Module, stage: int, offload: bool = False, dtype=torch.float32, settings=SETTINGS):
    from alpaca_rlhf.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(
        module, settings, device=CPU, dtype=dtype, zero_stage=stage, offload=offload, micro_batch_size=1,
        micro_batches_per_step=max(PLAN), world_size=world()[1],
    )  # fmt: skip


def plain_engine(module: nn.Module, dtype=torch.float32, settings=SETTINGS):
    return PlainEngine(module, settings, device=CPU, dtype=dtype)


def causal_loss(engine: Engine, rows: Tensor) -> Tensor:
    return engine(input_ids=rows, labels=rows).loss


def train_step(
    engine: Engine, step: int, loss_of: LossOf = causal_loss, factor: float = 1.0, broken_off: bool = False
) -> None:
    """Accumulate one step: a sum over rows of all ranks, unequally weighted; the plain engine does all of them.

    ``broken_off``: stop before the last micro-batch.
    """
    rank, size = world()
    plain = isinstance(engine, PlainEngine)
    mine = [(i, r) for i in range(PLAN[step]) for r in (range(size) if plain else [rank])]
    with engine.training_mode():
        for position, (i, r) in enumerate(mine[:-1] if broken_off else mine):
            row = ROWS[(8 * step + size * i + r) % len(ROWS)][None]
            loss = loss_of(engine, row) * factor * (1 + i + r) / (PLAN[step] * size)
            engine.accumulate(loss, last=position == len(mine) - 1)


def train(engine: Engine, loss_of: LossOf = causal_loss) -> list[StepReport]:
    reports = []
    for step in range(len(PLAN)):
        train_step(engine, step, loss_of)
        assert engine.gradients_finite()
        reports.append(engine.step())
    return reports


def assert_same_weights(engine: Engine, plain: PlainEngine, part=None, plain_part=None) -> None:
    ours, theirs = engine.full_state_dict(part), plain.full_state_dict(plain_part)
    if world()[0] > 0:
        assert ours == {}
        return
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].shape == theirs[name].shape and ours[name].device == CPU
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")

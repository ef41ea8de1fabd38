"""One rank of the DeepSpeed rows: runs the given cases one after the other in one process group.

    RANK=0 WORLD_SIZE=2 … python -m tests.equivalence.worker FOLDER CASE CASE …

FOLDER is a world of ``runs.Runs`` for each kind of model; a case leaves its output in FOLDER/KIND/ranks/CASE. The last
line a rank prints names the case that was on its way, should one fail.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from alpaca_rlhf.engines import deepspeed_engine
from alpaca_rlhf.engines.deepspeed_engine import DeepSpeedEngine, FrozenDeepSpeedEngine
from tests.equivalence.runs import LORA, LORA3, TEXTS, argv, tight
from tests.pipeline.steps import PROGRAMS

THRESHOLD = "stage3_param_persistence_threshold"


@dataclass(frozen=True)
class Case:
    """One run with DeepSpeed, and the plain run on one process that it must equal."""

    step: int
    stage: int
    processes: int
    kind: str = "llama"
    micro: int = 2  # records per process and micro-batch; the global batch is the reference's, 8
    sharded: bool = True  # ZeRO-3 shards every parameter; False: it keeps the small ones whole, as the program asks it
    given: dict[str, object] = field(default_factory=dict)  # flags of both runs
    own: dict[str, object] = field(default_factory=dict)  # flags of this run alone
    more: str = ""
    slow: bool = False

    @property
    def name(self) -> str:
        cut = f"{self.processes}x{self.micro}x{8 // self.processes // self.micro}"
        words = [f"step{self.step}", self.kind, f"zero{self.stage}", cut, self.more]
        return "-".join(word for word in words if word) + ("" if self.sharded or self.stage < 3 else "-whole")

    def flags(self) -> dict[str, object]:
        """Of this run, over the reference's."""
        accumulation = {"gradient_accumulation_steps": 8 // self.processes // self.micro, "deepspeed": True}
        if self.step < 3:
            cut = {"per_device_train_batch_size": self.micro, "zero_stage": self.stage}
        else:
            per_rank = 16 // self.processes
            cut = {"per_device_train_batch_size": per_rank // 2, "generation_batches": 2}
            cut |= {"per_device_mini_train_batch_size": self.micro}
            cut |= {"actor_zero_stage": self.stage, "critic_zero_stage": self.stage}
        return {**accumulation, **cut, **self.given, **self.own}


EMA = {"enable_ema": True, "ema_decay": 0.5}
RECOMPUTED = {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True}


def cases() -> dict[str, Case]:
    """Every case by its name; the slow ones are not part of a plain test."""
    found = [Case(step, stage, 2) for step in (1, 2, 3) for stage in (0, 1, 2, 3)]
    found += [Case(step, stage, 1, micro=4, sharded=False, slow=True) for step in (1, 2, 3) for stage in (0, 1, 2, 3)]
    found += [Case(step, stage, 2, "gpt2", slow=True) for step in (1, 2, 3) for stage in (0, 1, 2, 3)]
    found += [Case(step, 3, 2, "gpt2", sharded=False, slow=True) for step in (1, 2, 3)]
    found += [Case(step, 2, 2, micro=micro, slow=True) for step in (1, 2, 3) for micro in (1, 4)]
    # Four roles on two sharded backbones.
    few = {"actor_lora_module_name": "q_proj", "critic_lora_module_name": "q_proj,down_proj"}
    found += [Case(3, 3, 2, given=LORA3 | few | EMA, own=RECOMPUTED, more="few_lora_ema_recomputed")]
    found += [Case(3, stage, 2, given=LORA3, more="lora", slow=True) for stage in (0, 1, 2, 3)]
    found += [Case(step, stage, 2, given=LORA, more="lora", slow=True) for step in (1, 2) for stage in (0, 1, 2, 3)]
    found += [Case(3, 3, 2, "gpt2", given=EMA, own=RECOMPUTED, more="ema_recomputed", slow=True)]
    running = {"reward_normalization": "running", "kl_target": 0.5, "kl_horizon": 100}
    found += [Case(3, 3, 2, given=running, more="running", slow=True)]
    found += [Case(2, 3, 2, given={"pair_loss": "per_token"}, more="per_token", slow=True)]
    found += [Case(3, stage, 2, given=TEXTS, more="texts", slow=stage != 2) for stage in (0, 1, 2, 3)]
    offload = {"offload": True}
    frozen = {**offload, "offload_reference_model": True, "offload_reward_model": True}
    for step in (1, 2, 3):
        for stage in (1, 2, 3):
            found += [Case(step, stage, 2, own=frozen if step == 3 else offload, more="offload", slow=True)]
    found += [Case(3, 3, 2, own={"critic_zero_stage": 0}, more="critic_zero0", slow=True)]
    found += [Case(3, 2, 2, own={"critic_zero_stage": 3}, more="critic_zero3", slow=True)]
    found += [Case(step, 3, 2, given={"eval_interval": 1}, more="evaluated", slow=True) for step in (1, 2)]
    assert len({case.name for case in found}) == len(found)
    return {case.name: case for case in found}


def without_threshold(make: Callable[..., dict], **settings: object) -> dict:
    """DeepSpeed's configuration as ``make`` gives it, with nothing too small to be sharded."""
    made = make(**settings)
    if THRESHOLD in made["zero_optimization"]:
        made["zero_optimization"][THRESHOLD] = 0
    return made


@contextmanager
def everything_sharded(sharded: bool) -> Iterator[None]:
    """The program lets ZeRO-3 keep parameters below 10,000 numbers whole; tiny models have no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("deepspeed_config", "frozen_config") if sharded else ():
            patch.setattr(deepspeed_engine, name, partial(without_threshold, getattr(deepspeed_engine, name)))
        yield


@contextmanager
def sharded_modules() -> Iterator[list[torch.nn.Module]]:
    """The modules that ZeRO-3 gets to hold inside, trained or frozen."""
    found: list[torch.nn.Module] = []
    train, freeze = DeepSpeedEngine.__init__, FrozenDeepSpeedEngine.__init__

    def trained(self, module, *rest, zero_stage: int, **settings) -> None:
        found.extend([module] * (zero_stage == 3))
        train(self, module, *rest, zero_stage=zero_stage, **settings)

    def frozen(self, module, **settings) -> None:
        found.append(module)
        freeze(self, module, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "__init__", trained)
        patch.setattr(FrozenDeepSpeedEngine, "__init__", frozen)
        yield found


def assert_sharded(case: Case, modules: list[torch.nn.Module]) -> None:
    """Actor and critic, and the reference and reward model where they are copies; each rank holds its share alone."""
    stages = [case.stage] if case.step < 3 else [case.flags()[f"{role}_zero_stage"] for role in ("actor", "critic")]
    copies = 2 if case.step == 3 and "only_optimize_lora" not in case.given else 1
    assert len(modules) == copies * stages.count(3), (case.name, len(modules))
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // case.processes)
        assert not (case.sharded and parameter.ds_persist)


def main(folder: Path, names: list[str]) -> None:
    """The steps' own ``main``, so that the process group lives on from one case to the next."""
    torch.set_num_threads(1)
    for name in names:
        case = cases()[name]
        world = folder / case.kind
        print(f"case {name}", time.strftime("%X"), flush=True)
        with tight(), everything_sharded(case.sharded), sharded_modules() as modules:
            PROGRAMS[case.step](argv(case.step, world, world / "ranks" / name, **case.flags()))
        assert_sharded(case, modules)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

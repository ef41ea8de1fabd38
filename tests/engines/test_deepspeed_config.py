import sys

import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.engines.deepspeed_config import deepspeed_config, frozen_config, initial_scale
from alpaca_rlhf.engines.deepspeed_engine import start_deepspeed


def config(**changes) -> dict:
    values = dict(
        zero_stage=2, offload=False, dtype=torch.float32, micro_batch_size=3, micro_batches_per_step=5, world_size=4,
        max_grad_norm=0.7,
    )  # fmt: skip
    return deepspeed_config(**(values | changes))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batch_numbers_agree(stage: int) -> None:
    made = config(zero_stage=stage)
    assert made["train_batch_size"] == 60
    assert made["train_micro_batch_size_per_gpu"] == 3
    assert made["gradient_accumulation_steps"] == 5
    assert made["zero_optimization"]["stage"] == stage


def test_clipping_is_deepspeeds_only_where_it_owns_the_gradients() -> None:
    assert "gradient_clipping" not in config(zero_stage=0)
    assert config(zero_stage=1)["gradient_clipping"] == 0.7


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_precision(stage: int) -> None:
    assert not {"bf16", "fp16", "data_types"} & set(config(zero_stage=stage))
    made = config(zero_stage=stage, dtype=torch.bfloat16)
    assert made["bf16"] == {"enabled": True} and made["data_types"] == {"grad_accum_dtype": "fp32"}
    made = config(zero_stage=stage, dtype=torch.float16)
    assert made["fp16"]["enabled"] and made["fp16"]["loss_scale"] == 0
    assert made["fp16"]["initial_scale_power"] == 14  # 2^16 over the 4 ranks


def test_stage_0_is_float32_for_deepspeed() -> None:
    assert config(zero_stage=0, dtype=torch.bfloat16) == config(zero_stage=0)


@pytest.mark.parametrize(("world_size", "power"), [(1, 16), (2, 15), (3, 14), (8, 13)])
def test_initial_scale_leaves_room_for_the_sum_over_ranks(world_size: int, power: int) -> None:
    assert initial_scale(world_size) == 2.0**power


def test_offload() -> None:
    assert "offload_optimizer" not in config()["zero_optimization"]
    for stage in (1, 2, 3):
        zero = config(zero_stage=stage, offload=True)["zero_optimization"]
        assert zero["offload_optimizer"]["device"] == "cpu"
        assert ("offload_param" in zero) == (stage == 3)
    with pytest.raises(UserError, match="--offload needs --zero_stage 1, 2 or 3"):
        config(zero_stage=0, offload=True)


def test_unknown_stage() -> None:
    with pytest.raises(UserError, match="--zero_stage 4"):
        config(zero_stage=4)


def test_frozen_has_no_optimizer_and_is_sharded() -> None:
    made = frozen_config(offload=True, dtype=torch.bfloat16, micro_batch_size=2, world_size=4)
    assert made["zero_optimization"]["stage"] == 3 and made["bf16"] == {"enabled": True}
    assert "offload_param" in made["zero_optimization"] and "offload_optimizer" not in made["zero_optimization"]
    assert made["train_batch_size"] == 8


def test_Z05_a_missing_deepspeed_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(UserError, match="pip install deepspeed"):
        start_deepspeed(torch.device("cpu"))

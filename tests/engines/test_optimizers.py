import math

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.engines.base import OptimizerSettings
from alpaca_rlhf.engines.optimizers import SCHEDULES, Schedule, create_optimizer, parameter_groups, rate_factor
from tests.tiny import tiny_gpt2, tiny_llama

SETTINGS = OptimizerSettings(1e-5, 0.1, 5e-4, "cosine", 0, 10, 1.0)


def names_by_group(module: nn.Module, settings=SETTINGS) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in parameter_groups(module, settings)}


@pytest.mark.parametrize("model", [tiny_gpt2, tiny_llama])
def test_S07_no_decay_on_norms_biases_and_vectors(model) -> None:
    module = model()
    groups = names_by_group(module)
    parameters = dict(module.named_parameters())
    assert set(groups) == {"decay", "no_decay"}
    assert sorted(groups["decay"] + groups["no_decay"]) == sorted(parameters)
    assert all(parameters[name].ndim > 1 for name in groups["decay"])
    assert any("embed" in name or "wte" in name for name in groups["decay"])
    assert {group["name"]: group["weight_decay"] for group in parameter_groups(module, SETTINGS)} == {
        "decay": 0.1,
        "no_decay": 0.0,
    }


class OddNorm(nn.Module):
    """A norm by its type, in a spelling no list of names has, with a two-dimensional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 2))


def test_S07_norm_is_known_by_type_not_by_name() -> None:
    module = nn.ModuleDict({"a": OddNorm(), "norm_like_name": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    groups = names_by_group(module)
    assert groups["decay"] == ["norm_like_name.weight"]
    assert set(groups["no_decay"]) == {"a.gain", "norm_like_name.bias", "b.weight", "b.bias"}


def test_a_tied_parameter_appears_once() -> None:
    module = tiny_gpt2()
    assert module.lm_head.weight is module.transformer.wte.weight
    groups = parameter_groups(module, SETTINGS)
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(ids) == len(set(ids)) == len(list(module.parameters()))


def lora_layer() -> nn.Module:
    return nn.ModuleDict({
        "base_layer": nn.Linear(4, 4), "lora_A": nn.Linear(4, 2, bias=False), "lora_B": nn.Linear(2, 4, bias=False),
        "lora_magnitude_vector": nn.ParameterList([nn.Parameter(torch.ones(4))]),
    })  # fmt: skip


def test_L03_lora_only_has_its_own_rate_and_no_empty_group() -> None:
    module = lora_layer()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)
    optimizer = create_optimizer(parameter_groups(module, SETTINGS), SETTINGS)
    assert Schedule(optimizer.param_groups, SETTINGS).learning_rates == {"lora": 5e-4, "lora_no_decay": 5e-4}
    assert names_by_group(module)["lora"] == ["lora_A.weight", "lora_B.weight"]
    module.requires_grad_(True)
    assert list(names_by_group(module)) == ["decay", "no_decay", "lora", "lora_no_decay"]


def test_without_its_own_rate_lora_uses_the_common_one() -> None:
    settings = OptimizerSettings(3e-4, 0.0, None, "constant", 0, 1, 1.0)
    assert {group["lr"] for group in parameter_groups(lora_layer(), settings)} == {3e-4}


def test_nothing_trainable_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no trainable parameter"):
        parameter_groups(tiny_llama().requires_grad_(False), SETTINGS)


def test_B36i_first_step_learns_and_the_50th_of_100_has_half_the_peak() -> None:
    factor = rate_factor("cosine", 100, 1000)
    rates = [factor(step) for step in range(1000)]  # step 0 is the first
    assert rates[0] == pytest.approx(0.01)
    assert rates[50 - 1] == 0.5
    assert rates[100 - 1] == rates[100] == 1.0
    assert all(rate > 0 for rate in rates)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_after_the_warm_up_it_is_the_schedule_of_transformers(name: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=9)
    factor = rate_factor(name, warmup, 9)
    for step in range(9):
        if step >= warmup or name == "constant":
            assert factor(step) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        else:
            assert factor(step) == pytest.approx((step + 1) / warmup)
        optimizer.step()
        reference.step()


def test_cosine_by_hand_ends_after_the_last_step_and_stays_there() -> None:
    factor = rate_factor("cosine", 2, 6)
    by_hand = [0.5, 1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2, 0.0, 0.0, 0.0]
    assert [factor(step) for step in range(9)] == pytest.approx(by_hand)


def test_more_warm_up_than_steps_keeps_rising() -> None:
    factor = rate_factor("linear", 100, 5)
    assert [factor(step) for step in range(5)] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])


def test_an_unknown_schedule_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="'sawtooth'.*cosine_with_restarts"):
        rate_factor("sawtooth", 0, 1)


def test_schedule_scales_each_group_and_continues_from_its_state() -> None:
    def groups() -> list[dict]:
        return [{"name": "decay", "lr": 1.0}, {"name": "lora", "lr": 10.0}]

    settings = OptimizerSettings(1.0, 0.0, 10.0, "linear", 0, 4, 1.0)
    schedule = Schedule(groups(), settings)
    assert schedule.learning_rates == {"decay": 1.0, "lora": 10.0}
    schedule.step()
    schedule.step()
    assert schedule.learning_rates == {"decay": 0.5, "lora": 5.0}
    other = Schedule(groups(), settings)
    other.load_state_dict(schedule.state_dict())
    assert other.learning_rates == schedule.learning_rates

"""The plain engine is the reference of the others, so it is tested against hand-written torch."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.engines.base import FiniteGradients, OptimizerSettings
from alpaca_rlhf.engines.frozen import freeze
from alpaca_rlhf.engines.plain import PlainEngine
from tests.tiny import tiny_gpt2, tiny_llama

CPU = torch.device("cpu")
SETTINGS = OptimizerSettings(1e-2, 0.1, None, "constant", 0, 10, max_grad_norm=0.5)
LENGTHS = (1, 15, 3, 8, 2, 11, 5, 7)  # trained tokens of eight answers
ROWS = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))


def engine_of(module: nn.Module, dtype=torch.float32, **changes) -> PlainEngine:
    return PlainEngine(module, replace(SETTINGS, **changes), device=CPU, dtype=dtype)


def loss_sum(engine: PlainEngine, rows: list[int]) -> torch.Tensor:
    """Sum over the trained tokens of some rows."""
    logits = engine(input_ids=ROWS[rows]).logits[:, :-1].float()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ROWS[rows][:, 1:], reduction="none")
    mask = torch.arange(15)[None, :] >= 15 - torch.tensor([LENGTHS[row] for row in rows])[:, None]
    return (losses * mask).sum()


def one_step(engine: PlainEngine, cut: list[list[int]], factor: float = 1.0):
    with engine.training_mode():
        for position, rows in enumerate(cut):
            engine.accumulate(loss_sum(engine, rows) * factor / sum(LENGTHS), last=position == len(cut) - 1)
    return engine.step()


def test_S04_accumulation_does_not_change_the_result() -> None:
    cuts = [[list(range(8))], [[row] for row in range(8)], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2], [3, 4, 5], [6, 7]]]
    states = []
    for cut in cuts:
        engine = engine_of(tiny_llama(), max_grad_norm=0.0)
        one_step(engine, cut)
        states.append(engine.full_state_dict())
    for state in states[1:]:
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, states[0][name], atol=1e-6, rtol=0)


def test_S04_twin_mean_of_means_would_be_seen() -> None:
    right, wrong = engine_of(tiny_llama()), engine_of(tiny_llama())
    one_step(right, [[row] for row in range(8)])
    for row in range(8):
        wrong.accumulate(loss_sum(wrong, [row]) / LENGTHS[row] / 8, last=row == 7)
    wrong.step()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(right.full_state_dict(), wrong.full_state_dict(), atol=1e-6, rtol=0)


def test_one_step_against_adamw_written_out() -> None:
    """Loshchilov & Hutter 2019, algorithm 2: decoupled decay; clipping by the global norm (Pascanu et al. 2013)."""
    module, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    copy.load_state_dict(module.state_dict())
    engine, data = engine_of(module), torch.randn(5, 3)
    for step in range(1, 4):
        engine.accumulate(engine(data).square().sum(), last=True)
        report = engine.step()
        loss = copy(data).square().sum()
        gradients = torch.autograd.grad(loss, [copy.weight, copy.bias])
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5) and norm > 0.5
        if step == 1:
            first = [torch.zeros_like(g) for g in gradients]
            second = [torch.zeros_like(g) for g in gradients]
        with torch.no_grad():
            for i, (parameter, decay) in enumerate([(copy.weight, 0.1), (copy.bias, 0.0)]):
                gradient = gradients[i] * 0.5 / norm
                first[i] = 0.9 * first[i] + 0.1 * gradient
                second[i] = 0.95 * second[i] + 0.05 * gradient**2
                update = (first[i] / (1 - 0.9**step)) / ((second[i] / (1 - 0.95**step)).sqrt() + 1e-8)
                parameter.mul_(1 - 1e-2 * decay).sub_(1e-2 * update)
        torch.testing.assert_close(module.state_dict(), copy.state_dict())


def test_Z07_a_discarded_step_was_never_seen_except_by_the_schedule() -> None:
    settings = {"lr_scheduler_type": "linear"}
    engine, other = engine_of(tiny_llama(), **settings), engine_of(tiny_llama(), **settings)
    one_step(engine, [[0, 1], [2]])
    with engine.training_mode():
        engine.accumulate(loss_sum(engine, [3]), last=False)
        engine.accumulate(loss_sum(engine, [4]), last=True)
    report = engine.discard()
    assert report.skipped and report.learning_rates == {"decay": pytest.approx(9e-3), "no_decay": pytest.approx(9e-3)}
    one_step(other, [[0, 1], [2]])
    other.schedule.step()
    for one in (engine, other):
        one_step(one, [[5], [6, 7]])
    assert engine.learning_rates == other.learning_rates
    torch.testing.assert_close(engine.full_state_dict(), other.full_state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_P14_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, bad: float) -> None:
    engine = engine_of(tiny_llama(), dtype)
    assert not one_step(engine, [[0, 1]]).skipped
    before, scale = engine.full_state_dict(), engine.scaler.get_scale()
    engine.accumulate(loss_sum(engine, [0]) * bad / 100, last=False)
    engine.accumulate(loss_sum(engine, [1]) / 100, last=True)
    assert not engine.gradients_finite()
    report = engine.step()  # a caller that did not look
    assert report.skipped and report.grad_norm != report.grad_norm
    torch.testing.assert_close(engine.full_state_dict(), before, atol=0, rtol=0)
    assert engine.gradients_finite()
    engine.accumulate(loss_sum(engine, [1]) / 100, last=True)
    engine.discard()
    assert engine.scaler.get_scale() == (scale / 2 if dtype == torch.float16 else 1.0)
    assert not one_step(engine, [[0, 1]]).skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_C01_a_loaded_state_goes_on_as_if_nothing_had_happened(dtype: torch.dtype) -> None:
    engine, other = engine_of(tiny_llama(), dtype), engine_of(tiny_llama(seed=1), dtype)
    one_step(engine, [[0, 1], [2]])
    one_step(engine, [[3]], factor=float("inf"))  # lowers the loss scale
    for _ in range(3):
        one_step(engine, [[4, 5], [6, 7]])
    other.load_state(deepcopy(engine.shared_state()), engine.rank_state())
    assert other.scaler.state_dict() == engine.scaler.state_dict()
    if dtype == torch.float16:
        assert engine.scaler.get_scale() == 32768 and engine.scaler.state_dict()["_growth_tracker"] == 3
    for one in (engine, other):
        one_step(one, [[0], [1, 2]])
    assert other.learning_rates == engine.learning_rates
    torch.testing.assert_close(other.full_state_dict(), engine.full_state_dict(), atol=0, rtol=0)


def test_finite_flag_sees_one_bad_element_and_large_sums_are_no_false_alarm() -> None:
    weight = nn.Parameter(torch.ones(4))
    finite = FiniteGradients([weight])
    for scale in (torch.full((4,), 8e37), torch.full((4,), 8e37)):
        (weight * scale).sum().backward()
        finite.fold()
    assert finite.read()
    (weight * torch.tensor([0.0, 0.0, float("nan"), 0.0])).sum().backward()
    assert not finite.read()
    finite.reset()
    assert finite.read()


def test_S05_modes_restore_every_flag() -> None:
    module = tiny_gpt2(dropout=0.5)
    engine = engine_of(module)
    module.transformer.h[0].train()
    flags = [child.training for child in module.modules()]
    assert len(set(flags)) == 2
    with pytest.raises(KeyError), engine.evaluation_mode():
        assert not any(child.training for child in module.modules())
        with engine.training_mode():
            assert all(child.training for child in module.modules())
        raise KeyError
    assert flags == [child.training for child in module.modules()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_float32_weights_and_learns(dtype: torch.dtype) -> None:
    engine, exact = engine_of(tiny_llama(), dtype), engine_of(tiny_llama())
    assert engine(input_ids=ROWS).logits.dtype == dtype
    for _ in range(5):
        assert not one_step(engine, [[0, 1, 2, 3], [4, 5, 6, 7]]).skipped
        one_step(exact, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert all(tensor.dtype == torch.float32 for tensor in engine.full_state_dict().values())
    with torch.no_grad():
        loss, other = loss_sum(engine, [0, 1]) / 16, loss_sum(exact, [0, 1]) / 16
        start = loss_sum(engine_of(tiny_llama()), [0, 1]) / 16
    assert other < start - 0.1
    assert abs(loss - other) < 2e-2  # bfloat16 keeps 8 bits


def test_frozen_weights_under_lora_are_held_in_low_precision() -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    module = peft.inject_adapter_in_model(config, tiny_llama())
    engine = engine_of(module, torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    assert all(dtypes[name] == torch.float32 for name in dtypes if "lora_" in name or "norm" in name)
    assert all(dtypes[name] == torch.bfloat16 for name in dtypes if "base_layer" in name or "v_proj" in name)
    for _ in range(2):
        report = one_step(engine, [[0, 1]])
    assert not report.skipped and list(report.learning_rates) == ["lora"]
    with engine.evaluation_mode(), engine.gathered():
        assert module.generate(ROWS[:1, :4], max_new_tokens=2, min_new_tokens=2).shape == (1, 6)


def test_full_state_dict_has_the_modules_names_buffers_and_ties() -> None:
    module = tiny_gpt2()
    module.register_buffer("counter", torch.arange(3))
    engine = engine_of(module)
    state = engine.full_state_dict()
    assert list(state) == list(module.state_dict())
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    one_step(engine, [[0]])
    assert not torch.equal(state["lm_head.weight"], module.lm_head.weight), "a copy, not a view"
    inner = engine.full_state_dict(module.transformer)
    assert list(inner) == list(module.transformer.state_dict())


def test_more_than_one_process_needs_deepspeed() -> None:
    with pytest.raises(UserError, match="2 processes.*--deepspeed"):
        PlainEngine(tiny_llama(), SETTINGS, device=CPU, dtype=torch.float32, world_size=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_copy_agrees_with_the_engine_and_takes_no_gradient(dtype: torch.dtype) -> None:
    module = tiny_gpt2(dropout=0.5).train()
    frozen, engine = freeze(module, device=CPU, dtype=dtype), engine_of(tiny_gpt2(), dtype)
    with torch.no_grad(), engine.evaluation_mode():
        expected = engine(input_ids=ROWS).logits
    actual = frozen(input_ids=ROWS).logits
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)
    assert not actual.requires_grad and not any(p.requires_grad for p in module.parameters())

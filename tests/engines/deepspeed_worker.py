"""One rank of the DeepSpeed tests: runs every case in one process group and writes what failed as JSON.

Started by test_deepspeed.py, once with one rank and once with two; RANK and WORLD_SIZE come from the environment.
"""

import io
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engines.ranks import (
    CPU,
    PLAN,
    ROWS,
    SETTINGS,
    STAGES,
    assert_same_weights,
    causal_loss,
    deepspeed_engine,
    plain_engine,
    train,
    train_step,
    world,
)  # fmt: skip
from tests.tiny import tiny_gpt2, tiny_llama


def same_numbers(stage: int, offload: bool) -> None:
    engine, plain = deepspeed_engine(tiny_llama(), stage, offload), plain_engine(tiny_llama())
    reports, expected = train(engine), train(plain)
    assert all(report.grad_norm > SETTINGS.max_grad_norm for report in expected)
    for report, other in zip(reports, expected, strict=True):
        assert not report.skipped and report.learning_rates == other.learning_rates
        assert abs(report.grad_norm - other.grad_norm) < 1e-5
    assert_same_weights(engine, plain)
    assert_same_weights(engine, plain, engine.module.model.layers[0], plain.module.model.layers[0])


def averaging_would_be_seen(stage: int, offload: bool) -> None:
    """The twin that must fail: a gradient divided by the number of ranks or micro-batches gives other weights."""
    settings = replace(SETTINGS, max_grad_norm=0.0)
    engine = deepspeed_engine(tiny_llama(), stage, offload, settings=settings)
    plain = plain_engine(tiny_llama(), settings=settings)
    train(engine), train(plain, lambda e, rows: causal_loss(e, rows) / 2)
    try:
        assert_same_weights(engine, plain)
    except AssertionError:
        return
    assert world()[0] > 0, "halved gradients went unnoticed"


def z07_discard_finite(stage: int, offload: bool) -> None:
    """Steps 0 and 1 (broken off half way) are discarded: the run goes on as if it had never seen them."""
    engine, plain = deepspeed_engine(tiny_llama(), stage, offload), plain_engine(tiny_llama())
    for step in range(len(PLAN)):
        train_step(engine, step, broken_off=step == 1)
        if step in (0, 1):
            assert engine.discard().skipped
            plain.schedule.step()
        else:
            engine.step()
            train_step(plain, step)
            plain.step()
        assert engine.learning_rates == plain.learning_rates
    assert_same_weights(engine, plain)


def z07_p14_infinite_on_one_rank(stage: int, offload: bool, dtype: torch.dtype) -> None:
    engine = deepspeed_engine(tiny_llama(), stage, offload, dtype)
    rank, size = world()
    train_step(engine, 0)
    assert not engine.step().skipped
    before, scale = engine.full_state_dict(), loss_scale(engine)
    train_step(engine, 1)
    engine.discard()
    assert loss_scale(engine) == scale, "finite gradients must not lower the loss scale"
    for leave in (engine.discard, engine.step):  # step() must refuse too, for a caller that did not look
        train_step(engine, 1, factor=float("inf") if rank == size - 1 else 1.0)
        assert engine.gradients_finite() == (rank != size - 1)
        assert leave().skipped
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    if dtype == torch.float16:
        assert loss_scale(engine) == scale / 4
    train_step(engine, 3)
    assert not engine.step().skipped
    for name, tensor in engine.full_state_dict().items():
        assert torch.isfinite(tensor).all() and not torch.equal(tensor, before[name]), name


def loss_scale(engine) -> float:
    ours = engine.scaler.get_scale()
    if ours != 1.0 or not engine.engine.fp16_enabled():
        return ours
    return float(engine.engine.optimizer.loss_scale)


def low_precision_learns(stage: int, offload: bool, dtype: torch.dtype) -> None:
    engine, plain = deepspeed_engine(tiny_llama(), stage, offload, dtype), plain_engine(tiny_llama(), dtype)
    assert not any(report.skipped for report in train(engine))
    train(plain)
    with torch.no_grad():
        loss, other = causal_loss(engine, ROWS).item(), causal_loss(plain, ROWS).item()
    # Weights held in bfloat16 have 8 bits: losses of about 4 agree to some thousandths.
    assert abs(loss - other) < 2e-2, (loss, other)


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def lora_only(stage: int, offload: bool) -> None:
    """Only LoRA is trained; between the steps the adapters are switched off, as for the reference model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    engine, plain = deepspeed_engine(with_lora(tiny_llama()), stage, offload), plain_engine(with_lora(tiny_llama()))
    base = tiny_llama()(input_ids=ROWS[:2]).logits
    for one in (engine, plain):
        for step in range(len(PLAN)):
            train_step(one, step)
            report = one.step()
            assert list(report.learning_rates) == ["lora"]
            layers = [layer for layer in one.module.modules() if isinstance(layer, BaseTunerLayer)]
            [layer.enable_adapters(False) for layer in layers]
            with torch.no_grad(), one.evaluation_mode():
                torch.testing.assert_close(one(input_ids=ROWS[:2]).logits, base, atol=1e-5, rtol=1e-5)
            [layer.enable_adapters(True) for layer in layers]
            for name, parameter in one.module.named_parameters():
                parameter.requires_grad_("lora_" in name)
    assert_same_weights(engine, plain)
    assert all(tensor.abs().max() > 0 for name, tensor in plain.full_state_dict().items() if "lora_B" in name)


class Output(NamedTuple):
    loss: Tensor
    nothing: None = None


class Wrapped(nn.Module):
    """Parameters of its own, one of them unused, and a named tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_gpt2()  # tied embeddings
        self.gain = nn.Parameter(torch.full((1,), 0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, rows: Tensor) -> Output:
        return Output(self.model(input_ids=rows, labels=rows).loss * self.gain.sum())


def tied_unused_and_named_tuple(stage: int, offload: bool) -> None:
    engine, plain = deepspeed_engine(Wrapped(), stage, offload), plain_engine(Wrapped())
    for one in (engine, plain):
        train(one, lambda e, rows: e(rows).loss)
    assert_same_weights(engine, plain)


def gathered_generation(stage: int, offload: bool) -> None:
    """Inside gathered() every rank generates as long as it likes; training afterwards is not disturbed (Z-02)."""
    engine, plain = deepspeed_engine(tiny_llama(), stage, offload), plain_engine(tiny_llama())
    for _ in range(2):
        with engine.evaluation_mode(), engine.gathered():
            tokens = 2 + 3 * world()[0]
            made = engine.module.generate(ROWS[:2, :5], max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            assert made.shape == (2, 5 + tokens)
            inside = engine.module(input_ids=ROWS[:2]).logits
        assert not inside.requires_grad
        with torch.no_grad(), engine.evaluation_mode():
            torch.testing.assert_close(engine(input_ids=ROWS[:2]).logits, inside)
        train(engine), train(plain)
    assert_same_weights(engine, plain)


def c01_continues_bit_for_bit(stage: int, offload: bool, dtype: torch.dtype) -> None:
    """State taken after two steps, through a file, into a fresh engine: the next steps give the very same weights."""
    engine = deepspeed_engine(with_lora(tiny_llama()) if offload else tiny_llama(), stage, offload, dtype)
    for step in (0, 1):
        train_step(engine, step)
        engine.step()
    buffer = io.BytesIO()
    torch.save((engine.shared_state(), engine.rank_state()), buffer)
    buffer.seek(0)
    other = deepspeed_engine(with_lora(tiny_llama()) if offload else tiny_llama(seed=5), stage, offload, dtype)
    train_step(other, 3)  # an optimizer state of its own, to be replaced
    other.step()
    other.load_state(*torch.load(buffer, weights_only=True))
    assert other.learning_rates == engine.learning_rates and loss_scale(other) == loss_scale(engine)
    before = engine.full_state_dict()
    for one in (engine, other):
        for step in (2, 3):
            train_step(one, step)
            assert not one.step().skipped
    after, theirs = engine.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(after[name], theirs[name]) for name in after)
    assert world()[0] > 0 or not all(torch.equal(after[name], before[name]) for name in after)


def frozen_agrees(stage: int, offload: bool, dtype: torch.dtype) -> None:
    from alpaca_rlhf.engines.frozen import freeze

    engine = deepspeed_engine(tiny_llama(), stage, offload, dtype)
    frozen = freeze(tiny_llama(), device=CPU, dtype=dtype, zero_stage=stage, offload=offload, world_size=world()[1])
    assert frozen.sharded == (stage == 3)
    with torch.no_grad(), engine.evaluation_mode():
        expected = engine(input_ids=ROWS[:2]).logits
    for _ in range(2):
        scores = frozen(input_ids=ROWS[:2]).logits
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-6)
        assert not scores.requires_grad
        with frozen.gathered():
            torch.testing.assert_close(frozen.module(input_ids=ROWS[:2]).logits, expected, atol=1e-6, rtol=1e-6)


def two_engines_at_once(stage: int, offload: bool) -> None:
    """Actor and critic at different stages, stepped in turn, the actor with gradient checkpointing."""
    actor, critic = deepspeed_engine(checkpointed(), stage, offload), deepspeed_engine(tiny_llama(seed=1), 3 - stage)
    plains = plain_engine(checkpointed()), plain_engine(tiny_llama(seed=1))
    for step in range(len(PLAN)):
        [train_step(engine, step) for engine in (actor, critic, *plains)]
        [engine.step() for engine in (actor, critic, *plains)]
    assert_same_weights(actor, plains[0])
    assert_same_weights(critic, plains[1])


def checkpointed() -> nn.Module:
    model = tiny_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def s05_modes(stage: int, offload: bool) -> None:
    module = tiny_gpt2(dropout=0.5)
    engine = deepspeed_engine(module, stage, offload)
    module.transformer.h[0].train()
    flags = [child.training for child in module.modules()]
    with engine.evaluation_mode():
        assert not any(child.training for child in module.modules())
        assert torch.equal(engine(input_ids=ROWS[:1]).logits, engine(input_ids=ROWS[:1]).logits)
    with engine.training_mode():
        assert all(child.training for child in module.modules())
    assert flags == [child.training for child in module.modules()]


def cases() -> dict[str, Callable[[], None]]:
    """Every case by name."""
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    table = {}

    def add(case: Callable, stage: int, offload: bool, *dtypes: torch.dtype) -> None:
        name = f"{case.__name__}-stage{stage}" + ("_offload" if offload else "")
        for dtype in dtypes:
            table[f"{name}-{str(dtype).removeprefix('torch.')}"] = partial(case, stage, offload, dtype)
        if not dtypes:
            table[name] = partial(case, stage, offload)

    for stage, offload in STAGES:
        add(same_numbers, stage, offload)
        add(z07_discard_finite, stage, offload)
        add(c01_continues_bit_for_bit, stage, offload, *((fp32,) if offload else (fp32, bf16, fp16)))
        add(z07_p14_infinite_on_one_rank, stage, offload, *((fp16,) if offload else (fp32, bf16, fp16)))
        if not offload:
            for case in (averaging_would_be_seen, lora_only, tied_unused_and_named_tuple, gathered_generation):
                add(case, stage, offload)
            add(low_precision_learns, stage, offload, bf16)
            add(frozen_agrees, stage, offload, bf16)
    add(frozen_agrees, 3, True, fp32)
    add(s05_modes, 3, False)
    add(two_engines_at_once, 2, False)
    add(two_engines_at_once, 0, False)
    return table


class Failure:
    """A context that ends every exception and keeps its traceback, so that the ranks can compare theirs."""

    text: str | None = None

    def __enter__(self) -> "Failure":
        return self

    def __exit__(self, kind, error, trace) -> bool:
        if error is not None:
            self.text = "".join(traceback.format_exception(kind, error, trace))
        return True


def main(results: Path, single: bool) -> None:
    """Run the cases (alone: only the numbers of each stage), gather the failures of all ranks on rank 0."""
    rank, size = world()
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    failures = {}
    for name, case in cases().items():
        if single and not name.startswith("same_numbers"):
            continue
        start = time.monotonic()
        with Failure() as failure:
            case()
        everyone: list = [failure.text]
        if size > 1:
            everyone = [None] * size
            dist.all_gather_object(everyone, failure.text)
        failures[name] = [f"rank {r}: {text}" for r, text in enumerate(everyone) if text]
        if rank == 0:
            print(f"{time.monotonic() - start:6.2f} s  {name}", flush=True)
            results.write_text(json.dumps(failures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "results.json", single=sys.argv[2] == "1")

"""The memory estimate against what torch really keeps, and against a count by hand."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import last_hidden_state
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import enable_gradient_checkpointing
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import convert_linear_layer_to_lora
from alpaca_rlhf.doctor.memory import (
    GIB,
    MARGIN,
    PROGRAM,
    Setting,
    Shape,
    activations,
    describe_memory,
    device_memory,
    estimate,
    most_rows,
    shape_of,
)
from alpaca_rlhf.doctor.page import Page
from tests.tiny import tiny_gpt2, tiny_llama


def kept_for_backward(model, rows, length, half=False):
    """Bytes of everything that a forward pass of the decoder keeps, the parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(4, 50, (rows, length))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        last_hidden_state(model.train(), ids, torch.ones_like(ids))
    return sum(size for size, _ in kept.values())


def wide_llama(**config):
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes, **config))


@pytest.mark.parametrize(
    "model, half",
    [(wide_llama, False), (wide_llama, True), (lambda: tiny_gpt2(64), False),
     (lambda: tiny_gpt2(64, dropout=0.1), False)],
    ids=["llama", "llama-bf16", "gpt2", "gpt2-dropout"],
)
def test_activations_are_what_torch_keeps(model, half):
    """Within a fifth: the formula has no place for the rest of each architecture's small tensors."""
    model = model()
    held = kept_for_backward(model, 4, 96, half)
    matrices = [p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    copies = 2 * sum(matrices) if half else 0
    expected = activations(shape_of(model, 8), 4, 96, checkpointing=False, half=half) + copies
    assert expected == pytest.approx(held, rel=0.2)


def test_checkpointing_keeps_one_hidden_state_a_layer():
    """The one layer's activations of the estimate only appear in the backward pass, one layer at a time."""
    model = wide_llama()
    shape = shape_of(model, 8)
    enable_gradient_checkpointing(model)
    kept = kept_for_backward(model, 4, 96)
    inputs = 4 * 4 * 96 * shape.layers * shape.hidden
    assert kept == pytest.approx(inputs, rel=0.35)  # and what the last norm keeps
    layer = activations(replace(shape, layers=1), 4, 96, checkpointing=False, half=False)
    assert activations(shape, 4, 96, checkpointing=True, half=False) == inputs + layer


def test_the_shape_of_a_model():
    model = wide_llama()
    shape = shape_of(model, 8)
    assert (shape.layers, shape.hidden, shape.keys, shape.forward, shape.vocabulary) == (6, 64, 32, 160, 64)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.embeddings == 64 * 64 and not shape.attention_dropout
    report = convert_linear_layer_to_lora(model, (), rank=8, alpha=1.0, seed=0)
    assert shape.adapters == report.trainable
    gpt2 = tiny_gpt2(64, dropout=0.1)
    shape = shape_of(gpt2, 2)
    assert (shape.keys, shape.forward, shape.attention_dropout) == (16, 64, True)
    assert shape.adapters == convert_linear_layer_to_lora(gpt2, (), rank=2, alpha=1.0, seed=0).trainable


SHAPE = Shape(parameters=1000, embeddings=100, adapters=50, layers=2, hidden=8, keys=4, forward=16, heads=2,
              vocabulary=10, attention_dropout=False)  # fmt: skip


def test_the_estimate_is_the_count_of_its_formula():
    full = estimate(SHAPE, Setting(step=1, lora=False, rows=2, length=5))
    assert (full.weights, full.gradients, full.optimizer) == (4000, 4000, 8000)
    assert full.activations == 10 * 2 * (32 * 8 + 8 * 4 + 16 * 16) + 12 * 10 * 10
    assert full.total == 16000 + full.activations + PROGRAM["cpu"]
    lora = estimate(SHAPE, Setting(step=1, lora=True, rows=2, length=5, half=True))
    assert (lora.weights, lora.gradients, lora.optimizer) == (4 * 100 + 2 * 900 + 4 * 50, 200, 400)
    assert lora.activations == 10 * 2 * (32 * 8 + 4 * 4 + 8 * 16) + 2 * 50 + 12 * 10 * 10
    pairs = estimate(SHAPE, Setting(step=2, lora=False, rows=1, length=5))
    assert pairs.activations == full.activations - 12 * 10 * 10  # two sides, no logits
    ppo = estimate(SHAPE, Setting(step=3, lora=False, rows=2, length=5))
    assert (ppo.weights, ppo.gradients, ppo.optimizer) == (16000, 8000, 16000)
    shared = estimate(SHAPE, Setting(step=3, lora=True, rows=2, length=5))
    assert (shared.weights, shared.gradients) == (2 * (4000 + 200), 2 * 200)


def test_the_most_rows_are_the_last_that_fit():
    setting = Setting(step=1, lora=False, rows=1, length=5)
    for available in (PROGRAM["cpu"] * MARGIN + 10**6, PROGRAM["cpu"] * MARGIN + 12_345_678):
        most = most_rows(SHAPE, setting, available)
        assert most > 1
        assert estimate(SHAPE, replace(setting, rows=most)).total * MARGIN <= available
        assert estimate(SHAPE, replace(setting, rows=most + 1)).total * MARGIN > available
    assert most_rows(SHAPE, setting, PROGRAM["cpu"]) == 0


@pytest.mark.parametrize(
    "free, rows, said, unsaid",
    [
        (20, 2, "  yes  ", "what fits"),
        (1.2, 2, "  barely  ", "what fits"),
        (2.0, 10_000, "  no  ", "not one row"),
        (0.9, 2, "not one row; shorter texts, LoRA alone", "  yes  "),
    ],
)
def test_the_page_says_which_settings_fit(free, rows, said, unsaid):
    lines = []
    describe_memory(tiny_llama(), steps=(1, 2, 3), rank=8, rows=rows, length=128, sequence=128, half=False,
                    device=("cpu", "a machine", 24 * GIB, int(free * GIB)), page=Page(lines.append))  # fmt: skip
    text = " ".join("\n".join(lines).replace("\n" + 15 * " ", " ").split("\n"))
    assert said in text and unsaid not in text and "24.0 GiB" in text
    assert all(len(line) <= 100 for line in lines)


def test_the_device_is_there():
    kind, name, total, free = device_memory()
    assert kind == "cpu" and name and 0 < free <= total

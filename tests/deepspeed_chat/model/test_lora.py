"""Which layers are adapted, what trains, and that merging and saving lose nothing."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import (
    enable_gradient_checkpointing,
    load_causal_lm,
    load_tokenizer,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import (
    adapters_disabled,
    check_lora_module_names,
    convert_linear_layer_to_lora,
    convert_lora_to_linear_layer,
    linear_layers,
    merged_state_dict,
    only_optimize_lora_parameters,
    save_adapter,
)
from tests.tiny import save_model, tiny_gpt2, tiny_llama, word_tokenizer

MODELS = [(tiny_llama, ("q_proj", "down_proj")), (tiny_gpt2, ("c_attn", "mlp.c_proj"))]


def logits(model):
    return model(input_ids=torch.arange(4, 12)[None]).logits


def adapted(make, names, rank=4, alpha=3.0, moved=True, **keywords):
    """A model whose adapters have been trained, so to speak."""
    model = make(64)
    report = convert_linear_layer_to_lora(model, names, rank=rank, alpha=alpha, seed=5, **keywords)
    if moved:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval(), report


def test_L01_whole_name_parts_match():
    model = tiny_llama(64)
    assert len(linear_layers(model, ["q_proj", " k_proj "])) == 4
    assert linear_layers(model, ["layers.0.self_attn.q_proj"]) == ["model.layers.0.self_attn.q_proj"]
    assert len(linear_layers(model, ["model.layers."])) == 14 == len(linear_layers(model, []))
    assert linear_layers(model, ["q_proj", "", " "]) == linear_layers(model, ["q_proj"])  # B-08
    assert len(linear_layers(model, ["1"])) == 7
    for name in ("decoder.layers.", "proj", "v", "lm_head", "nothing", "layers.q_proj", "."):
        with pytest.raises(UserError) as error:
            linear_layers(model, ["q_proj", name])
        for known in ("q_proj", "gate_proj", f'"{name}"'):
            assert known in str(error.value)
    assert "lm_head" not in " ".join(linear_layers(model, []))


def test_L01_gpt2_and_reward_models(tmp_path):
    assert sorted({name.split(".", 3)[3] for name in linear_layers(tiny_gpt2(64), [])}) == [
        "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj",
    ]  # fmt: skip
    save_model(tmp_path, tiny_llama(64))
    reward = RewardModel.from_causal_lm(str(tmp_path), word_tokenizer(), seed=0, notice=lambda _: None)
    assert linear_layers(reward.model, []) == linear_layers(tiny_llama(64), [])
    with pytest.raises(UserError):
        linear_layers(reward.model, ["score"])


def test_L01_names_are_checked_without_loading_weights():
    config = tiny_llama(64).config
    assert len(check_lora_module_names(config, ["q_proj"])) == 2
    with pytest.raises(UserError, match="its linear layers are: down_proj"):
        check_lora_module_names(config, ["nothing"])
    config.architectures, config.num_labels = ["LlamaForSequenceClassification"], 1
    assert len(check_lora_module_names(config, [])) == 14


@pytest.mark.parametrize("make, names", MODELS)
def test_report_and_untouched_start(make, names):
    plain = make(64)
    model, report = adapted(make, names, moved=False)
    torch.testing.assert_close(logits(model), logits(plain))
    assert report.modules == linear_layers(plain, names) and len(report.modules) == 4
    counted = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert report.trainable == counted and report.total == counted + sum(p.numel() for p in plain.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())  # the base stays trainable


def test_a_frozen_base_weight_stays_frozen():
    model = tiny_llama(64)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    convert_linear_layer_to_lora(model, ["q_proj"], rank=2, alpha=1, seed=0)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    assert [name for name, flag in flags.items() if not flag] == ["model.layers.0.self_attn.q_proj.base_layer.weight"]
    only_optimize_lora_parameters(model)
    assert all(p.requires_grad is ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("make, names", MODELS)
def test_the_scale_is_alpha_over_rank(make, names):
    model, report = adapted(make, names, rank=4, alpha=3.0)
    layer = model.get_submodule(report.modules[0])
    x = torch.randn(5, layer.lora_A["default"].weight.shape[1])
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 3.0 / 4 * (x @ a.T @ b.T))


def test_the_adapters_come_from_the_seed_alone():
    def weights(seed, noise):
        model = tiny_llama(64)
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        convert_linear_layer_to_lora(model, ["q_proj"], rank=2, alpha=1, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        return model.model.layers[1].self_attn.q_proj.lora_A["default"].weight

    assert torch.equal(weights(1, 1), weights(1, 2)) and not torch.equal(weights(1, 1), weights(2, 1))


@pytest.mark.parametrize("make, names", MODELS)
def test_L02_gradient_checkpointing_with_frozen_base_trains_every_adapter(make, names):
    model, report = adapted(make, names, moved=False)
    only_optimize_lora_parameters(model)
    enable_gradient_checkpointing(model)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    logits(model).logsumexp(-1).sum().backward()
    optimizer.step()
    for module in report.modules:
        assert model.get_submodule(module).lora_B["default"].weight.abs().sum() > 0, module


@pytest.mark.parametrize("make, names", MODELS)
def test_disabled_adapters_give_the_base_and_come_back(make, names):
    model, _ = adapted(make, names)
    plain, tuned = logits(make(64)), logits(model)
    flags = [p.requires_grad for p in model.parameters()]
    with adapters_disabled(model):
        assert torch.equal(logits(model), plain)
        with adapters_disabled(model):
            assert torch.equal(logits(model), plain)
        assert torch.equal(logits(model), plain)
        assert [p.requires_grad for p in model.parameters()] == flags
    assert torch.equal(logits(model), tuned) and not torch.allclose(plain, tuned)
    with pytest.raises(ZeroDivisionError), adapters_disabled(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), tuned)
    with pytest.raises(AssertionError, match="no adapters"), adapters_disabled(make(64)):
        pass


@pytest.mark.parametrize("make, names", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_L05_merging_a_copy_and_merging_in_place_agree(make, names, dtype):
    model, report = adapted(make, names)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" not in parameter_name:
            parameter.data = parameter.data.to(dtype)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = logits(model)
    merged = merged_state_dict(model, state)
    assert merged.keys() == make(64).state_dict().keys()
    assert torch.equal(logits(model), tuned)  # the live model is as it was
    name = report.modules[0]
    layer = model.get_submodule(name)
    delta = 0.75 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    delta = delta.T if make is tiny_gpt2 else delta
    expected = (layer.base_layer.weight.float() + delta).to(dtype)
    assert torch.equal(merged[f"{name}.weight"], expected)
    convert_lora_to_linear_layer(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, merged[key]) and tensor.dtype == dtype, key
    assert not hasattr(model, "peft_config") and not any("lora" in name for name, _ in model.named_modules())
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.1}  # 8 bits
    torch.testing.assert_close(logits(model).float(), tuned.float(), **tolerance)


def test_bf16_base_with_float32_adapters():
    model = tiny_llama(64).bfloat16()
    convert_linear_layer_to_lora(model, [], rank=2, alpha=1, seed=0)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    only_optimize_lora_parameters(model)
    logits(model).float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for n, p in model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("make, names", MODELS)
def test_L05_a_saved_adapter_reloads_on_its_base_with_equal_logits(tmp_path, make, names):
    base = save_model(tmp_path / "base", make(64))
    model, report = adapted(make, names)
    save_adapter(model, model.state_dict(), tmp_path / "adapter", str(base))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(report.modules) and all(tensor.numel() for tensor in tensors.values())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    broken = {**model.state_dict(), f"{report.modules[0]}.lora_A.default.weight": torch.empty(0)}
    with pytest.raises(RuntimeError, match="missing or empty"):
        save_adapter(model, broken, tmp_path / "adapter", str(base))


def test_L05_a_reward_models_adapter_keeps_its_head(tmp_path):
    base = save_model(tmp_path / "base", tiny_llama(64))
    reward = RewardModel.from_causal_lm(str(base), word_tokenizer(), seed=3, notice=lambda _: None)
    convert_linear_layer_to_lora(reward.model, ["q_proj"], rank=2, alpha=1, seed=0)
    for name, parameter in reward.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.2)
    save_trained(tmp_path / "rm", reward, reward.state_dict(), word_tokenizer(), "", adapter_base=str(base))
    ids = torch.arange(4, 12)[None]
    score = reward(ids, torch.ones_like(ids)).scores
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    tuned = PeftModel.from_pretrained(plain, tmp_path / "rm" / "adapter").eval()
    for theirs in (tuned, AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")):
        torch.testing.assert_close(theirs(input_ids=ids).logits[0], score, atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="adapter only"):
        RewardModel.from_pretrained(str(tmp_path / "rm" / "adapter"), None, notice=lambda _: None)


@pytest.mark.parametrize("make, names", MODELS)
def test_L06_an_adapter_directory_is_merged_on_its_base(tmp_path, make, names):
    told = []
    base = save_model(tmp_path / "base", make(64))
    model, _ = adapted(make, names)
    adapter = tmp_path / "adapter"
    save_adapter(model, model.state_dict(), adapter, str(base))
    tokenizer = load_tokenizer(str(adapter), notice=told.append)
    loaded = load_causal_lm(str(adapter), tokenizer, notice=told.append)
    assert "merged on its base model" in told[-1]
    assert type(loaded) is type(model) and loaded.state_dict().keys() == make(64).state_dict().keys()
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    assert all(p.requires_grad for p in loaded.parameters())
    again = CausalLM(loaded)
    save_trained(tmp_path / "again", again, again.state_dict(), tokenizer, "")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file)
    with pytest.raises(UserError, match="does not fit its base model"):
        load_causal_lm(str(adapter), tokenizer, notice=told.append)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "no")})
    )
    with pytest.raises(UserError, match="belongs to the base model"):
        load_causal_lm(str(adapter), tokenizer, notice=told.append)


def test_L06_training_with_adapters_then_saving_gives_a_plain_model(tmp_path):
    model, _ = adapted(*MODELS[0])
    wrapped = CausalLM(model)
    save_trained(tmp_path, wrapped, wrapped.state_dict(), word_tokenizer(), "", adapter_base="somewhere/base")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and not any(
        isinstance(m, nn.Module) and hasattr(m, "lora_A") for m in loaded.modules()
    )
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somewhere/base"

"""What is saved is complete, tied weights once, and is read back."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.saving import (
    check_complete,
    save_model,
    verify_saved,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from tests.tiny import save_model as save_tiny
from tests.tiny import tiny_gpt2, tiny_llama, word_tokenizer


def logits(model):
    return model(input_ids=torch.arange(4, 12)[None]).logits


def names_in(directory):
    names = []
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("copied", [True, False], ids=["gathered", "live"])
@pytest.mark.parametrize("shard", ["8KB", "5GB"])
def test_C04_C06_a_language_model_loads_with_no_missing_or_unexpected_key(tmp_path, tied, copied, shard):
    model = tiny_llama(64, tie_word_embeddings=tied)
    state = model.state_dict()
    if copied:  # as after gathering: equal bytes, no shared memory
        state = {name: tensor.clone() for name, tensor in state.items()}
    save_model(tmp_path, model, state, word_tokenizer(), max_shard_size=shard)
    verify_saved(tmp_path, state)
    assert ("lm_head.weight" in names_in(tmp_path)) is not tied
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


@pytest.mark.parametrize("tied", [True, False])
def test_C04_a_reward_model_passes_with_tying_on_and_off(tmp_path, tied):
    save_tiny(tmp_path / "base", tiny_llama(64, tie_word_embeddings=tied))
    model = RewardModel.from_causal_lm(str(tmp_path / "base"), word_tokenizer(), seed=1, notice=lambda _: None)
    save_trained(tmp_path / "rm", model, model.state_dict(), word_tokenizer(), "")
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(loaded)[0], model(torch.arange(4, 12)[None], torch.ones(1, 8)).scores)


def test_gpt2_and_its_wrapper(tmp_path):
    model = CausalLM(tiny_gpt2(64))
    save_trained(tmp_path, model, model.state_dict(), word_tokenizer(), "")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits(loaded), logits(model.model))


def test_experts_that_files_name_otherwise_are_verified_as_loaded(tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                      num_key_value_heads=2, num_local_experts=2)
    ).eval()  # fmt: skip
    save_model(tmp_path, model, model.state_dict(), word_tokenizer())
    verify_saved(tmp_path, model.state_dict())
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    next(tensor for name, tensor in state.items() if "experts" in name).add_(1)
    with pytest.raises(RuntimeError, match="is not what was to be saved"):
        verify_saved(tmp_path, state)


def test_everything_else_is_saved_too(tmp_path):
    model = tiny_llama(64)
    model.generation_config.max_new_tokens = 77
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    save_model(tmp_path, model, {n: t.bfloat16() for n, t in model.state_dict().items()}, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert model.dtype == torch.float32 and model.config.dtype != torch.bfloat16  # the live model is untouched
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.generation_config.max_new_tokens == 77 and loaded.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
    (tmp_path / "elsewhere").mkdir()
    for file in tmp_path.glob("*.*"):
        file.rename(tmp_path / "elsewhere" / file.name)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")), logits(loaded))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.update({"model.norm.weight": torch.empty(0)}), "model.norm.weight is empty"),
        (lambda state: state.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (lambda state: state.update({"model.norm.weight": torch.ones(3)}), r"shape \(3,\) instead of \(16,\)"),
        (lambda state: state.update({"x.lora_A.default.weight": torch.ones(3)}), "lora_A.default.weight is unexpected"),
        (lambda state: state.update({"lm_head.weight": torch.ones(64, 16)}), "differs from model.embed_tokens.weight"),
    ],
)
def test_Z01_incomplete_weights_are_not_saved(tmp_path, change, message):
    model = tiny_llama(64, tie_word_embeddings="differs" in message)
    state = dict(model.state_dict())
    check_complete(model, state)
    change(state)
    with pytest.raises(RuntimeError, match=message):
        check_complete(model, state)
    with pytest.raises(RuntimeError, match=message):
        save_model(tmp_path, model, state, word_tokenizer())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_verify_saved_sees_one_changed_byte_a_missing_and_an_empty_tensor(tmp_path, tied):
    model = tiny_llama(64, tie_word_embeddings=tied)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(tmp_path, model, state, word_tokenizer())
    verify_saved(tmp_path, state)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    changed = saved["model.norm.weight"].clone()
    changed[3] = changed[3].nextafter(torch.tensor(9.0))
    without = {name: tensor for name, tensor in saved.items() if name != "model.norm.weight"}
    for broken in ({**saved, "model.norm.weight": changed}, {**saved, "model.norm.weight": torch.empty(0)}, without):
        save_file(broken, file, metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match="model.norm.weight"):
            verify_saved(tmp_path, state)
    embedding = "model.embed_tokens.weight"
    save_file({name: tensor for name, tensor in saved.items() if name != embedding}, file)
    with pytest.raises(RuntimeError, match=embedding if tied else "missing"):
        verify_saved(tmp_path, state)


def test_only_an_embedding_counts_as_tied(tmp_path):
    model = tiny_llama(64, tie_word_embeddings=True)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data.copy_(attention.q_proj.weight.data)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(tmp_path, model, state, word_tokenizer())
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "0.self_attn.k_proj" not in name}, file)
    with pytest.raises(RuntimeError, match="k_proj.weight is missing"):
        verify_saved(tmp_path, state)

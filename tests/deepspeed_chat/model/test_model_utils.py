"""Loading a language model completely, or saying what is wrong with it."""

import json
import os
import shutil

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    T5Config,
)

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import (
    check_positions,
    enable_gradient_checkpointing,
    load_causal_lm,
)
from tests.tiny import save_model, tiny_gpt2, tiny_llama, word_tokenizer


@pytest.fixture
def told():
    return []


def logits(model):
    return model(input_ids=torch.arange(4, 12)[None]).logits


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin", "sharded_bin"])
def test_C05_every_layout_of_weights_loads(tmp_path, told, make, layout):
    model = make(64)
    if layout.endswith("bin"):
        model.config.save_pretrained(tmp_path)
        model.generation_config.save_pretrained(tmp_path)
        items = list(model.state_dict().items())
        parts = [items] if layout == "bin" else [items[:5], items[5:]]
        names = ["pytorch_model.bin"] if layout == "bin" else [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        for name, part in zip(names, parts, strict=True):
            torch.save(dict(part), tmp_path / name)
        if layout == "sharded_bin":
            where = {key: name for name, part in zip(names, parts, strict=True) for key, _ in part}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        model.save_pretrained(tmp_path, max_shard_size="8KB" if layout == "sharded" else "1GB")
    loaded = load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)
    torch.testing.assert_close(logits(loaded), logits(model))
    assert not loaded.training and loaded.dtype == torch.float32


def test_C05_a_missing_shard_is_an_error(tmp_path, told):
    tiny_llama(64).save_pretrained(tmp_path, max_shard_size="8KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    os.remove(shards[1])
    with pytest.raises(UserError, match="cannot be loaded|do not fit"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)


def test_C05_no_weights_or_broken_weights_are_errors(tmp_path, told):
    save_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:300])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)
    os.remove(weights)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)
    os.remove(tmp_path / "config.json")
    with pytest.raises(UserError, match="holds no model"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("model.norm.weight"), "missing weights model.norm.weight"),
        (lambda state: state.update({"v_head.weight": torch.ones(1, 16)}), "unexpected weights v_head.weight"),
        (lambda state: state.update({"model.norm.weight": torch.ones(7)}), "mismatched weights model.norm.weight"),
    ],
)
def test_R06_incomplete_weights_are_named(tmp_path, told, change, message):
    model = tiny_llama(64)
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    change(state)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=message):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)


def test_T01_ids_in_both_configurations_become_the_tokenizers(tmp_path, told):
    model = tiny_llama(64)
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)
    for config in (loaded.config, loaded.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert sum("eos_token_id" in line and "was 0: now 2" in line for line in told) == 2


def test_a_list_of_end_ids_for_generation_stays(tmp_path, told):
    model = tiny_llama(64)
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    assert load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append).generation_config.eos_token_id == [2, 7]
    assert told == []


def test_a_contradictory_generation_configuration_is_repaired_before_the_training(tmp_path, told):
    tiny_llama(64).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.9, "top_p": 0.6}))
    model = load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)
    model.generation_config.save_pretrained(tmp_path / "out")  # raises when it contradicts itself
    assert model.generation_config.temperature == 0.9 and "do_sample" in told[0]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_T10_embeddings_grow_by_the_mean_and_never_shrink(tmp_path, told, make):
    tokenizer = word_tokenizer()
    rows = len(tokenizer)
    model = make(rows)
    model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    same = load_causal_lm(str(tmp_path), tokenizer, notice=told.append)
    assert same.get_input_embeddings().weight.shape[0] == rows and told == []
    tokenizer.add_tokens(["new1", "new2"])
    grown = load_causal_lm(str(tmp_path), tokenizer, notice=told.append)
    assert torch.equal(before, torch.get_rng_state()) or make is tiny_gpt2  # loading draws nothing of ours
    assert grown.config.vocab_size == rows + 2 and len(told) == 1
    for old, new in ((model, grown),):
        for get in ("get_input_embeddings", "get_output_embeddings"):
            weight, wide = getattr(old, get)().weight, getattr(new, get)().weight
            torch.testing.assert_close(wide[:rows], weight)
            torch.testing.assert_close(wide[rows:], weight.mean(0).expand(2, -1))


def test_T10_a_padded_vocabulary_keeps_its_rows(tmp_path, told):
    tiny_llama(64).save_pretrained(tmp_path)
    tokenizer = word_tokenizer()
    assert len(tokenizer) < 64
    model = load_causal_lm(str(tmp_path), tokenizer, notice=told.append)
    assert model.config.vocab_size == 64 == model.get_input_embeddings().weight.shape[0]  # Z-03


def test_T11_the_directory_name_changes_nothing(tmp_path, told):
    for make, name in ((tiny_gpt2, "my-llama"), (tiny_llama, "x")):
        make(64).save_pretrained(tmp_path / name)
        shutil.copytree(tmp_path / name, tmp_path / "other" / name[::-1])
        a = load_causal_lm(str(tmp_path / name), word_tokenizer(), notice=told.append)
        b = load_causal_lm(str(tmp_path / "other" / name[::-1]), word_tokenizer(), notice=told.append)
        assert type(a) is type(b)
        torch.testing.assert_close(logits(a), logits(b))


def test_dropout_replaces_every_probability(tmp_path, told):
    tiny_gpt2(64).save_pretrained(tmp_path / "gpt2")
    tiny_llama(64).save_pretrained(tmp_path / "llama")
    gpt2 = load_causal_lm(str(tmp_path / "gpt2"), word_tokenizer(), notice=told.append, dropout=0.25)
    assert {m.p for m in gpt2.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    llama = load_causal_lm(str(tmp_path / "llama"), word_tokenizer(), notice=told.append, dropout=0.25)
    assert llama.config.attention_dropout == 0.25 == llama.model.layers[0].self_attn.attention_dropout
    off = load_causal_lm(str(tmp_path / "gpt2"), word_tokenizer(), notice=told.append, dropout=0.0)
    assert {m.p for m in off.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


def test_a_reward_model_is_no_language_model(tmp_path, told):
    config = tiny_llama(64).config
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds a reward model"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)


def test_an_encoder_decoder_is_refused(tmp_path, told):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="encoder-decoder"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)


def test_scaled_logits_are_refused(tmp_path, told):
    config = CohereConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        logit_scale=0.25, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="outside its output layer"):
        load_causal_lm(str(tmp_path), word_tokenizer(), notice=told.append)


def test_P21_positions_name_the_three_numbers():
    model = tiny_gpt2(64, positions=32)
    with pytest.raises(UserError) as error:
        check_positions(model, "the actor", 24 + 16, "24 prompt + 16 answer tokens")
    assert all(number in str(error.value) for number in ("32", "24", "16", "40"))
    check_positions(model, "the actor", 32, "16 + 16")
    check_positions(CausalLM(tiny_llama(64, positions=32)), "the actor", 32, "16 + 16")
    with pytest.raises(UserError):
        check_positions(LlamaConfig(max_position_embeddings=32), "the critic", 33, "16 + 17")


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_gradient_checkpointing_changes_no_gradient(make):
    gradients = []
    for checkpointing in (False, True):
        model = make(64).train()
        if checkpointing:
            enable_gradient_checkpointing(model)
            assert model.is_gradient_checkpointing
        logits(model).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])

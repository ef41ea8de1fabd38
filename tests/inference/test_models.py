"""What can be talked with: our outputs, any causal model, an adapter; their names, limits and scores."""

import argparse
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BloomConfig, BloomForCausalLM, LlamaForSequenceClassification

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.inference.conversation import with_round
from alpaca_rlhf.inference.generation import stream_answer
from alpaca_rlhf.inference.models import UNLIMITED, add_model_arguments, load_chat_models, load_scorer, model_names
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.runtime.run import start_run
from tests.tiny import save_model, tiny_llama, word_tokenizer

GREEDY = Settings(8, temperature=0.0)


def load(*words):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return load_chat_models(parser.parse_args(["--dtype", "fp32", *map(str, words)]), start_run(seed=0))


def answer(model, message="name a colour"):
    *_, last = stream_answer(model, (), message, GREEDY)
    return last.text


def test_an_adapter_answers_like_its_merged_model(tmp_path):
    save_model(tmp_path / "base")
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_llama(len(word_tokenizer())), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    save_model(tmp_path / "merged", adapted.merge_and_unload())
    adapter, merged = load("--path", tmp_path / "adapter", "--compare_path", tmp_path / "merged")
    (base,) = load("--path", tmp_path / "base")
    assert answer(adapter) == answer(merged) != answer(base)


def test_one_directory_is_loaded_once_and_outputs_are_named(tmp_path):
    for name, step in (("sft", "sft"), ("final/actor", "ppo_actor")):
        save_model(tmp_path / name)
        file = tmp_path / name / "training_arguments.json"
        file.write_text(json.dumps({"step": step, "finished": "2023-11-14T22:13:20+00:00"}))
    first, second = load("--path", tmp_path / "final", "--compare_path", tmp_path / "sft")
    assert [first.label, second.label] == ["final/actor (RLHF, 2023-11-14)", "sft (SFT, 2023-11-14)"]
    first, second = load("--path", tmp_path / "final", "--compare_path", tmp_path / "final" / "actor")
    assert first is second
    (tmp_path / "sft" / "training_arguments.json").write_text("[]")
    with pytest.raises(UserError, match="not the JSON object that a step writes"):
        load("--path", tmp_path / "sft")


def test_names_tell_the_models_apart():
    assert model_names(["a/sft", "a/rlhf/actor"]) == ["sft", "rlhf/actor"]
    assert model_names(["a/x/sft", "b/x/sft"]) == ["a/x/sft", "b/x/sft"]
    assert model_names(["x/sft", "sft"]) == ["x/sft", "sft"]
    assert model_names(["a/sft", "a/sft"]) == ["sft", "sft"]
    assert model_names(["owner/name"]) == ["name"]


def test_the_limit_is_the_models_or_the_one_that_was_asked_for(tmp_path):
    save_model(tmp_path / "rope", tiny_llama(len(word_tokenizer()), positions=96))
    config = BloomConfig(vocab_size=len(word_tokenizer()), hidden_size=16, n_layer=1, n_head=2, bos_token_id=1,
                         eos_token_id=2, pad_token_id=0)  # fmt: skip
    save_model(tmp_path / "alibi", BloomForCausalLM(config))
    limits = [load("--path", tmp_path / name)[0].limit for name in ("rope", "alibi")]
    assert limits == [96, UNLIMITED]
    assert load("--path", tmp_path / "rope", "--max_length", 40)[0].limit == 40


def test_a_score_is_the_reward_models_own_and_fits_or_is_none(tmp_path):
    tokenizer = word_tokenizer()
    config = tiny_llama(len(tokenizer), positions=24).config
    config.num_labels = 1
    torch.manual_seed(0)
    save_model(tmp_path, LlamaForSequenceClassification(config))
    scorer = load_scorer(str(tmp_path), start_run(seed=0, dtype="fp32"))
    ids = [1] + tokenizer("Human: why Assistant: yes", add_special_tokens=False)["input_ids"] + [2]
    plain = RewardModel.from_pretrained(str(tmp_path), tokenizer, notice=print)
    batch = torch.tensor([ids])
    with torch.no_grad():
        expected = plain.forward_value(batch, torch.ones_like(batch)).scores.item()
    assert scorer.score((), "why", "yes") == pytest.approx(expected)
    long = with_round((), "the big cat eats one two three", "the big cat eats one two three")
    assert scorer.score(long, "why", "yes") == pytest.approx(expected)  # the round that does not fit is left out
    assert scorer.score(with_round((), "one", "two"), "why", "yes") != pytest.approx(expected)
    assert scorer.score((), "why", "yes " * 30) is None

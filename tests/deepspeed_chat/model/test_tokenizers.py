"""Loading and repairing tokenizers; comparing two."""

import json
import shutil

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import (
    load_tokenizer,
    tokenizers_agree,
    vocabulary_size,
)
from tests.tiny import sentencepiece_tokenizer, tiny_gpt2, word_tokenizer

ADDED = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}


@pytest.fixture
def told():
    return []


def declare(directory, **tokens):
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    return str(directory)


@pytest.mark.parametrize(
    "tokens",
    [
        {"bos_token": "", "eos_token": ""},
        {"bos_token": "", "eos_token": "", "unk_token": "", "tokenizer_class": "LLaMATokenizer"},
        {"bos_token": "", "eos_token": "", "unk_token": "", "tokenizer_class": "LlamaTokenizer"},
        {"bos_token": "<unk>", "eos_token": "<unk>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"},
        {"bos_token": ADDED, "eos_token": ADDED, "tokenizer_class": "LlamaTokenizer"},
    ],
)
def test_T01_wrong_special_tokens_are_repaired_from_the_sentencepiece_model(tmp_path, told, tokens):
    original = sentencepiece_tokenizer(tmp_path)
    path = declare(tmp_path, **tokens)
    tokenizer = load_tokenizer(path, notice=told.append)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert any("eos_token" in line and "'</s>'" in line for line in told)
    assert tokenizer.encode("the cat") == original.encode("the cat")
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (1, 2, 0)


def test_T01_empty_tokens_without_a_sentencepiece_model_are_refused(tmp_path, told):
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="eos_token as an empty string"):
        load_tokenizer(declare(tmp_path, eos_token=""), notice=told.append)


def test_T01_a_sound_sentencepiece_tokenizer_is_left_alone(tmp_path, told):
    sentencepiece_tokenizer(tmp_path).save_pretrained(tmp_path / "saved")
    tokenizer = load_tokenizer(str(tmp_path / "saved"), notice=told.append)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert not any("repaired" in line for line in told)


def test_T01_no_end_token_at_all_is_refused(tmp_path, told):
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer().backend_tokenizer, unk_token="<unk>").save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError, match="no usable end-of-text token"):
        load_tokenizer(str(tmp_path), notice=told.append)


def test_T02_pad_equal_to_eos_becomes_the_unknown_token(tmp_path, told):
    word_tokenizer(pad_is_eos=True).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), notice=told.append)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("<unk>", 3, 2)
    assert len(told) == 1 and "'<unk>'" in told[0]


def one_token_for_all(extra=()):
    """GPT-2's way: BOS, EOS and UNK are one token."""
    core = word_tokenizer()
    core = PreTrainedTokenizerFast(
        tokenizer_object=core.backend_tokenizer, bos_token="</s>", eos_token="</s>", unk_token="</s>"
    )
    core.add_tokens(list(extra))
    return core


def test_T02_without_an_unknown_token_a_token_of_the_vocabulary_pads(tmp_path, told):
    one_token_for_all().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), notice=told.append).pad_token_id == 0  # TOK's own "<pad>", not declared


def test_T02_otherwise_a_new_token_is_added(tmp_path, told, monkeypatch):
    monkeypatch.setattr("alpaca_rlhf.deepspeed_chat.training.utils.model.tokenizers.PAD_NAMES", ())
    one_token_for_all(["<|reserved_special_token_3|>"]).save_pretrained(tmp_path / "reserved")
    chosen = load_tokenizer(str(tmp_path / "reserved"), notice=told.append)
    assert chosen.pad_token == "<|reserved_special_token_3|>"
    (tmp_path / "new").mkdir()
    raw = json.loads(one_token_for_all().backend_tokenizer.to_str().replace("<pad>", "other"))
    (tmp_path / "new" / "tokenizer.json").write_text(json.dumps(raw))
    declare(tmp_path / "new", bos_token="</s>", eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast")
    before = len(AutoTokenizer.from_pretrained(tmp_path / "new"))
    tokenizer = load_tokenizer(str(tmp_path / "new"), notice=told.append)
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("<pad>", before, before + 1)
    assert "a new token" in told[-1]


def test_T08_what_is_saved_equals_what_was_loaded(tmp_path, told):
    original = word_tokenizer()
    original.save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": "left"}))
    tokenizer = load_tokenizer(str(tmp_path / "in"), notice=told.append)
    assert told == [] and tokenizer.padding_side == "left"
    tokenizer.save_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("a cat") == original.encode("a cat")
    assert (tmp_path / "in" / "tokenizer.json").read_bytes() == (tmp_path / "out" / "tokenizer.json").read_bytes()


def test_T09_tokenizers_agree_on_vocabulary_and_special_tokens():
    reversed_ids = word_tokenizer()
    state = json.loads(reversed_ids.backend_tokenizer.to_str())
    ids = state["model"]["vocab"]
    state["model"]["vocab"] = {word: (index if index < 4 else len(ids) + 3 - index) for word, index in ids.items()}
    other = PreTrainedTokenizerFast(
        tokenizer_object=type(reversed_ids.backend_tokenizer).from_str(json.dumps(state)),
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
    )  # fmt: skip
    assert tokenizers_agree(word_tokenizer(), word_tokenizer())
    assert not tokenizers_agree(word_tokenizer(), other)
    assert not tokenizers_agree(word_tokenizer(), word_tokenizer(pad_is_eos=True))


def test_T10_vocabulary_size_counts_up_to_the_highest_id():
    tokenizer = word_tokenizer()
    assert vocabulary_size(tokenizer) == len(tokenizer)
    tokenizer.add_tokens(["x1", "x2"])
    assert vocabulary_size(tokenizer) == len(tokenizer)


def test_T11_the_spelling_of_the_path_changes_nothing(tmp_path, told):
    for name in ("my-llama", "x"):
        word_tokenizer().save_pretrained(tmp_path / name)
        tiny_gpt2().config.save_pretrained(tmp_path / name)
    a, b = (load_tokenizer(str(tmp_path / name), notice=told.append) for name in ("my-llama", "x"))
    assert type(a) is type(b) and a.encode("the cat eats") == b.encode("the cat eats") and tokenizers_agree(a, b)


def test_a_path_that_does_not_exist_never_goes_to_the_hub(tmp_path, told, monkeypatch):
    def network(*_args, **_keywords):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("alpaca_rlhf.deepspeed_chat.training.utils.model.tokenizers.cached_file", network)
    (tmp_path / "output").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "nothing"), "./x", "output/sft", "a/b/c", "~/model"):
        with pytest.raises(UserError, match="does not exist"):
            load_tokenizer(path, notice=told.append)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        load_tokenizer(str(tmp_path / "file"), notice=told.append)
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path / "output"), notice=told.append)


def test_a_hub_name_without_network_is_one_sentence(told):
    with pytest.raises(UserError) as error:
        load_tokenizer("nobody/nothing", notice=told.append)
    assert "nobody/nothing" in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_without_tokenizer_uses_its_base_models(tmp_path, told):
    word_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    assert tokenizers_agree(load_tokenizer(str(tmp_path / "adapter"), notice=told.append), word_tokenizer())
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="belongs to the base model"):
        load_tokenizer(str(tmp_path / "adapter"), notice=told.append)

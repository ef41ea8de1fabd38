"""Faults of data and tokens that no other file has: the version in the cache's key, end markers, packing."""

import pytest
import torch

from alpaca_rlhf.arguments import deepspeed_chat
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data import cache
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_sft
from alpaca_rlhf.deepspeed_chat.training.utils.data.plain_text import load_plain_text
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from tests.deepspeed_chat.data.data_samples import U, make, only, pairs, talk
from tests.tiny import tiny_gpt2, tiny_llama, word_tokenizer, write_jsonl

MODELS = {1: ["--model_name_or_path", "m"], 2: ["--model_name_or_path", "m"]}
MODELS[3] = ["--actor_model_name_or_path", "m", "--critic_model_name_or_path", "m"]


def test_D02_another_version_of_the_program_builds_its_own_entry(encoder, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "d.jsonl", pairs(9))
    make(path, 2, encoder, tmp_path)
    monkeypatch.setattr(cache, "FORMAT_VERSION", cache.FORMAT_VERSION + 1)
    assert any("cache miss" in line for line in make(path, 2, encoder, tmp_path).lines)
    monkeypatch.setattr("alpaca_rlhf.deepspeed_chat.training.utils.data.templates.FORMAT_VERSION", 99)
    assert any("cache miss" in line for line in make(path, 2, TextEncoder(word_tokenizer()), tmp_path).lines)
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("words", [["--eot_token", "<|end|>"], ["--add_eot_token"]])
def test_T04_an_end_marker_of_several_pieces_cannot_be_asked_for(step, words):
    parse = {1: deepspeed_chat.parse_step1, 2: deepspeed_chat.parse_step2, 3: deepspeed_chat.parse_step3}[step]
    with pytest.raises(UserError, match="an answer ends with the tokenizer's own end-of-text token"):
        parse([*MODELS[step], *words])


def test_T04_an_end_marker_that_the_tokenizer_knows_is_one_id():
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    answer = TextEncoder(tokenizer).answer_ids([U("why")], "yes <|end|>")
    assert answer == tokenizer.convert_tokens_to_ids(["yes", "<|end|>"])


def test_S06_records_are_not_packed_and_do_not_see_one_another(encoder):
    """Packing is not offered: no option has the name, and a row of a batch is one record with the loss it has alone."""
    dialects = (deepspeed_chat.STEP1, deepspeed_chat.STEP2, deepspeed_chat.STEP3)
    assert not [flag for dialect in dialects for row in dialect.rows for flag in row.flags if "pack" in flag]
    items = [only(talk(6, answer), 1, encoder, 64).item for answer in (1, 4, 9)]
    batch = collate_sft(items, 3, 0)
    assert len(batch["input_ids"]) == 3
    assert (batch["input_ids"] == encoder.tokenizer.bos_token_id).sum(1).tolist() == [1, 1, 1]
    for make_model in (tiny_gpt2, tiny_llama):
        model = CausalLM(make_model(57))
        together = model(batch["input_ids"], batch["attention_mask"], batch["response_mask"][:, 1:]).log_probs
        for row, item in enumerate(items):
            alone = collate_sft([item], 1, 0)
            losses = model(alone["input_ids"], alone["attention_mask"], alone["response_mask"][:, 1:]).log_probs[0]
            torch.testing.assert_close(together[row, : len(losses)], losses, atol=1e-5, rtol=0)  # the fault's own bound
            assert not together[row, len(losses) :].any()


def test_S06_plain_text_is_cut_into_blocks_with_an_end_between_the_texts(encoder, tmp_path):
    """The one place where texts share a row: the pretraining loss beside PPO, as language models are pretrained."""
    texts = ["the sun is big", "a cat eats apples", "no"]
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": text} for text in texts])
    items = load_plain_text(str(path), None, encoder=encoder, block=6, cache_dir=str(tmp_path / "cache"))
    ids = [token for item in items for token in item["input_ids"]]
    assert encoder.tokenizer.decode(ids) == "the sun is big </s> a cat eats apples </s> no </s>"
    assert [len(item["input_ids"]) for item in items] == [6, 6] and all(all(item["trained"]) for item in items)

"""What happens to records that are too long, equal, or short of a side."""


import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.encoding import CUT, SHORTENED
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from tests.deepspeed_chat.data.data_samples import A, S, U, make, only, talk, words
from tests.tiny import word_tokenizer, write_jsonl


def test_S03_an_answer_over_the_limit_is_cut_without_eos_and_bos_stays(encoder):
    kept = [only(talk(8, length - 9), 1, encoder, 12) for length in (11, 12, 13, 30)]
    for length, encoded in zip((11, 12, 13, 30), kept, strict=True):
        ids, trained = encoded.item["input_ids"].tolist(), encoded.item["trained"].tolist()
        assert len(ids) == len(trained) == min(length, 12) and ids[0] == 1
        assert trained == [0] * 8 + [1] * (len(ids) - 8)
        assert (ids[-1] == 2) == (length <= 12) and ids.count(2) == (length <= 12)
        assert encoded.changed == (CUT if length > 12 else None)


def test_S02_trained_positions_are_the_answers_tokens_and_its_eos(encoder):
    assert sum(only(talk(8, 1), 1, encoder, 64).item["trained"]) == 2


def test_S01_every_assistant_turn_is_trained_and_nothing_else(encoder):
    record = Conversation("f:1", (U("why is the sun big"), A("yes"), U("no")), "the sun is big", None)
    item = only(record, 1, encoder, 64).item
    trained = [i for i, t in zip(item["input_ids"], item["trained"], strict=True) if t]
    assert encoder.tokenizer.decode(trained) == "yes </s> the sun is big </s>"


def test_S01_on_request_the_whole_text_is_trained(encoder):
    record = Conversation("f:1", (U("why is the sun big"), A("yes"), U("no")), "the sun is big", None)
    whole = TextEncoder(encoder.tokenizer, train_prompt=True)
    asked, usual = (only(record, 1, one, 64).item for one in (whole, encoder))
    assert asked["trained"].all() and not usual["trained"].all()
    assert asked["input_ids"].tolist() == usual["input_ids"].tolist()
    assert whole.fingerprint != encoder.fingerprint  # the token cache knows one from the other


def test_a_prompt_that_fills_the_limit_loses_early_turns_then_goes(encoder):
    turns = (S("good"), U(words(6)), A(words(3)), U(words(2)))
    record = Conversation("f:1", turns, "dog", None)
    short = encoder.conversation_ids([turns[0], turns[3]], "dog")[0]
    assert len(short) == 10
    for limit, changed in ((24, None), (23, CUT), (22, SHORTENED), (10, SHORTENED), (9, f"{SHORTENED}, and {CUT}")):
        encoded = only(record, 1, encoder, limit)
        assert encoded.changed == changed
        assert encoded.item["input_ids"].tolist()[:9] == short[:9] or limit >= 23
    assert only(record, 1, encoder, 8).dropped == "prompt leaves no room for an answer in 8 tokens"
    assert len(encoder.prompt_ids(turns)) == 22


def test_pairs_keep_both_ends_or_go(encoder):
    item = only(talk(8, 1, 3), 2, encoder, 12).item  # 8 + 3 + EOS
    assert item["prompt_length"] == 8 and item["margin"] == 0.0
    for side, length in (("chosen_ids", 10), ("rejected_ids", 12)):
        assert len(item[side]) == length and item[side][0] == 1 and item[side][-1] == 2
    assert "an answer's end would be lost" in only(talk(8, 1, 3), 2, encoder, 11).dropped
    long = Conversation("f:1", (U(words(9)), A("yes"), U("why")), "blue", "seven")
    encoded = only(long, 2, encoder, 12)
    assert encoded.changed == SHORTENED
    prompt = encoder.prompt_ids([U("why")])
    assert encoded.item["chosen_ids"].tolist() == prompt + encoder.answer_ids([U("why")], "blue")
    assert encoded.item["rejected_ids"].tolist() == prompt + encoder.answer_ids([U("why")], "seven")


def test_R08_equal_pairs_go_and_prefix_pairs_stay(encoder):
    prompt = (U("name a colour"),)
    equal = "the two answers are equal once encoded"
    assert only(Conversation("f:1", prompt, "blue", "blue"), 2, encoder, 64).dropped == equal
    assert only(Conversation("f:2", prompt, "xylophone", "zebra"), 2, encoder, 64).dropped == equal  # both <unk>
    assert only(Conversation("f:3", prompt, "blue", "blue green"), 2, encoder, 64).item
    late = Conversation("f:4", prompt, words(600) + " blue", words(600) + " red")
    assert only(late, 2, encoder, 512).dropped and only(late, 2, encoder, 700).item


def test_R10_margins_are_carried(encoder):
    record = Conversation("f:1", (U("why"),), "blue", "red", margin=1.5)
    assert only(record, 2, encoder, 64).item["margin"] == 1.5


def test_D03_a_prompt_over_the_limit_goes_and_is_never_sliced(encoder):
    kept = [only(talk(length), 3, encoder, 16) for length in (15, 16, 17, 40)]
    assert [len(e.item["prompt_ids"]) for e in kept[:2]] == [15, 16]
    assert [e.dropped for e in kept[2:]] == ["prompt longer than 16 tokens"] * 2
    turns = (S("good"), U(words(9)), A("yes"), U("why"))
    encoded = only(Conversation("f:1", turns, "blue", None), 3, encoder, 12)
    assert encoded.item["prompt_ids"].tolist() == encoder.prompt_ids([turns[0], turns[3]])
    assert encoded.changed == SHORTENED


def test_D03_no_prompt_left_is_an_error_that_says_why(encoder, tmp_path):
    rows = [{"prompt": f"Human: {words(n)} Assistant:", "chosen": "a", "rejected": "no"} for n in (10, 11, 12, 35)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    data = make(path, 3, encoder, tmp_path, split=(0, 0, 1), max_len=16)
    assert sorted(len(data.train[i]["prompt_ids"]) for i in range(len(data.train))) == [15, 16]
    assert data.report["train"]["dropped"] == {"prompt longer than 16 tokens": 2}
    with pytest.raises(UserError, match="none of the 4 records of step 3 can be used .4: prompt longer than 8 tokens"):
        make(path, 3, encoder, tmp_path, split=(0, 0, 1), max_len=8)


def test_a_record_without_the_needed_answer_goes(encoder):
    assert only(Conversation("f:1", (U("why"),), "", None), 1, encoder, 64).dropped == "no answer to train on"
    assert only(Conversation("f:1", (U("why"),), "blue", None), 2, encoder, 64).dropped == "no pair of answers"
    assert only(Conversation("f:1", (U("why"),), "", None), 3, encoder, 64).item


def test_turns_that_the_template_refuses_are_counted():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% if messages | length > 2 %}{{ raise_exception('one round') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    record = Conversation("f:1", (U("a"), A("dog"), U("why")), "blue", None)
    assert "--template" in only(record, 1, TextEncoder(tokenizer), 64).dropped

"""Splits, length rules, accounting and the token cache."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data import data_utils, encoding
from alpaca_rlhf.deepspeed_chat.training.utils.data.cache import is_complete, read_cache, write_cache
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import (
    create_dataset_split,
    create_prompt_dataset,
    split_rows,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.encoding import CUT, SHORTENED
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from tests.tiny import PAIRS, word_tokenizer, write_jsonl

NUMBERS = "one two three blue seven red green cat dog".split()
U, A, S = (lambda text, role=role: Turn(role, text) for role in ("user", "assistant", "system"))


class OneProcess:
    """The part of a Run that data needs."""

    rank, world_size, is_main = 0, 1, True

    def write_once(self, done, write):
        if not done():
            write()
        assert done()


@pytest.fixture
def encoder() -> TextEncoder:
    return TextEncoder(word_tokenizer())


def words(count: int) -> str:
    return " ".join(["cat"] * count)


def talk(prompt: int, answer: int = 1, rejected: int | None = None) -> Conversation:
    """A record of exactly ``prompt`` prompt tokens: BOS, 'Human', ':', the words, 'Assistant', ':'."""
    other = None if rejected is None else "dog " + words(rejected - 1)
    return Conversation("f:1", (U(words(prompt - 5)),), words(answer), other)


def pairs(count: int) -> list[dict]:
    """Distinct preference rows."""
    return [
        {**PAIRS[i % 8], "prompt": f"Human: {NUMBERS[i % 9]} {NUMBERS[i // 9 % 9]} {words(i // 81)} Assistant:"}
        for i in range(count)
    ]


def make(path, step, encoder, tmp_path, **options):
    options = {
        "split": (2, 4, 4), "seed": 1234, "cache_dir": str(tmp_path / "cache"), "max_len": 64, "run": OneProcess(),
        **options,
    }  # fmt: skip
    return create_prompt_dataset(
        paths=[str(path)] if not isinstance(path, list) else list(map(str, path)), step=step, encoder=encoder, **options
    )


def only(conversation, step, encoder, max_len):
    (encoded,) = create_dataset_split([conversation], step=step, encoder=encoder, max_len=max_len)
    return encoded


# ---- length rules


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


def test_worker_processes_give_the_same_items(encoder, monkeypatch):
    monkeypatch.setattr(encoding, "_CHUNK", 4)
    records = [talk(6 + n % 9, 1 + n % 3) for n in range(10)]
    alone = create_dataset_split(records, step=1, encoder=encoder, max_len=12)
    together = create_dataset_split(records, step=1, encoder=encoder, max_len=12, workers=2)
    assert [(e.dropped, e.changed) for e in alone] == [(e.dropped, e.changed) for e in together]
    assert [e.item and e.item["input_ids"].tolist() for e in alone] == [
        e.item and e.item["input_ids"].tolist() for e in together
    ]


# ---- splits


@pytest.mark.parametrize("count", [0, 1, 7, 10, 19, 20, 100, 20_000])
@pytest.mark.parametrize("split", [(2, 4, 4), (1, 0, 1), (0.2, 0.4, 0.4), (1, 1, 1)])
def test_D10_the_steps_shares_and_the_hold_out_are_disjoint_and_whole(count, split):
    parts = [split_rows(count, split, step, 1234, hold_out=True) for step in (1, 2, 3)]
    held = parts[0][1]
    assert all(part[1] == held for part in parts)
    assert sorted([row for part in parts for row in part[0]] + held) == list(range(count))
    assert len(held) == (0 if count < 20 else min(500, round(0.05 * count))) and (count < 20 or held)
    for (rows, _), share in zip(parts, split, strict=True):
        assert abs(len(rows) - (count - len(held)) * share / sum(split)) <= 1
    assert split_rows(count, split, 2, 1234, hold_out=True) == parts[1]


def test_D10_D09_three_steps_with_three_caches_share_no_record(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", pairs(10))
    attempts = []
    for attempt in range(2):
        used = []
        for step in (1, 2, 3):
            data = make(path, step, encoder, tmp_path, cache_dir=str(tmp_path / f"cache{attempt}{step}"))
            used.append([data.train[i]["record"] for i in range(len(data.train))])
            (entry,) = data.report["sets"]
            assert entry["read"] == 10 and entry["train"]["used"] == len(used[-1])
        assert [len(records) for records in used] == [2, 4, 4]
        assert len({record for records in used for record in records}) == 10
        attempts.append(used)
    assert attempts[0] == attempts[1]


def test_D06_evaluation_is_disjoint_and_the_same_in_each_step(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", pairs(20))
    data = {step: make(path, step, encoder, tmp_path) for step in (1, 2, 3)}
    evaluated = [{d.eval[i]["record"] for i in range(len(d.eval))} for d in data.values()]
    assert len(evaluated[0]) == 1 and evaluated[0] == evaluated[1] == evaluated[2]
    for d in data.values():
        assert not evaluated[0] & {d.train[i]["record"] for i in range(len(d.train))}
    small = make(write_jsonl(tmp_path / "s.jsonl", pairs(19)), 2, encoder, tmp_path)
    assert len(small.eval) == 0 and any("no evaluation set" in line for line in small.lines)


def test_D06_the_data_sets_own_test_part_is_used_whole(encoder, tmp_path):
    write_jsonl(tmp_path / "d" / "train.jsonl", pairs(30))
    write_jsonl(tmp_path / "d" / "test.jsonl", pairs(7))
    for step in (1, 2, 3):
        data = make(tmp_path / "d", step, encoder, tmp_path)
        assert len(data.eval) == 7 and data.report["sets"][0]["held_out"] == 0
        assert len(data.train) == {1: 6, 2: 12, 3: 12}[step]


def test_sft_only_data_is_used_whole_and_in_step_one_alone(encoder, tmp_path):
    shared = write_jsonl(tmp_path / "d.jsonl", pairs(10))
    alone = write_jsonl(tmp_path / "s.jsonl", [{"instruction": f"name {n}", "output": n} for n in NUMBERS])
    data = make(shared, 1, encoder, tmp_path, sft_only_paths=[str(alone)])
    assert len(data.train) == 2 + 9 and [s["train"]["used"] for s in data.report["sets"]] == [2, 9]
    assert len(make(shared, 2, encoder, tmp_path, sft_only_paths=[str(alone)]).train) == 4
    only_alone = make(shared, 1, encoder, tmp_path, sft_only_paths=[str(alone)], split=(0, 5, 5))
    assert len(only_alone.train) == 9


def test_a_share_of_zero_for_this_step_is_a_mistake(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", pairs(10))
    with pytest.raises(UserError, match=r"--data_split 1,0,1 leaves step 2 no records of 10 records of .*d.jsonl"):
        make(path, 2, encoder, tmp_path, split=(1, 0, 1))
    for split in ((1, 1), (0, 0, 0), (2, -1, 1)):
        with pytest.raises(UserError, match="three shares"):
            make(path, 2, encoder, tmp_path, split=split)


def test_D07_sets_are_mixed_by_probability_and_limited(encoder, tmp_path):
    large = write_jsonl(tmp_path / "large.jsonl", pairs(100))
    small = write_jsonl(tmp_path / "small.jsonl", pairs(18))
    alone = write_jsonl(tmp_path / "s.jsonl", [{"instruction": f"name {n}", "output": n} for n in NUMBERS])
    data = make([large, small], 1, encoder, tmp_path, split=(1, 0, 0), probs=(0.5, 0.5))
    assert [s["train"]["used"] for s in data.report["sets"]] == [18, 18]
    assert any("uses 18 of 95" in line for line in data.lines)
    more = make([large, small], 1, encoder, tmp_path, split=(1, 0, 0), probs=(0.5, 0.5), sft_only_paths=[str(alone)])
    assert [s["train"]["used"] for s in more.report["sets"]] == [18, 18, 9]
    few = make([large, small], 2, encoder, tmp_path, split=(0, 1, 0), max_samples=10)
    assert len(few.train) == 10 and len(few.eval) == 5
    assert len(make(large, 2, encoder, tmp_path, split=(0, 1, 0), max_samples=3).eval) == 3


# ---- the report


def test_D09_more_than_half_dropped_is_a_warning(encoder, tmp_path):
    rows = [{"prompt": f"Human: {words(n)} Assistant:", "chosen": "a", "rejected": "no"} for n in (1, 20, 20, 20)]
    data = make(write_jsonl(tmp_path / "d.jsonl", rows), 3, encoder, tmp_path, split=(0, 0, 1), max_len=8)
    assert any("dropped 3: prompt longer than 8 tokens" in line for line in data.lines)
    assert any(line.startswith("warning: more than half of the training records") for line in data.lines)
    assert json.loads(json.dumps(data.report)) == data.report
    half = make(write_jsonl(tmp_path / "h.jsonl", rows[:2]), 3, encoder, tmp_path, split=(0, 0, 1), max_len=8)
    assert not any(line.startswith("warning") for line in half.lines)


def test_items_of_each_step(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    sft = make(path, 1, encoder, tmp_path, split=(1, 0, 0)).train
    assert set(sft[0]) == {"input_ids", "trained", "record"} and isinstance(sft[0]["input_ids"], list)
    assert encoder.tokenizer.decode(sft[0]["input_ids"]) == "<s> Human : name a colour Assistant : blue </s>"
    pair = make(path, 2, encoder, tmp_path, split=(0, 1, 0)).train[0]
    assert set(pair) == {"chosen_ids", "rejected_ids", "prompt_length", "margin", "record"}
    assert pair["chosen_ids"] == sft[0]["input_ids"] and pair["prompt_length"] == 8
    prompt = make(path, 3, encoder, tmp_path, split=(0, 0, 1)).train[0]
    assert prompt["prompt_ids"] == pair["chosen_ids"][:8] == encoder.prompt_ids([U("name a colour")])


# ---- the cache


def test_D02_an_edited_file_or_setting_never_meets_old_tokens(encoder, tmp_path):
    rows = [dict(row) for row in PAIRS]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    options = {"split": (1, 0, 0)}
    first = make(path, 1, encoder, tmp_path, **options)
    assert any("cache miss" in line for line in first.lines)
    again = make(path, 1, encoder, tmp_path, **options)
    assert any("cache hit" in line for line in again.lines) and again.report == first.report
    assert [again.train[i] for i in range(8)] == [first.train[i] for i in range(8)]
    rows[0]["chosen"] = " pear"
    size = path.stat().st_size
    write_jsonl(path, [{**rows[0], "chosen": " cats"}, *rows[1:]])
    write_jsonl(path, [{**rows[0], "chosen": " one "}, *rows[1:]])
    assert path.stat().st_size == size
    edited = make(path, 1, encoder, tmp_path, **options)
    assert "one </s>" in encoder.tokenizer.decode(edited.train[0]["input_ids"])
    write_jsonl(path, rows[:3])
    assert len(make(path, 1, encoder, tmp_path, **options).train) == 3


def test_D02_every_setting_that_changes_a_token_or_a_choice_has_its_own_entry(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", pairs(30))
    settings = [
        {}, {"max_len": 12}, {"seed": 5}, {"split": (1, 1, 1)}, {"max_samples": 4}, {"probs": (1.0,)},
        {"encoder": TextEncoder(word_tokenizer(), "openllama2")},
        {"encoder": TextEncoder(word_tokenizer(pad_is_eos=True))},
    ]  # fmt: skip
    for step in (1, 2, 3):
        for setting in settings:
            data = make(path, step, **{"encoder": encoder, "tmp_path": tmp_path, **setting})
            assert any("cache miss" in line for line in data.lines)
    assert len(list((tmp_path / "cache").iterdir())) == 3 * len(settings)


def test_C07_D01_the_cache_is_arrow_and_json_without_leftovers(encoder, tmp_path):
    make(write_jsonl(tmp_path / "d.jsonl", pairs(19)), 2, encoder, tmp_path)
    (entry,) = (tmp_path / "cache").iterdir()
    assert {file.suffix for file in entry.rglob("*") if file.is_file()} == {".arrow", ".json"}
    assert not any(b"pickle" in file.read_bytes() for file in entry.rglob("*.json"))


def test_D01_the_name_does_not_depend_on_the_interpreters_salt(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    make(path, 3, encoder, tmp_path)
    names = [entry.name for entry in (tmp_path / "cache").iterdir()]
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from tests.deepspeed_chat.data.test_data_utils import *\n"
        f"make(Path({str(path)!r}), 3, TextEncoder(word_tokenizer()), Path({str(tmp_path / 'other')!r}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "77"})
    assert [entry.name for entry in (tmp_path / "other" / "cache").iterdir()] == names


def test_D01_two_writers_at_once_leave_one_whole_entry(tmp_path):
    folder = tmp_path / "tokens-x"
    items = [{"prompt_ids": [1, 2, 3], "record": f"f:{i}"} for i in range(50)]
    errors = []

    def write():
        try:
            write_cache(folder, 3, items, [], {"lines": []})
        except Exception as error:  # noqa: BLE001  reported below
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors == [] and [entry.name for entry in tmp_path.iterdir()] == ["tokens-x"]
    train, evaluation, _ = read_cache(folder, 3)
    assert len(train) == 50 and len(evaluation) == 0


def test_D01_a_failed_writer_leaves_nothing_that_looks_complete(encoder, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("datasets.Dataset.save_to_disk", full)
        with pytest.raises(OSError, match="no space left"):
            make(path, 3, encoder, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", full)  # all is written, but not yet in its place
        with pytest.raises(OSError, match="no space left"):
            make(path, 3, encoder, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(make(path, 3, encoder, tmp_path).train) == 3
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / "report.json").unlink()  # damaged by hand: built again
    assert not is_complete(entry)
    assert len(make(path, 3, encoder, tmp_path).train) == 3


def test_D01_only_the_writer_encodes(encoder, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    make(path, 3, encoder, tmp_path)
    monkeypatch.setattr(data_utils, "create_dataset_split", lambda *a, **k: pytest.fail("a reader encoded"))
    reader = SimpleNamespace(write_once=lambda done, write: None)
    assert len(make(path, 3, encoder, tmp_path, run=reader).train) == 3


def test_a_cache_folder_that_cannot_be_made_is_the_users_mistake(encoder, tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", PAIRS)
    with pytest.raises(UserError, match="cache folder .*d.jsonl/cache cannot be made"):
        make(path, 3, encoder, tmp_path, cache_dir=str(path / "cache"))

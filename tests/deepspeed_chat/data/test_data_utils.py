"""Splits, length rules, accounting and the token cache."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data import data_utils, encoding
from alpaca_rlhf.deepspeed_chat.training.utils.data.cache import is_complete, read_cache, write_cache
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import (
    create_dataset_split,
    split_rows,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from tests.deepspeed_chat.data.data_samples import NUMBERS, U, make, pairs, talk, words
from tests.tiny import PAIRS, word_tokenizer, write_jsonl


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
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write_cache, folder, 3, items, [], {"lines": []}) for _ in range(4)]
    assert [writer.exception() for writer in writers] == [None] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens-x"]
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

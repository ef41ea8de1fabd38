"""The embedded data: true to its generator, to its layouts, and to what data/README.md says of it."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from alpaca_rlhf.demo import world
from alpaca_rlhf.demo.gold import gold_score, parse_prompt
from alpaca_rlhf.demo.world_answers import Dice, all_first_questions, write_answer
from alpaca_rlhf.demo.world_facts import THINGS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"


def _rows(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.decode().splitlines()]


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict]]:
    return {name: _rows(content) for name, content in world.make_files().items()}


def _gaps(rows: list[dict]) -> list[float]:
    return [gold_score(row["prompt"], row["chosen"]) - gold_score(row["prompt"], row["rejected"]) for row in rows]


def _plain_text(text: str) -> str:
    return " " + " ".join(re.findall(r"[a-z0-9]+", text.lower())) + " "


def test_committed_data_is_what_the_generator_writes(tmp_path):
    for path in world.write_world(tmp_path):
        assert path.read_bytes() == (DATA / path.relative_to(tmp_path)).read_bytes(), f"{path.name}: write data/ again"


def test_another_seed_gives_other_data(tmp_path):
    first, second = world.make_files(2), world.make_files(3)
    assert all(first[name] != second[name] for name in first)


def test_generator_needs_only_the_standard_library():
    code = (
        "import sys; import alpaca_rlhf.demo.world;"
        "sys.exit(len({'torch', 'numpy', 'transformers', 'sentencepiece'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


def test_sizes_and_columns(files):
    assert len(files["preferences/train.jsonl"]) == 2000
    assert len(files["preferences/test.jsonl"]) == 300
    assert len(files["prompts.jsonl"]) == 300
    opened = [row for row in files["training_data.txt.train"] if "Assistant: " not in row["instruction"]]
    assert len(opened) == 2000
    for name in ("training_data.txt.train", "training_data.txt.test"):
        assert all(list(row) == ["instruction", "input", "output"] and row["input"] == "" for row in files[name])
    for name in ("preferences/train.jsonl", "preferences/test.jsonl"):
        for row in files[name]:
            assert list(row) == ["prompt", "response", "chosen", "rejected"]
            assert row["response"] == row["chosen"] != row["rejected"]
            assert row["chosen"][0] == row["rejected"][0] == " "


def test_speaker_markers_stand_only_where_a_speaker_begins(files):
    for name, rows in files.items():
        for row in rows:
            if "prompt" in row:
                assert re.fullmatch(r"(\n\nHuman: [^\n]+\n\nAssistant:( [^\n]+)?)+", row["prompt"]), row["prompt"]
                assert row["prompt"].endswith("\n\nAssistant:")
            else:
                assert re.fullmatch(r"( Human: [^\n]+ Assistant:)+", row["instruction"]), row["instruction"]
            for column in ("output", "chosen", "rejected"):
                text = row.get(column, "x")
                assert text.strip() and "Human:" not in text and "Assistant:" not in text, (name, row)


def test_prompts_of_the_three_files_are_different_texts(files):
    def prompts(name):
        return {_plain_text(row.get("prompt") or row["instruction"]) for row in files[name]}

    seen: set[str] = set()
    for name in files:
        assert not seen & prompts(name), f"{name} repeats a prompt of an earlier file"
        seen |= prompts(name)
    assert len(prompts("prompts.jsonl")) == 300


def test_every_prompt_can_be_judged(files):
    for rows in files.values():
        for row in rows:
            assert 1 <= len(parse_prompt(row.get("prompt") or row["instruction"]).things) <= 2


def test_follow_up_history_holds_the_first_row_of_the_conversation(files):
    rows = files["training_data.txt.train"]
    second = [index for index, row in enumerate(rows) if "Assistant: " in row["instruction"]]
    assert len(second) > 800
    for index in second:
        first = rows[index - 1]
        assert rows[index]["instruction"].startswith(f"{first['instruction']} {first['output']} Human: ")


def test_labels_follow_the_rule_with_noise(files):
    for name in ("preferences/train.jsonl", "preferences/test.jsonl"):
        gaps = _gaps(files[name])
        assert all(abs(gap) >= world.SMALLEST_GAP for gap in gaps)
        assert 0.85 <= sum(gap > 0 for gap in gaps) / len(gaps) <= 0.92
    gaps = _gaps(files["preferences/train.jsonl"])
    close, wide = ([gap > 0 for gap in gaps if (abs(gap) < 0.35) is near] for near in (True, False))
    assert sum(close) / len(close) < 0.87 < 0.9 < sum(wide) / len(wide)  # the noise flips near pairs more often


def test_size_of_the_vocabulary(files):
    text = " ".join(value for rows in files.values() for row in rows for value in row.values())
    assert 1000 <= len(set(_plain_text(text).split())) <= 1500


def test_facts_can_be_found_by_plain_text():
    facts = {_plain_text(fact) for thing in THINGS for fact in (*thing.facts, f"good for {thing.use}")}
    for fact in facts:
        assert not [other for other in facts if other != fact and other in fact], f"{fact!r} contains another fact"
        named = [thing.name for thing in THINGS if _plain_text(thing.name) in fact]
        assert not named, f"{fact!r} names {named}"
    assert len({thing.name for thing in THINGS}) == len(THINGS)


def test_archive_has_the_two_members():
    with zipfile.ZipFile(DATA / "data.zip") as archive:
        assert archive.namelist() == ["training_data.txt.train", "training_data.txt.test"]
        assert archive.testzip() is None


def test_good_answers_of_every_kind_score_near_one_and_bad_ones_low():
    dice = Dice(5)
    for question in dice.draw(all_first_questions(), 200):
        assert gold_score(question.prompt, write_answer(dice, question, "good")) > 0.85
        for style in ("off-topic", "off-topic list", "rude", "repeating", "hollow list"):
            assert gold_score(question.prompt, write_answer(dice, question, style)) < 0.35


def test_unknown_style_is_refused():
    with pytest.raises(AssertionError, match="unknown style"):
        write_answer(Dice(0), all_first_questions()[0], "loud")

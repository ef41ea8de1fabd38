"""What ``--inspect`` and the doctor print: special tokens visible, the trained positions marked where they are."""

import re
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_rlhf.deepspeed_chat.training.utils.data import inspection
from alpaca_rlhf.deepspeed_chat.training.utils.data.encoding import encode
from alpaca_rlhf.deepspeed_chat.training.utils.data.inspection import (
    PLAIN,
    SCORED,
    TRAINED,
    show_records,
    text_lines,
    token_words,
    visible,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.tokenizers import load_tokenizer
from tests.pipeline.steps import make_base, run_step
from tests.tiny import sentencepiece_tokenizer, word_tokenizer

DIALOGUE = Conversation(
    record="r:1",
    prompt=(Turn("user", "name a colour"), Turn("assistant", "blue"), Turn("user", "one two")),
    chosen="three red",
    rejected="three cat",
)


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder(word_tokenizer())


def printed(encoder, step, *conversations, count=3):
    lines = []
    show_records([encode(one, step, encoder, 64).item for one in conversations], encoder, step, count, lines.append)
    return lines


def underlined(lines, text, sign):
    """What of the line that ends in ``text`` stands above ``sign``."""
    place = next(index for index, line in enumerate(lines) if line.endswith(text))
    return "".join(a for a, b in zip(lines[place], lines[place + 1].ljust(len(lines[place])), strict=True) if b == sign)


def test_step_1_marks_every_answer_and_its_end_and_nothing_else(encoder):
    lines = printed(encoder, 1, DIALOGUE)
    assert lines[3] == "r:1: 19 tokens, 5 trained"
    assert lines[4].strip().startswith("⟨<s>⟩ Human : name a colour Assistant : blue⟨</s>⟩ Human : one two")
    assert underlined(lines, "three red⟨</s>⟩", TRAINED) == " blue⟨</s>⟩ three red⟨</s>⟩"


def test_the_marks_are_the_collators_mask(encoder, monkeypatch):
    """A mask that is shifted by one is shown shifted by one."""
    original = inspection.collate_sft

    def shifted(*args, **kwargs):
        batch = original(*args, **kwargs)
        return batch | {"response_mask": batch["response_mask"].roll(1, dims=1)}

    monkeypatch.setattr(inspection, "collate_sft", shifted)
    assert underlined(printed(encoder, 1, DIALOGUE), "three red⟨</s>⟩", TRAINED) != " blue⟨</s>⟩ three red⟨</s>⟩"


def test_step_2_shows_both_sides_the_first_difference_and_where_the_scores_are_read(encoder):
    lines = printed(encoder, 2, DIALOGUE)
    assert lines[3] == "r:1: prompt of 16 tokens, the sides differ from position 17 on"
    assert lines[4] == "  chosen: 19 tokens, its score is read at position 18"
    assert underlined(lines, "three red⟨</s>⟩", TRAINED) == " red"
    assert underlined(lines, "three cat⟨</s>⟩", TRAINED) == " cat"
    assert underlined(lines, "three cat⟨</s>⟩", SCORED) == "⟨</s>⟩"


def test_step_3_shows_the_prompts_as_one_batch_padded_on_the_left(encoder):
    short = replace(DIALOGUE, prompt=(Turn("user", "one"),), record="r:2")
    lines = printed(encoder, 3, DIALOGUE, short)
    assert "r:1: 16 tokens behind 0 of padding" in lines
    assert "r:2: 6 tokens behind 10 of padding" in lines
    place = lines.index("    10×⟨<pad>⟩⟨<s>⟩ Human : one Assistant :")
    assert lines[place + 1].strip() == "." * len("10×⟨<pad>⟩")
    assert "[10] <s>=1" in lines[place + 2]


def test_records_are_taken_from_all_of_the_data(encoder):
    many = [replace(DIALOGUE, record=f"r:{number}") for number in range(100)]
    lines = printed(encoder, 1, *many, count=4)
    assert [line.split(": ")[0] for line in lines if ": 19 tokens" in line] == ["r:0", "r:25", "r:50", "r:75"]
    assert lines[0].startswith("4 of 100 records")
    assert printed(encoder, 1, DIALOGUE, count=4)[0].startswith("1 of 1 records")


def test_a_special_token_that_a_person_wrote_does_not_look_like_one(tmp_path):
    sentencepiece_tokenizer(tmp_path)
    encoder = TextEncoder(load_tokenizer(str(tmp_path), notice=lambda _: None))
    text = "\n".join(printed(encoder, 1, replace(DIALOGUE, prompt=(Turn("user", "the </s> sun"),), chosen="blue")))
    assert "the </s> sun" in text
    assert text.count("⟨</s>⟩") == 1 and "Assistant: blue⟨</s>⟩" in text


def test_a_token_that_was_added_as_special_is_one():
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    assert "<turn>" not in tokenizer.all_special_tokens
    template = "{% for m in messages %}<turn>{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    tokenizer.chat_template = template + "{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
    text = "\n".join(printed(TextEncoder(tokenizer), 1, replace(DIALOGUE, prompt=(Turn("user", "one"),), chosen="two")))
    assert "⟨<s>⟩⟨<turn>⟩ one⟨<turn>⟩ two⟨</s>⟩" in text


def test_lines_are_cut_at_the_width_and_at_line_breaks_without_losing_a_character(tmp_path):
    sentencepiece_tokenizer(tmp_path)
    encoder = TextEncoder(load_tokenizer(str(tmp_path), notice=lambda _: None))
    answer = "1. a dog runs\n\n" + "the sun is big " * 12 + "漢字漢字" * 30
    ids, mask = encoder.conversation_ids([Turn("user", "why\tnot \x1b[31m")], answer)
    signs = "".join(TRAINED if one else PLAIN for one in mask)
    lines = text_lines(ids, signs, encoder, colour=False, width=40)
    texts = [line for line in lines if line.strip("~ ")]
    assert "".join(texts).replace("↵", "\n") == "⟨<s>⟩Human: why\\tnot \\x1b[31m Assistant: " + answer + "⟨</s>⟩"
    columns = [len(line) + sum(one in "漢字" for one in line) for line in lines]
    assert max(columns) == 40
    assert all(len(sign) == width for sign, width in zip(lines[-3::2], columns[-4::2], strict=True))  # below the text


def test_colours_mark_the_same_text_and_need_a_terminal_that_wants_them(encoder, monkeypatch):
    ids, mask = encoder.conversation_ids([Turn("user", "one two")], "three")
    (line,) = text_lines(ids, "".join(TRAINED if one else PLAIN for one in mask), encoder, colour=True)
    assert re.search(r"\x1b\[30;42m three⟨</s>⟩\x1b\[0m$", line)
    assert re.sub(r"\x1b\[[\d;]*m", "", line) == "⟨<s>⟩ Human : one two Assistant : three⟨</s>⟩"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert inspection.in_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not inspection.in_colour()


def test_the_ids_shown_are_those_at_the_start_the_first_mark_and_the_end(encoder):
    ids, mask = encoder.conversation_ids([Turn("user", "the cat and the dog and the sun")], "one two three")
    words = token_words(ids, "".join(TRAINED if one else PLAIN for one in mask), encoder)
    assert words[:5] == ["[0] <s>=1", "Human=4", ":=5", "the=17", "…"]
    assert words[5:] == ["[11] Assistant=6", ":=5", "[13] one=14", "two=15", "three=16", "</s>=2"]
    assert visible("a\x1b[2J\n") == "a\\x1b[2J\\n"


@pytest.mark.parametrize("step", [1, 2, 3])
def test_inspect_prints_records_and_stops_before_any_model_loads(tmp_path, step, capsys, monkeypatch):
    make_base(tmp_path)
    flags = {"model_name_or_path": tmp_path / "base"}
    if step == 3:
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        model.save_pretrained(tmp_path / "rm")
        word_tokenizer().save_pretrained(tmp_path / "rm")
        flags = {"actor_model_name_or_path": tmp_path / "base", "critic_model_name_or_path": tmp_path / "rm"}
        flags["reward_normalization"] = "off"

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        monkeypatch.setattr(auto, "from_pretrained", refuse)
    assert run_step(step, tmp_path, **flags, inspect=2, output_dir=tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert f"2 of {24 if step == 1 else 12} records" in out
    assert out.count("train.jsonl:") == 2
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_S01_inspect_shows_that_the_whole_text_is_trained(tmp_path, capsys):
    make_base(tmp_path)
    assert run_step(1, tmp_path, model_name_or_path=tmp_path / "base", inspect=1, train_prompt=True) == 0
    tokens, trained = re.search(r"(\d+) tokens, (\d+) trained", capsys.readouterr().out).groups()
    assert tokens == trained

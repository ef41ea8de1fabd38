"""Every layout of columns, and every kind of row that cannot be used."""

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn
from tests.deepspeed_chat.data.raw_files import PAIRS, write


def test_rm_static_columns(tmp_path, read):
    data = read(write(tmp_path, PAIRS, "a.jsonl"), needs_rejected=True)
    assert data.train[1] == Conversation("a.jsonl:2", (Turn("user", "question 2"),), "good 2", "bad 2", 0.0)
    assert (len(data.train), data.test, data.skipped) == (3, None, {})


def test_plain_prompt_is_one_user_turn(tmp_path, read):
    row = {"prompt": "Which: Human: or Assistant:?", "chosen": "a", "rejected": "b"}
    assert read(write(tmp_path, [row], "a.json")).train[0].prompt == (Turn("user", row["prompt"]),)


def test_D05_split_before_the_last_assistant_turn(tmp_path, read):
    shared = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    rows = [
        {"chosen": shared + " d", "rejected": shared + " e"},
        {"chosen": shared + " the word Assistant: stays", "rejected": shared + " e"},
        {"chosen": shared + " d", "rejected": shared.replace("b", "x") + " e"},
    ]
    data = read(write(tmp_path, rows, "a.jsonl"), needs_rejected=True)
    prompt = (Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"))
    assert data.train[0] == Conversation("a.jsonl:1", prompt, "d", "e", 0.0)
    assert data.train[1].prompt == prompt
    assert data.train[1].chosen == "the word Assistant: stays"
    assert data.skipped == {"the prompts of `chosen` and `rejected` differ": 1}
    assert data.examples["the prompts of `chosen` and `rejected` differ"] == "a.jsonl:3"


def test_D05_irregular_transcripts(tmp_path, read):
    start = "\n\nHuman: a\n\nHuman: b\n\nAssistant:"
    rows = [
        {"chosen": start + " c", "rejected": start + " d"},  # the user twice: one turn
        {"chosen": start + " c\n\nHuman: e", "rejected": start + " d\n\nHuman: e"},
        {"chosen": start + " c\n\nAssistant: f", "rejected": start + " c\n\nAssistant: g"},
        {"chosen": start + "", "rejected": start + " d"},
        {"chosen": "\n\nHuman: \n\nAssistant: c", "rejected": "\n\nHuman: \n\nAssistant: d"},
        {"chosen": "\n\nAssistant: b\n\nAssistant: c", "rejected": "\n\nAssistant: b\n\nAssistant: d"},
    ]
    data = read(write(tmp_path, rows, "a.jsonl"), needs_rejected=True)
    assert [row.prompt for row in data.train] == [(Turn("user", "a\n\nb"),)]
    assert data.skipped == {
        "`chosen` does not end with an answer of the assistant": 1,
        "the prompt does not end with a turn of the user": 2,
        "the last answer of `chosen` is blank": 1,
        "a turn of the prompt is blank": 1,
    }


def test_alpaca_with_input_and_history(tmp_path, read):
    rows = [
        {"instruction": "Translate.", "input": "Assistant: hi", "output": "salut"},
        {"instruction": " Human: x Assistant: y Human: z Assistant:", "input": "", "output": "w"},
        {"instruction": " Human: x Assistant: y Human: z Assistant:", "input": "more", "output": "w"},
        {"instruction": "no input column", "output": "w"},
        {"instruction": "null input", "input": None, "output": "w"},
        {"instruction": "bad input", "input": 3, "output": "w"},
    ]
    data = read(write(tmp_path, rows, "a.json"))
    history = (Turn("user", "x"), Turn("assistant", "y"))
    assert [row.prompt for row in data.train] == [
        (Turn("user", "Translate.\nAssistant: hi"),),
        (*history, Turn("user", "z")),
        (*history, Turn("user", "z\nmore")),
        (Turn("user", "no input column"),),
        (Turn("user", "null input"),),
    ]
    assert data.skipped == {"`input` is not a string": 1}


@pytest.mark.parametrize(
    "text", ["<noinput>", "No input", "noinput", "N/A", " None. ", "[No Input]", "no-input", "\u200b", "NULL"]
)
def test_D04_placeholder_counts_as_no_input(tmp_path, read, text):
    data = read(write(tmp_path, [{"instruction": "q", "input": text, "output": "a"}], "a.json"))
    assert data.train[0].prompt == (Turn("user", "q"),)


@pytest.mark.parametrize("text", ["NA", "no input voltage", "Nothing", "0", "无", "None of them"])
def test_input_that_only_resembles_a_placeholder_is_kept(tmp_path, read, text):
    data = read(write(tmp_path, [{"instruction": "q", "input": text, "output": "a"}], "a.json"))
    assert data.train[0].prompt == (Turn("user", f"q\n{text}"),)


@pytest.mark.parametrize("answer", ["response", "completion", "answer", "chosen"])
def test_single_answer_columns(tmp_path, read, answer):
    data = read(write(tmp_path, [{"prompt": "q", answer: " a "}], "a.json"), needs_answer=True)
    assert data.train == [Conversation("a.json:1", (Turn("user", "q"),), "a", None, 0.0)]


def test_messages(tmp_path, read):
    def row(*roles):
        return {"messages": [{"role": role, "content": f"{n} "} for n, role in enumerate(roles)]}

    rows = [
        row("system", "user", "assistant", "user", "assistant"),
        row("user"),
        row("tool", "assistant"),
        {"messages": "x"},
    ]
    data = read(write(tmp_path, rows, "a.json"), needs_answer=True)
    assert data.train[0].prompt == (
        Turn("system", "0"),
        Turn("user", "1"),
        Turn("assistant", "2"),
        Turn("user", "3"),
    )
    assert data.train[0].chosen == "4"
    assert data.skipped == {
        "`messages` does not end with an answer of the assistant": 1,
        "`messages` has a message whose role is not system, user or assistant": 1,
        "`messages` is not a list of messages": 1,
    }


def test_D04_empty_null_and_wrong_fields_are_counted_with_their_first_place(tmp_path, read):
    good = {"instruction": "q", "input": "<noinput>", "output": "a"}
    rows = [
        good,
        good | {"output": ""},
        good | {"output": None},
        {"instruction": "q"},
        good | {"output": 5},
        good | {"output": " \u200b\x00\n"},
        good | {"output": "<nooutput>"},
        good | {"instruction": "  "},
        good | {"output": "half \ud83d"},
        "not an object",
    ]
    data = read(write(tmp_path, rows, "six.json"))
    assert [(row.record, row.chosen) for row in data.train] == [("six.json:1", "a")]
    assert data.train[0].prompt == (Turn("user", "q"),)
    assert data.skipped == {
        "`output` is blank": 2,
        "`output` is null": 1,
        "`output` is missing": 1,
        "`output` is not a string": 1,
        "`output` is a lone placeholder": 1,
        "`instruction` is blank": 1,
        "`output` is not valid Unicode": 1,
        "the row is not an object with columns": 1,
    }
    assert data.examples["`output` is blank"] == "six.json:2"
    report = data.describe()
    assert "10 rows read, usable 1 train, no test part; 9 skipped" in report[0]
    assert "  skipped 2: `output` is blank (first: six.json:2)" == report[1]


def test_D04_nothing_left_is_an_error(tmp_path, read):
    path = write(tmp_path, [{"instruction": "q", "output": ""}], "a.json")
    with pytest.raises(
        UserError, match=r"no row of .*a\.json can be used \(`output` is blank: 1, first a\.json:1\)"
    ):
        read(path)
    path.write_text("")
    with pytest.raises(UserError, match="it holds no rows"):
        read(path)


def test_D11_single_answers_are_refused_by_step_2(tmp_path, read):
    path = write(tmp_path, [{"prompt": "q", "chosen": "a"}], "single.json")
    with pytest.raises(
        UserError, match=r"single\.json has no `rejected` .*steps 1 and 3.*step 2 needs pairs"
    ):
        read(path, needs_rejected=True)
    assert read(path).train[0].rejected is None


def test_D11_prompts_alone_serve_step_3_only(tmp_path, read):
    path = write(tmp_path, [{"prompt": "q"}], "prompts.json")
    assert read(path).train == [Conversation("prompts.json:1", (Turn("user", "q"),), "", None, 0.0)]
    with pytest.raises(UserError, match=r"prompts\.json has no answers .*only step 3"):
        read(path, needs_answer=True)
    with pytest.raises(UserError, match=r"no `rejected` .*only step 3"):
        read(path, needs_rejected=True)


def test_R08_equal_answers_are_skipped(tmp_path, read):
    rows = [*PAIRS, PAIRS[0] | {"rejected": PAIRS[0]["chosen"] + "\n"}]
    data = read(write(tmp_path, rows, "a.jsonl"), needs_rejected=True)
    assert len(data.train) == 3
    assert data.skipped == {"`chosen` and `rejected` are the same text": 1}


def test_R10_margin_present_absent_or_mixed(tmp_path, read):
    margins = [
        {"margin": 1},
        {},
        {"margin": None},
        {"margin": "0.5"},
        {"margin": "much"},
        {"margin": True},
        {"margin": float("nan")},
    ]
    data = read(write(tmp_path, [PAIRS[0] | margin for margin in margins], "a.jsonl"))
    assert [row.margin for row in data.train] == [1.0, 0.0, 0.0, 0.5]
    assert all(type(row.margin) is float for row in data.train)
    assert data.skipped == {"`margin` is not a number": 2, "`margin` is not a finite number": 1}
    mixed = write(tmp_path, [PAIRS[0] | {"margin": ""}, PAIRS[1] | {"margin": "2"}], "b.csv")
    assert [row.margin for row in read(mixed).train] == [0.0, 2.0]


def test_same_conversations_whichever_step_asks(tmp_path, read):
    path = write(tmp_path, [*PAIRS, PAIRS[0] | {"rejected": None}], "a.jsonl")
    assert read(path).train == read(path, needs_rejected=True).train == read(path, needs_answer=True).train
    assert len(read(path).train) == 3


def test_unknown_columns_are_listed(tmp_path, read):
    with pytest.raises(UserError, match=r"found: foo, bar\); accepted are: prompt, chosen, rejected"):
        read(write(tmp_path, [{"foo": "1"}, {"bar": "2"}], "a.json"))

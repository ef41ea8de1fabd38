"""From files of every format and layout to conversations: what is read, what is refused, what is counted."""

import csv
import gzip
import io
import json
import os
import socket
import zipfile
from pathlib import Path

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data import raw_datasets
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import (
    Conversation,
    MultiTurnAlpacaDataset,
    Turn,
    load_raw_dataset,
    parse_transcript,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.readers import read_table
from alpaca_rlhf.deepspeed_chat.training.utils.data.transcripts import parse_prompt

PAIRS = [
    {
        "prompt": f"\n\nHuman: question {n}\n\nAssistant:",
        "response": f" good {n}",
        "chosen": f" good {n}",
        "rejected": f" bad {n}",
    }
    for n in range(1, 4)
]
ALPACA = [{"instruction": f"say {n}", "input": "", "output": f"答え {n}"} for n in range(1, 4)]
REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def read(tmp_path):
    def read(path, needs_rejected=False, **options):
        return load_raw_dataset(
            str(path), cache_dir=str(tmp_path / "cache"), needs_rejected=needs_rejected, **options
        )

    return read


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(raw_datasets, "read_hub", refuse)


def lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path, rows, name: str) -> Path:
    """The rows as the file ``name`` in the format of its ending."""
    bare = name.lower().removesuffix(".gz")
    if bare.endswith(".json"):
        content = json.dumps(rows, indent=1).encode()
    elif bare.endswith(".csv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
    elif bare.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        content = buffer.getvalue()
    else:
        content = lines(rows).encode()
    path.mkdir(parents=True, exist_ok=True)
    file = path / name
    file.write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    return file


# --- transcripts -------------------------------------------------------------------------------------------------


def turns(text: str) -> list[tuple[str, str]]:
    return [(turn.role[0], turn.text) for turn in parse_transcript(text)]


def test_paragraph_transcript_keeps_markers_inside_lines_as_text():
    text = (
        "\n\nHuman: a\n\nAssistant: b says Assistant: no\nHuman: neither\n\nHuman: c\n\nAssistant: Human: d"
    )
    assert turns(text) == [
        ("u", "a"),
        ("a", "b says Assistant: no\nHuman: neither"),
        ("u", "c"),
        ("a", "Human: d"),
    ]


def test_paragraph_transcript_without_its_leading_empty_line():
    assert turns("Human: a (Assistant: x)\n\nAssistant: b") == [("u", "a (Assistant: x)"), ("a", "b")]
    assert turns("\n\nAssistant: hello\n\nHuman: hi\n\nAssistant:") == [
        ("a", "hello"),
        ("u", "hi"),
        ("a", ""),
    ]


def test_repeated_roles_and_empty_turns_are_kept_by_the_parser():
    text = "\n\nHuman: a\n\nHuman: b\n\nAssistant:\n\nAssistant: c\n\nHuman: d"
    assert turns(text) == [("u", "a"), ("u", "b"), ("a", ""), ("a", "c"), ("u", "d")]


def test_inline_transcript_of_seed_b():
    assert turns(" Human: x y Assistant: 1. p\n2. q Human: z Assistant:") == [
        ("u", "x y"),
        ("a", "1. p\n2. q"),
        ("u", "z"),
        ("a", ""),
    ]


def test_inline_marker_counts_only_where_the_speaker_changes():
    assert turns("Human: the word Human: is odd Assistant: yes") == [
        ("u", "the word Human: is odd"),
        ("a", "yes"),
    ]
    assert turns("Human: see https://x.y/Assistant:z Assistant: yes")[0] == (
        "u",
        "see https://x.y/Assistant:z",
    )


def test_inline_answer_that_ends_with_an_empty_line():
    text = " Human: a Assistant: b.\n\n Human: c Assistant:"
    assert turns(text) == [("u", "a"), ("a", "b."), ("u", "c"), ("a", "")]


def test_line_transcript():
    assert turns("Human: say Assistant: twice\nAssistant: ok") == [("u", "say Assistant: twice"), ("a", "ok")]


def test_text_without_leading_marker_is_one_user_turn():
    for text in ("What does Assistant: mean?", "  plain ", "A Human: b Assistant: c", ""):
        assert turns(text) == [("u", text.strip())]


def test_text_before_the_first_paragraph_marker():
    assert turns("Be kind.\n\nHuman: a\n\nAssistant:") == [("s", "Be kind."), ("u", "a"), ("a", "")]
    assert [turn.role for turn in parse_prompt("Be kind.\n\nHuman: a\n\nAssistant:")] == ["system", "user"]
    quoted = "Correct this dialogue:\n\nHuman: a\n\nAssistant: b"
    assert parse_prompt(quoted) == (Turn("user", quoted),)


# --- layouts -----------------------------------------------------------------------------------------------------


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


# --- sources -----------------------------------------------------------------------------------------------------

NAMES = ["a.json", "a.jsonl", "X.JSONL", "a.ndjson", "a.csv", "a.parquet", "training_data.txt.train"]
NAMES += ["a.json.gz", "a.jsonl.gz", "A.CSV.GZ", "a.parquet.gz"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [PAIRS, ALPACA], ids=["pairs", "alpaca"])
def test_D08_every_format_gives_the_same_rows(tmp_path, read, no_network, name, rows):
    data = read(write(tmp_path, rows, name))
    assert [row.record for row in data.train] == [f"{name}:{n}" for n in (1, 2, 3)]
    assert [row.chosen for row in data.train] == [
        (row.get("chosen") or row["output"]).strip() for row in rows
    ]


def test_json_in_disguise_and_blank_lines(tmp_path, read):
    path = tmp_path / "a.json"
    path.write_text(
        "\ufeff\n"
        + lines(ALPACA[:1])
        + "\r\n\n"
        + json.dumps({"instruction": "\u2028", "output": "a\u2028b"})
    )
    assert [(row.record, row.chosen) for row in read(path).train] == [("a.json:2", "答え 1")]
    path.write_text(lines([ALPACA[0] | {"output": "a\u2028b"}, ALPACA[1]]))  # lines() writes U+2028 itself
    assert read(path).train[0].chosen == "a\u2028b"
    (tmp_path / "b.jsonl").write_text(json.dumps(ALPACA))
    assert len(read(tmp_path / "b.jsonl").train) == 3
    (tmp_path / "c.json").write_text(json.dumps(ALPACA[0], indent=2))
    assert read(tmp_path / "c.json").train[0].record == "c.json:1"


def test_line_ends_of_other_platforms(tmp_path, read):
    row = {key: text.replace("\n", "\r\n") for key, text in PAIRS[0].items()}
    data = read(write(tmp_path, [row | {"chosen": "a\r\nb"}], "a.csv"))
    assert (data.train[0].prompt, data.train[0].chosen) == ((Turn("user", "question 1"),), "a\nb")


def test_long_csv_cell_and_short_csv_row(tmp_path, read):
    path = write(tmp_path, [{"instruction": "q", "output": "x" * 200_000}], "a.csv")
    path.write_text(path.read_text() + "only one\n")
    data = read(path)
    assert len(data.train[0].chosen) == 200_000
    assert data.skipped == {"`output` is null": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "q"}\n{"prompt": "q', r"a\.jsonl, line 2, is not JSON"),
        ("a.json", b'[{"prompt": "q"},\n', r"a\.json, line 2, is not JSON"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9], r"cannot read .*a\.jsonl\.gz"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet is not a complete parquet file"),
        ("a.parquet", b"text", r"a\.parquet is not a parquet file"),
        ("a.json", b'{"prompt": "\xff\xfe"}', r"a\.json is not UTF-8"),
        ("a.csv", b'prompt\n"open', r"a\.csv, line \d+, is not CSV"),
        ("model.bin", b"hello", r"model\.bin is no data file"),
    ],
)
def test_broken_file_is_named(tmp_path, read, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_parquet_gives_known_columns_and_plain_text_as_values(tmp_path):
    table = read_table(write(tmp_path, [{"id": 1, "prompt": "q", "vector": [0.5], "text": "t"}], "a.parquet"))
    assert (table.columns, table.rows) == (("id", "prompt", "vector", "text"), [(1, {"prompt": "q", "text": "t"})])
    table = read_table(write(tmp_path, [{"page": "p", "vector": [0.5]}], "b.parquet"))
    assert table.rows == [(1, {"page": "p"})]


def test_D08_folder_with_parts_and_shards(tmp_path, read, no_network):
    folder = tmp_path / "set"
    write(folder, PAIRS[:1], "train-00000-of-00002.parquet")
    write(folder, PAIRS[1:2], "train-00001-of-00002.parquet")
    write(folder, PAIRS[2:], "Validation.csv")
    (folder / "README.md").write_text("x")
    (folder / "dataset_infos.json").write_text("{}")
    data = read(folder, needs_rejected=True)
    assert [row.chosen for row in data.train] == ["good 1", "good 2"]
    assert [row.record for row in data.test] == ["Validation.csv:1"]
    write(folder, PAIRS, "test.jsonl.gz")
    again = read(folder)
    assert len(again.test) == 3
    assert again.notes == ("not read: Validation.csv",)


def test_folder_with_one_file_or_a_hub_copy(tmp_path, read):
    write(tmp_path / "one", ALPACA, "whatever.json")
    assert len(read(tmp_path / "one").train) == 3
    write(tmp_path / "hub" / "data", PAIRS, "train-0.parquet")
    assert len(read(tmp_path / "hub").train) == 3
    assert len(read(f"{tmp_path / 'hub'}@data").train) == 3


def test_folder_without_train_file(tmp_path, read):
    with pytest.raises(UserError, match="holds no data files"):
        (tmp_path / "empty").mkdir()
        read(tmp_path / "empty")
    write(tmp_path / "two", ALPACA, "a.json")
    write(tmp_path / "two", ALPACA, "b.json")
    with pytest.raises(UserError, match=r"no train file among a\.json, b\.json"):
        read(tmp_path / "two")


def test_folder_in_the_layout_of_multi_turn_alpaca(tmp_path, read):
    write(tmp_path / "m", ALPACA, "training_data.txt.train")
    write(tmp_path / "m", ALPACA[:1], "training_data.txt.test")
    data = read(tmp_path / "m")
    assert (len(data.train), len(data.test)) == (3, 1)


def test_the_last_word_for_a_part_counts(tmp_path, read):
    write(tmp_path / "s", ALPACA, "train-of-test-suite.train.json")
    write(tmp_path / "s", ALPACA[:1], "train-of-test-suite.val.json")
    write(tmp_path / "t", ALPACA, "my_training_rows.json")
    write(tmp_path / "t", ALPACA[:1], "other.json")
    assert (len(read(tmp_path / "s").train), len(read(tmp_path / "s").test)) == (3, 1)
    assert (len(read(tmp_path / "t").train), read(tmp_path / "t").notes) == (3, ("not read: other.json",))


def test_unusable_test_part_is_left_out_with_a_note(tmp_path, read):
    write(tmp_path / "s", ALPACA, "train.jsonl")
    write(tmp_path / "s", [ALPACA[0] | {"output": ""}], "test.jsonl")
    data = read(tmp_path / "s")
    assert data.test is None
    assert data.notes == ("its test part holds no usable row and is left out",)
    assert data.examples == {"`output` is blank": "test.jsonl:1"}


def test_saved_by_datasets(tmp_path, read, no_network):
    import datasets

    part = datasets.Dataset.from_list(PAIRS)
    datasets.DatasetDict({"train": part.select([2, 0]), "validation": part, "other": part}).save_to_disk(
        tmp_path / "dict"
    )
    data = read(tmp_path / "dict", needs_rejected=True)
    assert [(row.record, row.chosen) for row in data.train] == [("train:1", "good 3"), ("train:2", "good 1")]
    assert len(data.test) == 3
    assert data.notes == ("not read: split other",)
    part.save_to_disk(tmp_path / "plain")
    assert len(read(tmp_path / "plain").train) == 3


@pytest.mark.parametrize(
    "name",
    [
        "./nothing",
        "/no/thing",
        "~/nothing-here",
        "x.json",
        "x/y.JSONL",
        "a/b/c",
        "a b",
        "x.csv.gz",
        "sub/nothing",
    ],
)
def test_D08_misspelt_path_fails_at_once_naming_it(tmp_path, read, no_network, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with pytest.raises(UserError, match=f"there is no file or folder {name}"):
        read(name)


def test_unknown_hub_name_offline_is_one_sentence(read):
    with pytest.raises(UserError, match="^no-one/no-such-set is no file or folder here") as caught:
        read("no-one/no-such-set")
    assert "\n" not in str(caught.value)


def test_hub_splits_and_subfolder(read, monkeypatch):
    import datasets

    asked = []

    def load(name, config=None, data_dir=None):
        asked.append((name, data_dir))
        part = datasets.Dataset.from_list(PAIRS)
        return datasets.DatasetDict({"train": part, "test": part.select([0])})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(read("Dahoas/rm-static").test) == 1
    assert read("some/set@sub").train[0].record == "train:1"
    assert asked == [("Dahoas/rm-static", None), ("some/set", "sub")]


def test_D02_digest_follows_the_content(tmp_path, read):
    path = write(tmp_path, ALPACA, "a.json")
    first = read(path).digest
    os.utime(path, (1, 1))
    assert read(path).digest == first
    write(tmp_path, [ALPACA[0] | {"output": "答え 9"}, *ALPACA[1:]], "a.json")
    assert read(path).digest != first
    (tmp_path / "s").mkdir()
    write(tmp_path / "s", ALPACA, "train.json")
    one = read(tmp_path / "s").digest
    write(tmp_path / "s", ALPACA, "test.json")
    assert read(tmp_path / "s").digest != one


# --- MultiTurnAlpaca ---------------------------------------------------------------------------------------------


def archive(folder: Path, train, test) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "data.zip", "w") as content:
        content.writestr("training_data.txt.train", lines(train))
        content.writestr("inner/training_data.txt.test", lines(test))
    return folder


DIALOGUE = [
    {"instruction": " Human: a Assistant:", "input": "", "output": "1"},
    {"instruction": " Human: a Assistant: 1 Human: b Assistant:", "input": "", "output": "2"},
    {
        "instruction": " Human: a Assistant: 1 Human: b Assistant: 2 Human: c Assistant:",
        "input": "",
        "output": "3",
    },
]


def use_data_dir(monkeypatch, folder: Path) -> None:
    original = MultiTurnAlpacaDataset.__init__
    monkeypatch.setattr(MultiTurnAlpacaDataset, "__init__", lambda self, cache: original(self, cache, folder))


def test_B07_multi_turn_alpaca_is_unpacked_into_the_cache(tmp_path, read, no_network, monkeypatch):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE[:1])
    use_data_dir(monkeypatch, folder)
    data = read("MultiTurnAlpaca", needs_answer=True)
    assert [(len(row.prompt), row.chosen) for row in data.train] == [(1, "1"), (3, "2"), (5, "3")]
    assert len(data.test) == 1
    assert [file.name for file in folder.iterdir()] == ["data.zip"]
    unpacked = sorted((tmp_path / "cache").rglob("*.*"))
    assert [file.name for file in unpacked if file.is_file()] == [
        "training_data.txt.test",
        "training_data.txt.train",
    ]
    with pytest.raises(UserError, match="MultiTurnAlpaca has no `rejected`"):
        read("MultiTurnAlpaca", needs_rejected=True)


def test_multi_turn_alpaca_is_unpacked_only_when_needed(tmp_path):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE)
    train, _ = MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()
    os.utime(train, (1, 1))
    assert MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()[0].stat().st_mtime == 1
    train.write_text("cut off")
    assert MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()[0].read_text() == lines(DIALOGUE)
    archive(folder, DIALOGUE[:1], DIALOGUE)
    assert MultiTurnAlpacaDataset(str(tmp_path / "cache"), folder).unpack()[0].read_text() == lines(
        DIALOGUE[:1]
    )


def test_multi_turn_alpaca_unpacked_by_the_user_is_read_with_a_note(tmp_path, read, monkeypatch):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE)
    write(folder, DIALOGUE[:2], "training_data.txt.train")
    write(folder, DIALOGUE[:1], "training_data.txt.test")
    use_data_dir(monkeypatch, folder)
    data = read("MultiTurnAlpaca")
    assert (len(data.train), len(data.test)) == (2, 1)
    assert "unpacked files" in data.notes[0]
    assert not (tmp_path / "cache").exists()


def test_B36_missing_or_broken_archive_is_named(tmp_path):
    with pytest.raises(UserError, match=r"MultiTurnAlpaca is kept in .*data\.zip, which is missing"):
        MultiTurnAlpacaDataset(str(tmp_path), tmp_path).read()
    (tmp_path / "data.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match=r"data\.zip is not a whole zip archive"):
        MultiTurnAlpacaDataset(str(tmp_path), tmp_path).read()
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as content:
        content.writestr("other.txt", "x")
    with pytest.raises(UserError, match=r"data\.zip holds no file training_data\.txt\.train"):
        MultiTurnAlpacaDataset(str(tmp_path), tmp_path).read()


def test_cache_that_cannot_be_written_is_named(tmp_path):
    folder = archive(tmp_path / "data", DIALOGUE, DIALOGUE)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be unpacked into .*file"):
        MultiTurnAlpacaDataset(str(tmp_path / "file"), folder).unpack()


def test_the_projects_own_data(read, no_network):
    if not (REPO / "data" / "data.zip").is_file():
        pytest.skip("the demo data has not been generated")
    sft, pairs = read("MultiTurnAlpaca"), read(REPO / "data" / "preferences", needs_rejected=True)
    assert sft.skipped == pairs.skipped == {}
    assert min(len(sft.train), len(pairs.train)) >= 1500
    assert sft.test and pairs.test
    assert any(len(row.prompt) > 1 for row in sft.train)
    assert all("Assistant:" not in turn.text for row in sft.train for turn in row.prompt)


# --- real data ---------------------------------------------------------------------------------------------------


def real(name: str) -> Path:
    folder = Path(os.environ.get("ALPACA_RLHF_REAL_DATA") or REPO.parent / "shared" / "data")
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not here; ALPACA_RLHF_REAL_DATA names its folder")
    return folder / name


@pytest.mark.real_data
def test_real_hh_rlhf(read, no_network):
    path = real("hh_rlhf_harmless_test.jsonl.gz")
    data = read(path, needs_rejected=True)
    assert len(data.train) == 2303
    assert data.skipped == {
        "the prompts of `chosen` and `rejected` differ": 5,
        "the last answer of `chosen` is blank": 4,
    }
    with gzip.open(path, "rt", encoding="utf-8") as file:
        raw = [json.loads(line) for line in file]
    for (
        row
    ) in data.train:  # the definition of D-05, on the raw text: everything after the last paragraph marker
        source = raw[int(row.record.rpartition(":")[2]) - 1]
        assert row.chosen == source["chosen"].rpartition("\n\nAssistant:")[2].strip()
        assert row.rejected == source["rejected"].rpartition("\n\nAssistant:")[2].strip()
        assert row.prompt[-1].role == "user"


@pytest.mark.real_data
def test_real_gpteacher(read, no_network):
    data = read(real("gpteacher_roleplay.json"), needs_answer=True)
    assert (len(data.train), data.skipped) == (3146, {})
    assert not any(row.prompt[-1].text.endswith("noinput") for row in data.train)

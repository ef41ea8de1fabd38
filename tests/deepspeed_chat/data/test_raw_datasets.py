"""Where rows come from: files of every format, folders, saved sets, hub names, real data."""

import gzip
import json
import os
from pathlib import Path

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.readers import read_table
from tests.deepspeed_chat.data.raw_files import ALPACA, PAIRS, lines, write

REPO = Path(__file__).resolve().parents[3]


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
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-9], r"cannot read .*a\.jsonl\.gz"),
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
    assert (table.columns, table.rows) == (
        ("id", "prompt", "vector", "text"),
        [(1, {"prompt": "q", "text": "t"})],
    )
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

"""Votes in a file, and the file in the reader of step 2."""

import fcntl
import json
import multiprocessing
import sys
import threading

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn, load_raw_dataset
from alpaca_rlhf.inference.conversation import with_round
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.inference.votes import append_vote, prepare_votes, vote_row
from tests.pipeline.steps import make_base, metrics, run_step

HISTORY = with_round((), "what is the sky", "blue")


def row(vote="left", own="", left="one", right="two", prompt="why", history=HISTORY):
    return vote_row(history, prompt, (left, right), ("sft", "rlhf"), vote, own, Settings(), True)


def read(path, **needs):
    return load_raw_dataset(str(path), cache_dir="", needs_rejected=True, **needs)


def test_a_vote_holds_all_that_was_judged(tmp_path):
    path = tmp_path / "deep" / "votes.jsonl"
    prepare_votes(path)
    append_vote(path, row("right", "a <b> \u2028 three"))
    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "history": [{"role": "user", "content": "what is the sky"}, {"role": "assistant", "content": "blue"}],
        "prompt": "why", "left": "one", "right": "two", "names": {"left": "sft", "right": "rlhf"}, "vote": "right",
        "own": "a <b> \u2028 three", "blind": True,
        "settings": {"max_new_tokens": 128, "num_beams": 1, "do_sample": True, "temperature": 0.7, "top_p": 0.95,
                     "seed": 1234},
    }  # fmt: skip


def test_each_vote_becomes_its_pairs_and_the_rest_is_counted(tmp_path):
    path = tmp_path / "votes.jsonl"
    votes = [row("left"), row("right"), row("tie"), row("both_bad"), row("both_bad"), row("tie", "best"),
             row("left", "best"), row("left", right="one"), row("right", left="")]  # fmt: skip
    for vote in votes:
        append_vote(path, vote)
    with path.open("a") as file:
        file.write(json.dumps({**row(), "vote": "up"}) + "\n")
    raw = read(path)
    pairs = [(pair.record, pair.chosen, pair.rejected) for pair in raw.train]
    assert pairs == [
        ("votes.jsonl:1", "one", "two"),
        ("votes.jsonl:2", "two", "one"),
        ("votes.jsonl:6", "best", "one"),
        ("votes.jsonl:6", "best", "two"),
        ("votes.jsonl:7", "best", "one"),
        ("votes.jsonl:7", "best", "two"),
        ("votes.jsonl:7", "one", "two"),
    ]
    assert {pair.prompt for pair in raw.train} == {(*HISTORY, Turn("user", "why"))}
    assert raw.skipped == {
        "the vote is a tie": 1,
        "the vote says that both answers are bad": 2,
        "`chosen` and `rejected` are the same text": 1,
        "`content` is blank": 1,
        "`vote` is not left, right, tie or both_bad": 1,
    }
    assert raw.describe()[0].startswith(f"{path}: 10 rows read, usable 7 train, no test part; 6 skipped")
    assert "3 more pairs than rows" in raw.describe()[1]


def test_nothing_but_ties_is_an_error_that_counts_them(tmp_path):
    append_vote(tmp_path / "votes.jsonl", row("tie"))
    with pytest.raises(UserError, match="the vote is a tie: 1"):
        read(tmp_path / "votes.jsonl")


def test_a_wrong_vote_is_refused_and_a_vote_that_cannot_be_written_too(tmp_path):
    with pytest.raises(UserError, match="choose left, right, tie, both_bad"):
        row("up")
    with pytest.raises(UserError, match="Unicode"):
        row("left", "\ud800")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="votes cannot be written"):
        prepare_votes(tmp_path / "file" / "votes.jsonl")
    with pytest.raises(UserError, match="vote again"):
        append_vote(tmp_path / "nowhere" / "votes.jsonl", row())


def test_a_line_that_was_left_open_spoils_no_vote(tmp_path):
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps(row("tie")))
    append_vote(path, row())
    assert [json.loads(line)["vote"] for line in path.read_text().splitlines()] == ["tie", "left"]


def write_many(path, name):
    for number in range(20):
        append_vote(path, row(prompt=f"{name} {number}", left="x" * 5000))


def test_many_voters_at_once_lose_and_mix_nothing(tmp_path):
    path = tmp_path / "votes.jsonl"
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    voters = [context.Process(target=write_many, args=(path, name)) for name in "abcd"]
    for voter in voters:
        voter.start()
    for voter in voters:
        voter.join()
    found = sorted(json.loads(line)["prompt"] for line in path.read_text().splitlines())
    assert found == sorted(f"{name} {number}" for name in "abcd" for number in range(20))


def test_a_vote_waits_for_whoever_writes(tmp_path):
    path = tmp_path / "votes.jsonl"
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        voter = threading.Thread(target=append_vote, args=(path, row()))
        voter.start()
        voter.join(0.3)
        assert voter.is_alive() and path.read_bytes() == b""
    voter.join()
    assert len(path.read_text().splitlines()) == 1


def test_step_2_reads_the_votes_as_they_are(tmp_path, capsys):
    folder = make_base(tmp_path)
    path = tmp_path / "votes.jsonl"
    colours = ["blue", "red", "green"]
    for number in range(24):
        prompt = f"name a colour {' '.join(['please'] * (number % 4))} {number % 3 + 1}".strip()
        sides = (colours[number % 3], "seven")
        vote = "tie" if number % 8 == 7 else "left" if number % 2 else "right"
        append_vote(path, row(vote, left=sides[number % 2 == 0], right=sides[number % 2], prompt=prompt, history=()))
    base = folder / "base"
    done = run_step(2, folder, data_path=path, data_split="0,1,0", model_name_or_path=base, output_dir=folder / "rm")
    assert done == 0
    assert "24 rows read, usable 21 train, no test part; 3 skipped" in capsys.readouterr().out
    assert metrics(folder / "rm")[-1]

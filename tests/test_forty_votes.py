"""The parts of benchmarks/forty_votes.py: who is voted for, which pairs are made, what is counted, what is reported."""

import json
from types import SimpleNamespace

import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from benchmarks import forty_votes, list_voter
from benchmarks.list_voter import Candidate, cast_votes, list_pairs, list_share, watched_lists
from tests.inference.models import chat_model, scripted
from tests.pipeline.steps import make_base, run_step
from tests.tiny import WORDS, tiny_llama, word_tokenizer

QUESTIONS = [f"do you like {word} ?" for word in WORDS]


@pytest.fixture
def wanted(monkeypatch):
    """The tiny models write no numbered lists: here an answer "has a list" when it has one of these words."""
    words = {"blue", "red", "apples", "dog", "water", "sky", "moon", "sun", "cat", "tree"}
    monkeypatch.setattr(list_voter, "has_list", lambda text: bool(words & set(text.split())))
    return words


def test_the_visitor_votes_where_one_answer_has_a_list_and_for_that_one(tmp_path, wanted):
    models = [chat_model(tiny_llama(len(word_tokenizer()), seed=seed), name=f"m{seed}") for seed in (0, 1)]
    ballot = cast_votes(models, QUESTIONS, 12, tmp_path / "votes.jsonl", seed=3, max_new_tokens=6)
    rows = [json.loads(line) for line in (tmp_path / "votes.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and all(row["blind"] and not row["history"] and not row["own"] for row in rows)
    for row in rows:
        liked = {side: bool(wanted & set(row[side].split())) for side in ("left", "right")}
        assert sum(liked.values()) == 1 and liked[row["vote"]]
    assert {row["vote"] for row in rows} == {"left", "right"}  # one chance in 2048 that all stand on one side
    won = [sum(row["names"][row["vote"]].startswith(name) for row in rows) for name in ("m0", "m1")]
    assert list(ballot.won) == won and 12 < ballot.asked == QUESTIONS.index(rows[-1]["prompt"]) + 1
    assert ballot.answers_with_list[0] >= won[0] and ballot.answers_with_list[1] >= won[1]
    assert len({row["settings"]["seed"] for row in rows}) == 12


def test_length_is_counted_for_the_answer_that_was_voted_for(tmp_path, wanted):
    models = [scripted("the sky is blue"), scripted("no")]
    ballot = cast_votes(models, QUESTIONS, 4, tmp_path / "votes.jsonl", seed=1, max_new_tokens=8)
    assert (ballot.asked, ballot.won, ballot.longer, ballot.mean_tokens) == (4, (4, 0), 4, (5.0, 2.0))
    assert ballot.answers_with_list == (4, 0)


def test_too_few_lists_are_told(tmp_path, wanted):
    models = [scripted("yes"), scripted("no")]
    with pytest.raises(UserError, match="5 questions led to 0 votes of 3, with lists in 0 and 0 of the answers"):
        cast_votes(models, QUESTIONS[:5], 3, tmp_path / "votes.jsonl", seed=1, max_new_tokens=8)


LONG, SHORT = Candidate("Facts:\n1. one\n2. two", 9), Candidate("1. one", 3)
PLAIN = Candidate("It costs 1. It is one.", 5)


def test_a_pair_is_a_list_and_no_list_to_one_prompt():
    answers = {"a": [LONG, PLAIN, PLAIN], "b": [PLAIN, PLAIN], "c": [LONG, SHORT], "d": [SHORT, LONG, PLAIN]}
    drawn = [list_pairs(answers, seed) for seed in range(20)]
    assert all([pair.prompt for pair in pairs] == ["a", "d"] for pairs in drawn)
    assert {pairs[1].chosen for pairs in drawn} == {LONG, SHORT} and {pairs[1].rejected for pairs in drawn} == {PLAIN}
    assert drawn[0][0].row() == {"prompt": "a", "chosen": " Facts:\n1. one\n2. two", "rejected": f" {PLAIN.text}"}
    (shorter,) = list_pairs(answers, 0, shorter=True)
    assert (shorter.prompt, shorter.chosen, shorter.rejected) == ("d", SHORT, PLAIN)


def test_the_share_of_lists_is_of_each_rollouts_answers_and_step_3_is_left_as_it_was(tmp_path, wanted):
    tokenizer = word_tokenizer()
    encoder = TextEncoder(tokenizer, "auto")
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("no blue", "no no")])
    rollout = SimpleNamespace(responses=ids, response_mask=torch.tensor([[1, 1], [1, 1]]))
    assert list_share(rollout, encoder) == 0.5
    rollout.response_mask[0, 1] = 0  # what is not counted is no answer
    assert list_share(rollout, encoder) == 0.0

    shipped, folder = step3.DeepSpeedPPOTrainer, make_base(tmp_path)
    assert run_step(2, folder, model_name_or_path=folder / "base", output_dir=folder / "critic") == 0
    with watched_lists(encoder) as shares:
        assert run_step(3, folder, actor_model_name_or_path=folder / "base", output_dir=folder / "out", max_steps=3,
                        critic_model_name_or_path=folder / "critic") == 0  # fmt: skip
    assert len(shares) == 3 and all(share in (0, 0.25, 0.5, 0.75, 1) for share in shares)
    assert step3.DeepSpeedPPOTrainer is shipped


def test_two_held_out_votes_say_nothing_about_the_spread_of_scores(tmp_path, wanted):
    folder, votes = make_base(tmp_path), tmp_path / "votes.jsonl"
    cast_votes([scripted("the sky is blue"), scripted("no")], QUESTIONS, 40, votes, seed=1, max_new_tokens=8)
    flags = {"data_path": votes, "data_split": "0,1,0", "model_name_or_path": folder / "base", "max_steps": 1}
    assert run_step(2, folder, **flags, output_dir=folder / "critic") == 0
    stats = json.loads((folder / "critic" / "reward_stats.json").read_text())
    assert (stats["population"], stats["count"]) == ("chosen answers of the training part", 38)


def test_a_program_that_fails_is_named_with_its_last_words(tmp_path):
    def fails(argv):
        raise UserError(f"no such thing as {argv[1]}")

    places = forty_votes.Places(tmp_path, tmp_path, 1)
    with pytest.raises(UserError, match=r"part ended with exit code 2 \(error: no such thing as 7\)"):
        places.run("part", fails, {"number": 7})


def test_the_report_is_a_table_and_a_picture(tmp_path):
    pairs = {"count": 120, "accuracy": 0.9, "accuracy_interval": [0.83, 0.94]}
    model = {"list_share": 0.25, "list_interval": [0.2, 0.3], "count": 300, "mean_tokens": 20, "kl": 0.0}
    report = {
        "seed": 4, "votes": {"asked": 250, "longer": 35}, "reward_model": {"any_pair": pairs, "shorter_list": pairs},
        "before": model, "after": {**model, "list_share": 0.75, "kl": 2.5}, "seconds": {"total": 321},
        "rollouts": {"list_share": [0.25, 0.75], "score": [-1.0, 1.0]},
    }  # fmt: skip
    told = forty_votes.table(report)
    assert "seed 4: 40 votes out of 250 questions" in told and "the list scores higher in 0.900 of 120" in told
    assert "before: lists in 0.250 of 300" in told and "after 20 rollouts: lists in 0.750" in told
    forty_votes.plot(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 4000
    assert forty_votes.list_interval({"list_share": 0.25, "count": 300}) == pytest.approx([0.2044, 0.3019], abs=1e-3)

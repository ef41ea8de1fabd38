"""Who wins: by a reward model, by a rule, and at equal length; known scores give known win rates."""

import json
import math

import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import load_reward_function
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.saving import save_model as save_reward_model
from alpaca_rlhf.evaluation.compare_models import main
from alpaca_rlhf.evaluation.judging import rule_scores, verdict, warn_of_own_judge
from alpaca_rlhf.runtime.run import command
from tests.tiny import PAIRS, save_model, tiny_llama, word_tokenizer, write_jsonl

RULE = """
WORD = "the"
def many(prompts, answers):
    assert all(prompt.startswith("Human") and prompt.endswith("Assistant :") for prompt in prompts)
    return [len(answer.split()) for answer in answers]
def wrong(prompts, answers):
    return [1.0, float("nan")]
def words(prompts, answers):
    return [WORD for answer in answers]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    save_model(folder / "a")
    save_model(folder / "b", tiny_llama(len(word_tokenizer()), seed=1))
    tokenizer = load_tokenizer(str(folder / "a"), notice=print)
    judge = RewardModel.from_causal_lm(str(folder / "b"), tokenizer, seed=3, notice=print)
    save_reward_model(folder / "judge", judge.model, judge.export_state(judge.state_dict()), tokenizer)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in PAIRS])
    (folder / "rule.py").write_text(RULE)
    return folder


def compare(folder, out, *words):
    lengths = ["--prompts", folder / "prompts.jsonl", "--max_prompt_seq_len", 64, "--max_answer_seq_len", 8]
    models = ["--models", folder / "a", folder / "b", "--names", "one", "two"]
    return command(main)([str(word) for word in [*models, *lengths, "--output_dir", out, *words]])


def test_a_judge_and_a_rule_judge_the_same_answers(folder, tmp_path, monkeypatch):
    words = ["--judge", folder / "judge", "--rule", f"{folder / 'rule.py'}:many"]
    assert compare(folder, tmp_path, *words, "--batch_size", 3) == 0
    models = json.loads((tmp_path / "comparison.json").read_text())["models"]
    one, two = (result["answers"] for result in models.values())
    for name in ("judge", "many"):
        wins = [(b["scores"][name] > a["scores"][name]) + 0.5 * (b["scores"][name] == a["scores"][name])
                for a, b in zip(one, two, strict=True)]  # fmt: skip
        judged = models["two"]["judged"][name]
        assert judged["win_rate"] == sum(wins) / 8 and judged["wins"] == wins.count(1.0)
        assert judged["win_rate_interval"][0] < judged["win_rate"] < judged["win_rate_interval"][1]
        assert "win_rate" not in models["one"]["judged"][name]
    assert [answer["scores"]["many"] for answer in two] == [len(answer["text"].split()) for answer in two]
    names = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert names == {"tokens.png", "scores_1.png", "scores_2.png", "wins_1.png", "wins_2.png"}
    page = (tmp_path / "comparison.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and "wins at equal length (judge)" in page
    monkeypatch.setattr(RewardModel, "forward_value", lambda *words: pytest.fail("scored again"))
    assert compare(folder, tmp_path, *words) == 0
    assert json.loads((tmp_path / "comparison.json").read_text())["models"] == models


def test_the_judges_score_is_that_of_prompt_answer_and_end(folder, tmp_path):
    assert compare(folder, tmp_path, "--judge", folder / "judge") == 0
    answers = json.loads((tmp_path / "comparison.json").read_text())["models"]["two"]["answers"]
    tokenizer = load_tokenizer(str(folder / "judge"), notice=print)
    judge = RewardModel.from_pretrained(str(folder / "judge"), tokenizer, notice=print)
    encoder = TextEncoder(tokenizer)
    for pair, answer in zip(PAIRS, answers, strict=True):
        turns = [Turn("user", pair["prompt"].removeprefix("Human: ").removesuffix(" Assistant:"))]
        ids = encoder.prompt_ids(turns) + encoder.answer_ids(turns, answer["text"])
        assert ids[-1] == encoder.eos_id
        row = torch.tensor([ids])
        score = judge.forward_value(row, torch.ones_like(row)).scores.item()
        assert answer["scores"]["judge"] == pytest.approx(score, abs=1e-5)


def test_verdict_by_hand_and_must_fail_with_the_sides_exchanged():
    # three wins, one tie, no length difference: (3.5 + 0.5) / (4 + 1) at equal length
    judged = verdict([1, 1, 1, 0], [0, 0, 0, 0], ["ab"] * 4, ["cd"] * 4)
    assert judged["win_rate"] == 0.875 and (judged["wins"], judged["ties"]) == (3, 1)
    assert judged["length_controlled_win_rate"] == pytest.approx(0.8)
    other = verdict([0, 0, 0, 0], [1, 1, 1, 0], ["cd"] * 4, ["ab"] * 4)
    with pytest.raises(AssertionError):
        assert other["win_rate"] == 0.875
    assert other["win_rate"] == 0.125


def test_a_win_by_length_alone_is_no_win_at_equal_length():
    longer, shorter = ["word " * 9] * 50, ["word"] * 50
    wins, losses = [1.0] * 100, [0.0] * 100
    judged = verdict(wins[:50] + losses[:50], losses[:50] + wins[:50], longer + shorter, shorter + longer)
    assert judged["win_rate"] == 0.5 and judged["length_controlled_win_rate"] == pytest.approx(0.5)
    assert judged["length_effect"] > 3


def test_a_rule_that_returns_something_else_is_told_so(folder):
    place = str(folder / "rule.py")
    assert rule_scores(load_reward_function(f"{place}:many"), "many", ["Human : x Assistant :"], ["a b"]) == [2.0]
    for name, part in (("wrong", "2 numbers, 1 of them finite"), ("words", "are no numbers .list.")):
        with pytest.raises(UserError, match=part):
            rule_scores(load_reward_function(f"{place}:{name}"), name, ["p", "p"], ["a", "b"])
    with pytest.raises(UserError, match="defines no nothing"):
        load_reward_function(f"{place}:nothing")


def test_a_judge_that_was_trained_against_is_named(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "training_arguments.json").write_text(json.dumps({"critic": {"path": str(tmp_path / "rm")}}))
    said = []
    warn_of_own_judge(str(tmp_path / "other"), {"ppo": str(tmp_path / "actor"), "hub": "some/name"}, said.append)
    assert said == []
    warn_of_own_judge(str(tmp_path / "." / "rm"), {"ppo": str(tmp_path / "actor")}, said.append)
    assert len(said) == 1 and "ppo was trained against" in said[0]


def test_a_judge_without_finite_scores_is_refused(folder, tmp_path, monkeypatch, capsys):
    real = RewardModel.forward_value

    def broken(self, *words):
        output = real(self, *words)
        return output._replace(scores=output.scores * math.nan)

    monkeypatch.setattr(RewardModel, "forward_value", broken)
    assert compare(folder, tmp_path, "--judge", folder / "judge") == 2
    assert "not finite" in capsys.readouterr().err

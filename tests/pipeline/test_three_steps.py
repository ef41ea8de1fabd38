"""The whole main job on tiny models: what each step leaves behind, and that the next one needs nothing else."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.pipeline.steps import make_base, metrics, run_step, three_steps, trained
from tests.tiny import word_tokenizer


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return three_steps(tmp_path_factory.mktemp("steps"))


def test_every_output_is_complete(done):
    for name in ("actor", "critic", "final/actor", "final/critic"):
        files = {path.name for path in (done / name).iterdir()}
        wanted = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
        assert wanted | {"training_arguments.json"} <= files, (name, files)
        assert AutoTokenizer.from_pretrained(done / name).chat_template
        assert json.loads((done / name / "training_arguments.json").read_text())["output"]["seed"] == 1234


@pytest.mark.parametrize("name", ["actor", "final/actor"])
def test_C06_an_actor_is_a_plain_causal_model(done, name):
    _, info = AutoModelForCausalLM.from_pretrained(done / name, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert (done / name / "generation_config.json").is_file()


def test_the_reward_model_gives_transformers_the_same_scores(done):
    from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel

    tokenizer = AutoTokenizer.from_pretrained(done / "critic")
    ids = torch.tensor([[1, 4, 5, 7, 8, 9, 2], [1, 4, 5, 7, 2, 0, 0]])
    mask = (ids != tokenizer.pad_token_id).long()
    theirs = AutoModelForSequenceClassification.from_pretrained(done / "critic")(ids, attention_mask=mask).logits[:, 0]
    ours = RewardModel.from_pretrained(str(done / "critic"), tokenizer, notice=print).forward_value(ids, mask).scores
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_sft_and_reward_model_learn(done):
    sft = [record["eval_perplexity"] for record in metrics(done / "actor") if "eval_perplexity" in record]
    assert sft[-1] < 0.5 * sft[0]
    pairs = [record for record in metrics(done / "critic") if "eval_accuracy" in record]
    assert pairs[-1]["eval_accuracy"] > pairs[0]["eval_accuracy"] or pairs[-1]["eval_accuracy"] == 1.0
    assert pairs[-1]["eval_count"] == 8  # M-04: exactly the evaluation part


def test_P12_the_ppo_log_holds_what_a_person_needs(done):
    names = ("score", "normalized_score", "kl", "kl_coef", "length", "ended_share", "empty_share", "entropy",
             "distinct_2", "distinct_token_share", "padding_share", "clip_share", "explained_variance",
             "actor_loss", "critic_loss", "clipped_score_share",
             "actor_grad_norm", "critic_grad_norm", "first_ratio_deviation")  # fmt: skip
    for record in metrics(done / "final"):
        for name in names:
            assert math.isfinite(record[name]), (name, record)


def test_M06_steps_rise_strictly(done):
    assert [record["step"] for record in metrics(done / "actor")] == list(range(4))  # 24 records, batch 8
    assert [record["step"] for record in metrics(done / "final")] == [2, 4]  # 2 rollouts of 4, minibatch 2


def test_A08_B44_ppo_starts_from_where_it_should(done):
    first = metrics(done / "final")[0]
    assert first["kl"] == pytest.approx(0, abs=1e-4)
    assert first["first_ratio_deviation"] < 1e-5
    assert first["score"] != first["normalized_score"]


def test_T07_each_output_is_loaded_from_itself_alone(done, tmp_path):
    make_base(tmp_path)
    shutil.copytree(done / "actor", tmp_path / "moved")  # the base it came from is elsewhere
    code = run_step(2, tmp_path, model_name_or_path=tmp_path / "moved", output_dir=tmp_path / "rm", max_steps=1)
    assert code == 0 and (tmp_path / "rm" / "reward_stats.json").is_file()


def test_T08_the_tokenizer_is_saved_as_it_was(done):
    text = "name a colour blue"
    original = word_tokenizer()(text)["input_ids"]
    for name in ("actor", "critic", "final/actor"):
        assert AutoTokenizer.from_pretrained(done / name)(text)["input_ids"] == original


def test_curves_are_pictures(done):
    for name, curve in (("actor", "loss"), ("critic", "eval_acc"), ("final", "train_actor_loss")):
        pictures = {path.stem: path for path in (done / name).rglob("*.png")}
        assert pictures[curve].read_bytes().startswith(b"\x89PNG"), pictures


def test_two_runs_with_one_seed_are_equal_and_another_seed_is_not(done, tmp_path):
    make_base(tmp_path)
    for name, seed in (("again", 1234), ("other", 1235)):
        assert run_step(3, tmp_path, **trained(done), output_dir=tmp_path / name, seed=seed) == 0

    def figures(folder):
        return [{k: v for k, v in r.items() if k != "time" and "seconds" not in k} for r in metrics(folder)]

    assert figures(tmp_path / "again") == figures(done / "final") != figures(tmp_path / "other")

"""Step 3 when something is wrong or at an edge: the faults of section 5 that a whole run can have."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import roles
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.minibatches import minibatches, plan
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer
from tests.pipeline.steps import metrics, run_step, three_steps, trained
from tests.tiny import save_model, tiny_llama


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return three_steps(tmp_path_factory.mktemp("steps"))


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def experiences(monkeypatch):
    """Every rollout that the trainer makes."""
    seen, original = [], DeepSpeedPPOTrainer.generate_experience

    def spy(self, *args):
        rollout = original(self, *args)
        seen.append(rollout.experience)
        return rollout

    monkeypatch.setattr(DeepSpeedPPOTrainer, "generate_experience", spy)
    return seen


def test_P02_temperature_and_filters_leave_the_first_ratio_at_one(done, tmp_path):
    flags = {"temperature": 0.5, "top_p": 0.9, "output_dir": tmp_path / "out", "max_steps": 1}
    assert run_step(3, done, **trained(done), **flags) == 0
    assert metrics(tmp_path / "out")[0]["first_ratio_deviation"] < 1e-5
    assert metrics(tmp_path / "out")[0]["kl"] == pytest.approx(0, abs=1e-4)


def test_R05_P15_saved_normalisation_undoes_offset_and_scale(done, tmp_path, experiences):
    assert run_step(3, done, **trained(done), max_steps=1, output_dir=tmp_path / "plain") == 0
    moved = tmp_path / "moved"
    _copy_with_head(done / "critic", moved, scale=20.0)
    flags = {"actor_model_name_or_path": done / "actor", "critic_model_name_or_path": moved, "max_steps": 1}
    assert run_step(3, done, **flags, output_dir=tmp_path / "scaled") == 0
    first, second = experiences
    torch.testing.assert_close(second.scores, 20 * first.scores)
    torch.testing.assert_close(second.advantages, first.advantages, atol=1e-4, rtol=1e-4)  # of float32 scores × 20
    losses = [metrics(tmp_path / name)[0]["critic_loss"] for name in ("plain", "scaled")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def _copy_with_head(source, target, scale):
    """A reward model whose scores are ``scale`` times those of ``source``, with statistics measured on them."""
    import shutil

    from alpaca_rlhf.algorithms.rewards import RewardStats
    from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import read_reward_stats, write_reward_stats

    shutil.copytree(source, target)
    model = AutoModelForSequenceClassification.from_pretrained(source)
    with torch.no_grad():
        model.score.weight.mul_(scale)
    model.save_pretrained(target)
    stats = read_reward_stats(source)
    write_reward_stats(target, RewardStats(stats.mean * scale, stats.std * scale, stats.count), "test")


def test_R05_without_normalisation_a_large_scale_is_seen_in_the_log(done, tmp_path):
    _copy_with_head(done / "critic", tmp_path / "huge", scale=1e4)
    flags = {"actor_model_name_or_path": done / "actor", "critic_model_name_or_path": tmp_path / "huge"}
    assert run_step(3, done, **flags, reward_normalization="off", max_steps=1, output_dir=tmp_path / "out") == 0
    assert metrics(tmp_path / "out")[0]["clipped_score_share"] == 1.0


def test_R05_statistics_of_other_weights_are_refused(done, tmp_path, capsys):
    import shutil

    shutil.copytree(done / "critic", tmp_path / "critic")
    AutoModelForSequenceClassification.from_pretrained(done / "final" / "critic").save_pretrained(tmp_path / "critic")
    flags = {"actor_model_name_or_path": done / "actor", "critic_model_name_or_path": tmp_path / "critic"}
    assert run_step(3, done, **flags) == 2
    assert "other weights" in capsys.readouterr().err


def test_R05_scores_that_do_not_vary_cannot_be_normalised(done, tmp_path, capsys):
    import shutil

    shutil.copytree(done / "critic", tmp_path / "critic")
    stats = json.loads((tmp_path / "critic" / "reward_stats.json").read_text())
    (tmp_path / "critic" / "reward_stats.json").write_text(json.dumps({**stats, "std": 0.0}))
    flags = {"actor_model_name_or_path": done / "actor", "critic_model_name_or_path": tmp_path / "critic"}
    assert run_step(3, done, **flags) == 2
    assert "do not vary" in capsys.readouterr().err


def test_P17_a_horizon_shorter_than_a_rollout_is_refused(done, capsys):
    flags = {"kl_target": 6, "kl_horizon": 1, "per_device_train_batch_size": 8}
    assert run_step(3, done, **trained(done), **flags) == 2
    assert "--kl_horizon 1" in capsys.readouterr().err


@pytest.fixture
def always_eos(done, tmp_path):
    """An actor that ends its answer at once, whatever the prompt."""
    import shutil

    shutil.copytree(done / "actor", tmp_path / "eos")
    model = tiny_llama(57)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[2] = 0
        for layer in model.model.layers:  # the last hidden state is then the norm of the embedding: all ones below
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight[2] = 10.0
    model.save_pretrained(tmp_path / "eos")
    return tmp_path / "eos"


def test_P11_P07_an_answer_that_is_only_eos_is_a_legal_row(done, tmp_path, always_eos, experiences):
    flags = {"actor_model_name_or_path": always_eos, "critic_model_name_or_path": done / "critic"}
    assert run_step(3, done, **flags, output_dir=tmp_path / "out", max_steps=1, kl_coef=0) == 0
    record = metrics(tmp_path / "out")[0]
    assert (record["answers"], record["length"], record["empty_share"]) == (4, 1, 1)
    assert experiences[0].rewards.shape == (4, 1) and bool((experiences[0].rewards != 0).all())


def test_P10_truncated_answers_keep_their_tokens_and_pay_the_penalty(done, tmp_path, experiences):
    model = AutoModelForCausalLM.from_pretrained(done / "actor")
    with torch.no_grad():  # EOS is never likely
        model.lm_head.weight[2] = -20 * model.lm_head.weight.mean(0).sign()
    flags = {"critic_model_name_or_path": done / "critic", "max_steps": 1, "max_answer_seq_len": 4, "kl_coef": 0}
    for name, penalty in (("free", None), ("paid", 1.0)):
        given = {"missing_eos_penalty": penalty, "actor_model_name_or_path": done / "actor"}
        assert run_step(3, done, **flags, **given, output_dir=tmp_path / name) == 0
    free, paid = experiences
    assert torch.equal(free.sequences, paid.sequences)
    ended = (free.responses == 2).any(1)
    assert not ended.all()
    difference = (free.rewards - paid.rewards).sum(1)
    torch.testing.assert_close(difference, (~ended).float())


def test_P14_one_bad_score_skips_the_rollout_and_the_run_goes_on(done, tmp_path, monkeypatch, capsys):
    original, calls = roles.Reward.score, []

    def broken(self, *args):
        calls.append(1)
        scores = original(self, *args)
        return torch.full_like(scores, float("nan")) if len(calls) == 2 else scores

    monkeypatch.setattr(roles.Reward, "score", broken)
    assert run_step(3, done, **trained(done), output_dir=tmp_path / "out", max_steps=3) == 0
    assert "4 of 4 scores of rollout 2 were not finite" in capsys.readouterr().out
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "out" / "actor").values())
    assert [record["step"] for record in metrics(tmp_path / "out")] == [2, 4, 6]


def test_P14_bad_scores_without_end_stop_the_run_and_keep_the_last_good_model(done, tmp_path, monkeypatch, capsys):
    flags = {"max_steps": 1, "lr_scheduler_type": "constant"}
    assert run_step(3, done, **trained(done), output_dir=tmp_path / "one", **flags) == 0
    original, calls = roles.Reward.score, []

    def broken(self, *args):
        calls.append(1)
        return original(self, *args) * (1.0 if len(calls) == 1 else float("nan"))

    monkeypatch.setattr(roles.Reward, "score", broken)
    flags = {"max_steps": 3, "lr_scheduler_type": "constant", "max_skipped_steps": 1}
    assert run_step(3, done, **trained(done), output_dir=tmp_path / "bad", **flags) == 2
    assert "not finite" in capsys.readouterr().err
    assert equal(weights(tmp_path / "bad" / "actor"), weights(tmp_path / "one" / "actor"))


def test_Z07_an_infinite_actor_gradient_skips_the_critic_too(done, tmp_path, monkeypatch):
    original = roles.Actor.accumulate

    def broken(self, rows, **kwargs):
        original(self, dataclasses.replace(rows, advantages=rows.advantages * float("inf")), **kwargs)

    monkeypatch.setattr(roles.Actor, "accumulate", broken)
    flags = {"reward_normalization": "off", "max_steps": 1}
    assert run_step(3, done, **trained(done), output_dir=tmp_path / "out", **flags) == 0
    record = metrics(tmp_path / "out")[0]
    assert record["actor_skipped"] == record["critic_skipped"] == 1.0
    before = AutoModelForSequenceClassification.from_pretrained(done / "critic").state_dict()
    after = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "critic").state_dict()
    assert equal(before, after)


def test_P16_each_epoch_is_another_permutation_of_the_rows(done, tmp_path, experiences):
    args = _arguments(done, ppo_epochs=2)
    assert run_step(3, done, **trained(done), max_steps=1) == 0
    run = type("Run", (), {"rank": 0, "world_size": 1})()
    seen = []
    for epoch in range(2):
        rows = [row for step in minibatches(args, run, experiences[0], epoch) for part in step for row in part.scores]
        assert sorted(rows) == sorted(experiences[0].scores)
        seen.append([float(row) for row in rows])
    assert seen[0] != seen[1]


def _arguments(done, **flags):
    from alpaca_rlhf.arguments.deepspeed_chat import parse_step3

    given = {"data_path": done, **trained(done), "per_device_mini_train_batch_size": 1, **flags}
    return parse_step3([word for name, value in given.items() for word in (f"--{name}", str(value))])


def test_P22_three_prompts_and_a_rollout_of_eight(done, tmp_path):
    flags = {"per_device_train_batch_size": 8, "per_device_mini_train_batch_size": 2, "max_samples": 3}
    assert run_step(3, done, **trained(done), **flags, output_dir=tmp_path / "out") == 0
    (record,) = metrics(tmp_path / "out")
    assert record["answers"] == 3 and record["step"] == 2


def test_P22_the_printed_plan_counts_every_prompt(done):
    args = _arguments(done, per_device_train_batch_size=5, num_train_epochs=2, ppo_epochs=2)
    assert plan(args, prompts=12, world_size=1) == (6, 2 * 2 * 12)  # 5 + 5 + 2 prompts, twice; minibatches of one


def test_P18_a_penalty_of_zero_is_no_penalty(done, tmp_path, experiences):
    assert run_step(3, done, **trained(done), output_dir=tmp_path / "out", kl_coef=0, max_steps=2) == 0
    for rollout in experiences:
        assert bool(((rollout.rewards != 0).sum(1) == 1).all())


@pytest.mark.parametrize("decay,source", [(0, "actor"), (1, "start")])
def test_P25_the_moving_average(done, tmp_path, decay, source):
    flags = {"enable_ema": True, "ema_decay": decay}
    assert run_step(3, done, **trained(done), **flags, output_dir=tmp_path / "out") == 0
    expected = weights(tmp_path / "out" / "actor") if source == "actor" else weights(done / "actor")
    average = weights(tmp_path / "out" / "actor_ema")
    for name in expected:
        torch.testing.assert_close(average[name], expected[name])
    assert not equal(weights(tmp_path / "out" / "actor"), weights(done / "actor"))


def test_plain_text_beside_ppo_changes_the_actor_and_not_the_critic(done, tmp_path):
    from tests.tiny import write_jsonl

    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "the sun is big and the sky is blue ."}] * 6)
    for name, given in (("without", {}), ("with", {"unsupervised_dataset_name": texts, "unsup_coef": 1.0})):
        assert run_step(3, done, **trained(done), **given, max_steps=1, output_dir=tmp_path / name) == 0
    assert metrics(tmp_path / "with")[0]["unsupervised_loss"] > 0
    assert not equal(weights(tmp_path / "with" / "actor"), weights(tmp_path / "without" / "actor"))
    critics = [AutoModelForSequenceClassification.from_pretrained(tmp_path / n / "critic") for n in ("with", "without")]
    assert equal(critics[0].state_dict(), critics[1].state_dict())


def test_L06_Z04_with_lora_only_the_reference_is_the_actor_without_adapters(done, tmp_path, capsys):
    names = ("actor", "critic")
    lora = {f"{name}_lora_dim": 2 for name in names} | {f"{name}_lora_module_name": "q_proj,v_proj" for name in names}
    flags = {**lora, "only_optimize_lora": True, "save_adapter": True, "output_dir": tmp_path / "out"}
    assert run_step(3, done, **trained(done), **flags) == 0
    records = metrics(tmp_path / "out")
    assert records[0]["kl"] == 0 and records[0]["first_ratio_deviation"] < 1e-5
    assert records[1]["kl_k3"] > 0
    before, after = weights(done / "actor"), weights(tmp_path / "out" / "actor")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj"}
    assert (tmp_path / "out" / "actor" / "adapter" / "adapter_config.json").is_file()
    assert json.loads((tmp_path / "out" / "critic" / "config.json").read_text())["score_offset"] != 0


def test_shared_and_separate_frozen_roles_agree(done, tmp_path, experiences, monkeypatch):
    from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.rlhf_engine import RLHFEngine

    names = ("actor", "critic")
    lora = {f"{name}_lora_dim": 2 for name in names} | {"only_optimize_lora": True}
    assert run_step(3, done, **trained(done), **lora, max_steps=2) == 0
    monkeypatch.setattr(RLHFEngine, "_shares", lambda self, model: False)
    assert run_step(3, done, **trained(done), **lora, max_steps=2) == 0
    for shared, separate in zip(experiences[:2], experiences[2:], strict=True):
        for field in ("sequences", "ref_log_probs", "scores", "values", "advantages"):
            torch.testing.assert_close(getattr(shared, field), getattr(separate, field))


def test_T09_another_tokenizer_is_refused(done, tmp_path, capsys):
    from tests.tiny import sentencepiece_tokenizer

    tokenizer = sentencepiece_tokenizer(tmp_path / "sp")
    save_model(tmp_path / "other", tiny_llama(len(tokenizer)), tokenizer)
    flags = {"actor_model_name_or_path": tmp_path / "other", "critic_model_name_or_path": done / "critic"}
    assert run_step(3, done, **flags, reward_normalization="off") == 2
    error = capsys.readouterr().err
    assert "tokenizer" in error and str(done / "critic") in error and str(tmp_path / "other") in error

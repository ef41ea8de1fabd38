"""Step 3's records, order and figures, held against the definitions; every setting does something."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.algorithms.kl import AdaptiveKLController, kl_estimate
from alpaca_rlhf.algorithms.losses import PolicyLoss, ValueLoss
from alpaca_rlhf.algorithms.masking import masked_sum
from alpaca_rlhf.algorithms.rewards import RewardStats, last_action_mask
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import roles
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import read_reward_stats, write_reward_stats
from alpaca_rlhf.runtime.run import Run
from tests.pipeline.steps import make_base, run_step
from tests.tiny import save_model, tiny_gpt2, tiny_llama, write_jsonl

EOS = 2


class Watched:
    """What one run of step 3 made: its rollouts with their figures, and the figures of their training."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rollouts, self.figures, self.trained = [], [], []
        generate, train = DeepSpeedPPOTrainer.generate_experience, DeepSpeedPPOTrainer.train_rlhf

        def generating(trainer, *words):
            made = generate(trainer, *words)
            self.rollouts.append(made.experience)
            self.figures.append(made.figures)
            return made

        def training(trainer, *words):
            self.trained.append(train(trainer, *words))
            return self.trained[-1]

        patch.setattr(DeepSpeedPPOTrainer, "generate_experience", generating)
        patch.setattr(DeepSpeedPPOTrainer, "train_rlhf", training)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("records"))
    flags = {"model_name_or_path": folder / "base", "output_dir": folder / "critic", "max_steps": 2}
    assert run_step(2, folder, **flags) == 0
    return folder


def ppo(folder, **flags) -> int:
    models = {"actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "critic"}
    return run_step(3, folder, **{**models, **flags})


@pytest.fixture(scope="module")
def adaptive(done):
    """Three rollouts with an adaptive penalty on the k3 estimate, two epochs, minibatches of one row."""
    order, fed = [], []
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        accumulate, update = roles.Actor.accumulate, AdaptiveKLController.update

        def accumulating(actor, rows, **more):
            order.append((len(watched.rollouts), rows.scores.tolist(), rows.old_log_probs.sum().item()))
            return accumulate(actor, rows, **more)

        def updating(controller, kl, answers):
            fed.append((kl, answers))
            return update(controller, kl, answers)

        patch.setattr(roles.Actor, "accumulate", accumulating)
        patch.setattr(AdaptiveKLController, "update", updating)
        flags = {"kl_estimator": "k3", "kl_target": 0.5, "kl_horizon": 100, "ppo_epochs": 2, "max_steps": 3}
        assert ppo(done, **flags, per_device_mini_train_batch_size=1) == 0
    return watched, order, fed


def test_P06_the_logged_kl_is_the_one_that_is_used(adaptive):
    watched, _, _ = adaptive
    assert watched.figures[0]["kl"] == 0 < watched.figures[1]["kl"]
    for rollout, figures in zip(watched.rollouts, watched.figures, strict=True):
        kl = kl_estimate(rollout.old_log_probs, rollout.ref_log_probs, "k3")
        assert figures["kl"] == pytest.approx(float(masked_sum(kl, rollout.response_mask)) / 4)
        before_the_end = (rollout.response_mask - last_action_mask(rollout.response_mask)).bool()
        penalties = -figures["kl_coef"] * kl
        torch.testing.assert_close(rollout.rewards[before_the_end], penalties[before_the_end])


def test_P17_the_controller_is_fed_once_a_rollout_with_the_kl_of_an_answer(adaptive):
    watched, _, fed = adaptive
    assert fed == [(figures["kl"], 4) for figures in watched.figures]
    coefficient = 0.05
    for figures in watched.figures:  # what a rollout used was moved by the one before it
        assert figures["kl_coef"] == pytest.approx(coefficient)
        coefficient *= 1 + max(-0.2, min(0.2, figures["kl"] / 0.5 - 1)) * 4 / 100


def test_P16_epochs_outside_minibatches_inside_and_what_was_recorded_stays(adaptive):
    watched, order, _ = adaptive
    for number, rollout in enumerate(watched.rollouts, start=1):
        steps = [(scores[0], old) for rollout_number, scores, old in order if rollout_number == number]
        assert len(steps) == 8
        epochs = [[score for score, _ in steps[start : start + 4]] for start in (0, 4)]
        assert all(sorted(epoch) == sorted(rollout.scores.tolist()) for epoch in epochs)
        sums = masked_sum(rollout.old_log_probs, rollout.response_mask, dim=1).tolist()
        recorded = dict(zip(rollout.scores.tolist(), sums, strict=True))
        assert all(old == pytest.approx(recorded[score], abs=1e-5) for score, old in steps)
    orders = [tuple(scores[0] for _, scores, _ in order[start : start + 4]) for start in (0, 4, 8, 12)]
    assert orders[0] != orders[1] and orders[2] != orders[3]


def test_P18_scores_of_zero_are_scores(done, watched, monkeypatch):
    monkeypatch.setattr(roles.Reward, "score", lambda self, sequences, finished: torch.zeros(len(sequences.ids)))
    assert ppo(done, reward_normalization="off", kl_coef=0, max_steps=1) == 0
    (figures,) = watched.figures
    assert figures["score"] == figures["normalized_score"] == figures["reward"] == 0.0
    assert not watched.rollouts[0].rewards.any()


def test_M01_the_losses_of_actor_and_critic_are_told_apart(done, watched, monkeypatch):
    """Fixed losses of 1 and 3 a token over four minibatches."""

    def actor(log_probs, old, advantages, mask, clip):
        zero = torch.zeros(())
        return PolicyLoss(1.0 * mask.sum() + 0 * log_probs.sum(), zero, zero, zero)

    def critic(values, old, returns, mask, clip):
        return ValueLoss(3.0 * mask.sum() + 0 * values.sum(), torch.zeros(()))

    monkeypatch.setattr(roles, "policy_loss_sum", actor)
    monkeypatch.setattr(roles, "value_loss_sum", critic)
    assert ppo(done, per_device_mini_train_batch_size=1, max_steps=1) == 0
    assert (watched.trained[0]["actor_loss"], watched.trained[0]["critic_loss"]) == (1.0, 3.0)


SETTINGS = [
    {"kl_coef": 1.0}, {"kl_estimator": "k2"}, {"kl_target": 0.1, "kl_horizon": 10}, {"clip_ratio": 1e-3},
    {"clip_value": 1e-3}, {"clip_reward": 0.1}, {"gamma": 0.5}, {"lam": 0.1}, {"no_whiten_advantages": True},
    {"reward_normalization": "running"}, {"missing_eos_penalty": 2.0}, {"temperature": 0.5}, {"top_p": 0.5},
    {"top_k": 2}, {"ppo_epochs": 1},
]  # fmt: skip


def outcome(watched) -> list[float]:
    """Figures that some setting of the algorithm must move."""
    names = ("reward", "actor_loss", "critic_loss", "length", "entropy", "kl_coef", "clip_share", "normalized_score")
    records = [figures | trained for figures, trained in zip(watched.figures, watched.trained, strict=True)]
    return [record[name] for record in records for name in names]


def test_P24_every_setting_of_the_algorithm_changes_the_run_and_is_saved(done, tmp_path):
    results = []
    for flags in ({}, {}, *SETTINGS):
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch)
            assert ppo(done, **{"ppo_epochs": 2, "max_steps": 2, **flags}) == 0
        results.append(outcome(watched))
    first, again, *changed = results
    assert first == again
    for flags, result in zip(SETTINGS, changed, strict=True):
        assert result != pytest.approx(first, rel=1e-6, abs=1e-9), f"{flags} does nothing"
    together = {"kl_coef": 0.3, "kl_estimator": "k2", "gamma": 0.5, "lam": 0.1, "temperature": 0.5, "top_k": 2}
    together |= {"clip_ratio": 0.3, "clip_value": 0.4, "clip_reward": 2, "top_p": 0.5, "missing_eos_penalty": 2}
    assert ppo(done, **together, max_steps=1, output_dir=tmp_path) == 0
    saved = json.loads((tmp_path / "actor" / "training_arguments.json").read_text())
    assert {name: {**saved["ppo"], **saved["rollout"]}[name] for name in together} == together


def moved_critic(done, folder, offset: float):
    """The reward model with ``offset`` added to every score, and statistics measured on such scores."""
    shutil.copytree(done / "critic", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "score_offset": offset}))
    stats = read_reward_stats(done / "critic")
    write_reward_stats(folder, RewardStats(stats.mean + offset, stats.std, stats.count), "test")
    return folder


def test_R05_an_offset_of_the_scores_is_undone_by_their_statistics_and_seen_without_them(done, tmp_path, watched):
    moved = moved_critic(done, tmp_path / "moved", 50.0)
    assert ppo(done, max_steps=1) == 0
    assert ppo(done, critic_model_name_or_path=moved, max_steps=1) == 0
    plain, shifted = watched.rollouts
    torch.testing.assert_close(shifted.scores, plain.scores + 50)
    for field in ("advantages", "returns", "values"):  # float32 keeps scores near 50 to 4e-6, and divides by the std
        torch.testing.assert_close(getattr(shifted, field), getattr(plain, field), atol=1e-3, rtol=1e-3)
    assert ppo(done, critic_model_name_or_path=moved, reward_normalization="off", max_steps=1) == 0
    assert [figures["clipped_score_share"] for figures in watched.figures] == [0, 0, 1]


def never_ending(folder):
    """A copy of the base model whose EOS has no chance."""
    model = tiny_llama(57)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.5)  # hidden states then agree in sign with this direction
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight[EOS] = -60 * model.model.embed_tokens.weight.mean(0).sign()
    return save_model(folder, model)


def test_P10_an_end_token_in_the_prompt_does_not_hide_that_the_answer_has_none(done, tmp_path, watched):
    history = "Human: name a cat Assistant: yes Human: why Assistant:"
    data = write_jsonl(tmp_path / "d.jsonl", [{"prompt": history.replace("cat", word)} for word in ("cat", "dog")] * 2)
    flags = {"actor_model_name_or_path": never_ending(tmp_path / "actor"), "data_path": data, "max_answer_seq_len": 4}
    flags |= {"data_split": "0,0,1", "kl_coef": 0, "max_steps": 1}
    assert ppo(done, **flags) == 0
    assert ppo(done, **flags, missing_eos_penalty=1.0) == 0
    free, paid = watched.rollouts
    assert (free.sequences[:, : free.prompt_length] == EOS).any(1).all()
    assert watched.figures[0]["ended_share"] == 0 and watched.figures[0]["length"] == 4
    torch.testing.assert_close(free.rewards - paid.rewards, torch.tensor([[0.0, 0, 0, 1]] * 4))


def test_P11_Z02_a_rank_whose_answers_end_at_once_takes_part_like_the_others(done, watched, monkeypatch):
    """The other rank's part of the rollout has narrower prompts and answers of one token; nothing is dropped."""
    gather = Run.gather

    def with_another_rank(run, part):
        if not isinstance(part, Experience):
            return gather(run, part)
        width = part.prompt_length
        mask = torch.zeros_like(part.response_mask)
        mask[:, 0] = 1
        attention = torch.cat([part.attention_mask[:, :width], mask], 1)
        return [part, replace(part, response_mask=mask, attention_mask=attention).trim()]

    monkeypatch.setattr(Run, "gather", with_another_rank)
    assert ppo(done, max_steps=1, kl_coef=0) == 0
    (rollout,) = watched.rollouts
    assert len(rollout) == 8 and watched.figures[0]["answers"] == 8
    assert rollout.response_mask[4:].sum(1).tolist() == [1] * 4 and bool((rollout.response_mask[:4].sum(1) > 1).any())
    assert bool((rollout.rewards[4:, 0] != 0).all()) and not rollout.rewards[4:, 1:].any()
    assert rollout.advantages.isfinite().all() and watched.trained[0]["actor_skipped"] == 0


def test_P21_a_reward_model_with_too_few_positions_is_refused_too(done, tmp_path, capsys):
    save_model(tmp_path / "short", tiny_gpt2(57, positions=32))
    flags = {"model_name_or_path": tmp_path / "short", "output_dir": tmp_path / "critic", "max_steps": 1}
    assert run_step(2, done, **flags, max_seq_len=32) == 0
    capsys.readouterr()
    flags = {"critic_model_name_or_path": tmp_path / "critic", "max_prompt_seq_len": 24, "max_answer_seq_len": 16}
    assert ppo(done, **flags) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in (str(tmp_path / "critic"), "32 positions", "24 prompt + 16 answer", "40"))

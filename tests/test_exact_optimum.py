"""The task of benchmarks/exact_optimum.py: its closed form, and that the shipped PPO moves towards it."""

import pytest
import torch

from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import ppo_trainer
from benchmarks.enumeration import AnswerTree, Problem
from benchmarks.exact_optimum import COPIES, PROMPTS, SETTINGS, make_reference, one_run, write

TREE = AnswerTree([[3], [4, 5]], tokens=4, eos_id=1, pad_id=0, limit=3)


def random_log_probs(seed: int) -> torch.Tensor:
    """A policy by its next-token logits at every node: (Q, N, R)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, len(TREE.node), 4, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits[:, TREE.before, :].gather(-1, TREE.ids.expand(2, -1, -1)[..., None])[..., 0] * TREE.mask


def problem() -> Problem:
    scores = torch.randn(2, len(TREE.answers), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return Problem(TREE, random_log_probs(0), scores, beta=0.3)


def test_all_answers_are_enumerated():
    assert len(TREE.answers) == 1 + 3 + 9 + 27 and len(set(TREE.answers)) == 40
    torch.testing.assert_close(random_log_probs(1).sum(-1).exp().sum(-1), torch.ones(2, dtype=torch.float64))


def test_the_closed_form_is_the_objective_of_its_policy_and_no_policy_is_better():
    task = problem()
    whole = torch.zeros(2, len(TREE.answers), 3, dtype=torch.float64)
    whole[..., 0] = task.optimal_log_probs()  # only the sum over the tokens counts
    assert task.objective(whole) == pytest.approx(task.optimum(), abs=1e-12)
    assert all(task.objective(random_log_probs(seed)) < task.optimum() for seed in range(20))
    nearly = (task.optimal_log_probs() * 1.01).log_softmax(-1)
    assert task.optimum() - 1e-3 < task.objective(torch.stack([nearly, nearly * 0, nearly * 0], -1)) < task.optimum()


def test_a_numeric_maximum_agrees():
    task = problem()
    logits = task.ref_log_probs.sum(-1).clone().requires_grad_()
    adam = torch.optim.Adam([logits], lr=0.05)
    for _ in range(1500):
        log_probs = logits.log_softmax(-1)
        gain = task.scores - task.beta * (log_probs - task.ref_log_probs.sum(-1))
        adam.zero_grad()
        (-(log_probs.exp() * gain).sum(-1).mean()).backward()
        adam.step()
    assert float((log_probs.exp() * gain).sum(-1).mean().detach()) == pytest.approx(task.optimum(), abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("optimum")
    make_reference(place)
    for part, copies in (("train", COPIES), ("test", 1)):
        write(place / "prompts" / f"{part}.jsonl", [{"prompt": prompt} for prompt in PROMPTS for _ in range(copies)])
    return place


def test_ppo_closes_the_gap_and_its_log_agrees_with_the_enumeration(folder):
    run = one_run(folder, seed=1, samples=2560, settings=SETTINGS)
    assert run["samples"] == 2560 and 0.6 < run["gap_closed"] < 1  # 0.8 where this was measured
    assert all(rms < 2.5 for rms in run["standard_scores_rms"].values())  # of 9 samples; 1 is expected


def test_must_fail_with_the_sign_of_the_penalty_flipped(folder, monkeypatch):
    shipped = ppo_trainer.shape_rewards
    monkeypatch.setattr(ppo_trainer, "shape_rewards", lambda s, kl, mask, coef: shipped(s, kl, mask, -coef))
    run = one_run(folder, seed=1, samples=2560, settings=SETTINGS)
    assert run["gap_closed"] < 0.4


def test_must_fail_with_the_score_one_action_early(folder, monkeypatch):
    shipped = ppo_trainer.shape_rewards

    def early(scores, kl, mask, coef):
        shifted = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
        return shipped(scores, kl * mask, shifted, coef)

    monkeypatch.setattr(ppo_trainer, "shape_rewards", early)
    run = one_run(folder, seed=1, samples=2560, settings=SETTINGS)
    assert run["standard_scores_rms"]["return"] > 2.5

"""How an optimizer step or a rollout is cut changes nothing: 8 records at once, 4 times 2, 8 times 1."""

import pytest

from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main as step1
from alpaca_rlhf.engines.stepping import StepOutcome, optimizer_step
from tests.equivalence.comparison import TOLERANCE, assert_equal_runs, largest_difference
from tests.equivalence.runs import LORA, LORA3, TEXTS, Runs

CUTS = [(2, 4), (1, 8)]
RUNNING = {"reward_normalization": "running", "kl_target": 0.5, "kl_horizon": 100}


def cut(step: int, micro: int, accumulation: int) -> dict[str, object]:
    name = "per_device_train_batch_size" if step < 3 else "per_device_mini_train_batch_size"
    return {name: micro, "gradient_accumulation_steps": accumulation}


@pytest.mark.parametrize("micro,accumulation", CUTS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_optimizer_step(runs: Runs, step, kind, micro, accumulation):
    row = f"step {step}, {kind}, {micro}x{accumulation} against 8x1"
    assert_equal_runs(row, runs.run(step, kind), runs.run(step, kind, **cut(step, micro, accumulation)))


@pytest.mark.parametrize("micro,batches", [(4, 4), (2, 8)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_rollout(runs: Runs, kind, micro, batches):
    """Prompts are then padded to other widths, answers stop at other columns; running statistics and KL as well."""
    other = {"per_device_train_batch_size": micro, "generation_batches": batches}
    row = f"step 3, {kind}, rollout {micro}x{batches} against 16x1"
    assert_equal_runs(row, runs.run(3, kind, **RUNNING), runs.run(3, kind, **RUNNING, **other))


def test_rollout_and_steps_at_once(runs: Runs):
    other = {"per_device_train_batch_size": 1, "generation_batches": 16} | cut(3, 1, 8)
    assert_equal_runs("step 3, llama, rollout 1x16 and steps 1x8", runs.run(3), runs.run(3, **other))


def test_per_token_pairs(runs: Runs):
    given = {"pair_loss": "per_token"}
    row = "step 2, llama, loss per token, 2x4 against 8x1"
    assert_equal_runs(row, runs.run(2, **given), runs.run(2, **given, **cut(2, 2, 4)))


def test_ppo_with_text(runs: Runs):
    """The text's micro-batches follow those of PPO in the actor's step only."""
    row = "step 3, llama, with plain text, 2x4 against 8x1"
    assert_equal_runs(row, runs.run(3, **TEXTS), runs.run(3, **TEXTS, **cut(3, 2, 4)))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_with_lora(runs: Runs, step):
    given = LORA if step < 3 else LORA3
    row = f"step {step}, llama, LoRA, 2x4 against 8x1"
    assert_equal_runs(row, runs.run(step, **given), runs.run(step, **given, **cut(step, 2, 4)))


def test_a_mean_of_means_is_seen(runs: Runs, monkeypatch):
    """The twin: each micro-batch divided by its own tokens, as the predecessors did, is another loss."""

    def mean_of_means(engine, run, batches, loss_sum, count) -> StepOutcome:
        def weighed(batch: dict):
            return loss_sum(batch) / batch["response_mask"].sum() / len(batches) * count

        return optimizer_step(engine, run, batches, weighed, count)

    monkeypatch.setattr(step1, "optimizer_step", mean_of_means)
    difference = largest_difference(runs.run(1), runs.run(1, under="mean_of_means", **cut(1, 1, 8)))
    assert difference.losses > 1000 * TOLERANCE and difference.weights > 1000 * TOLERANCE, difference
    whole = largest_difference(runs.run(1), runs.run(1, under="mean_of_means"))
    assert whole.weights <= TOLERANCE, "one micro-batch has one mean"

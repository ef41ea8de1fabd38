"""Recomputed activations, evaluations and printed answers change nothing, not even the random numbers of dropout."""

import pytest

from tests.equivalence.comparison import TOLERANCE, assert_equal_runs
from tests.equivalence.runs import LORA, LORA3, Runs

DROPOUT = {"dropout": 0.1}
DROPOUT3 = {"actor_dropout": 0.1, "critic_dropout": 0.1}
RECOMPUTED = {"gradient_checkpointing": True}
RECOMPUTED3 = {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True}
CUT = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gradient_checkpointing(runs: Runs, kind, step):
    recomputed = RECOMPUTED if step < 3 else RECOMPUTED3
    given = (DROPOUT if step < 3 else DROPOUT3) if kind == "gpt2" else {}
    row = f"step {step}, {kind}{', dropout' if given else ''}, with and without gradient checkpointing"
    assert_equal_runs(row, runs.run(step, kind, **given), runs.run(step, kind, **given, **recomputed))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_gradient_checkpointing_with_lora(runs: Runs, step):
    lora = LORA if step < 3 else LORA3
    recomputed = RECOMPUTED if step < 3 else RECOMPUTED3
    row = f"step {step}, llama, LoRA, with and without gradient checkpointing"
    assert_equal_runs(row, runs.run(step, **lora), runs.run(step, **lora, **recomputed))


@pytest.mark.parametrize("step", [1, 2])
def test_evaluations_in_the_middle(runs: Runs, step):
    """Bit for bit: an evaluation computes nothing that training uses, and draws nothing."""
    without = runs.run(step, "gpt2", **DROPOUT, **CUT)
    often = runs.run(step, "gpt2", **DROPOUT, **CUT, eval_interval=1)
    assert all(any(name.startswith("eval_") for name in line) for line in often.log)
    assert sum(any(name.startswith("eval_") for name in line) for line in without.log) == 3  # start and two epochs
    kept = [
        {name: value for name, value in line.items() if name in other}
        for line, other in zip(often.log, without.log, strict=True)
    ]
    row = f"step {step}, gpt2, dropout, evaluated at every step and at the epochs' ends"
    difference = assert_equal_runs(row, without, type(often)(often.weights, kept))
    assert difference.weights == difference.losses == difference.figures == 0.0


def test_printed_answers(runs: Runs):
    row = "step 3, gpt2, dropout, with and without printed answers"
    difference = assert_equal_runs(
        row, runs.run(3, "gpt2", **DROPOUT3), runs.run(3, "gpt2", **DROPOUT3, print_answers=True)
    )
    assert difference.weights == difference.losses == difference.figures == 0.0


@pytest.mark.parametrize("step", [1, 2, 3])
def test_dropout_is_really_drawn(runs: Runs, step):
    """The twin: with dropout the run is another one, so the rows above compare random numbers too."""
    dropout = DROPOUT if step < 3 else DROPOUT3
    one, two = runs.run(step, "gpt2").weights, runs.run(step, "gpt2", **dropout).weights
    assert max(float((one[name] - two[name]).abs().max()) for name in one) > 1000 * TOLERANCE

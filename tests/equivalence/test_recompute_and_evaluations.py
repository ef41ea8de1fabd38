"""Recomputed activations, evaluations and printed answers change nothing, not even the random numbers of dropout."""

import pytest
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.equivalence.comparison import TOLERANCE, assert_equal_runs
from tests.equivalence.runs import LORA, LORA3, Runs

RECOMPUTED = {"gradient_checkpointing": True}
RECOMPUTED3 = {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True}
CUT = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "dropout"])
def test_gradient_checkpointing(runs: Runs, kind, step):
    recomputed = RECOMPUTED if step < 3 else RECOMPUTED3
    row = f"step {step}, {kind}, with and without gradient checkpointing"
    assert_equal_runs(row, runs.run(step, kind), runs.run(step, kind, **recomputed))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_gradient_checkpointing_with_lora(runs: Runs, step):
    lora = LORA if step < 3 else LORA3
    recomputed = RECOMPUTED if step < 3 else RECOMPUTED3
    row = f"step {step}, llama, LoRA, with and without gradient checkpointing"
    assert_equal_runs(row, runs.run(step, **lora), runs.run(step, **lora, **recomputed))


@pytest.mark.parametrize("step", [1, 2])
def test_evaluations_in_the_middle(runs: Runs, step):
    """Bit for bit: an evaluation computes nothing that training uses, and draws nothing."""
    without, often = runs.run(step, "dropout", **CUT), runs.run(step, "dropout", **CUT, eval_interval=1)
    assert all(any(name.startswith("eval_") for name in line) for line in often.log)
    assert sum(any(name.startswith("eval_") for name in line) for line in without.log) == 3  # start and two epochs
    kept = [
        {name: value for name, value in line.items() if name in other}
        for line, other in zip(often.log, without.log, strict=True)
    ]
    row = f"step {step}, dropout, evaluated at every step and at the epochs' ends"
    difference = assert_equal_runs(row, without, type(often)(often.weights, kept))
    assert difference.weights == difference.losses == difference.figures == 0.0


def test_printed_answers(runs: Runs):
    row = "step 3, dropout, with and without printed answers"
    difference = assert_equal_runs(row, runs.run(3, "dropout"), runs.run(3, "dropout", print_answers=True))
    assert difference.weights == difference.losses == difference.figures == 0.0


def test_rollouts_are_recorded_without_dropout(runs: Runs):
    """Actor and reference are the same model at first; the first update sees dropout, the record does not."""
    first = runs.run(3, "dropout").log[0]
    assert first["kl"] == first["kl_k3"] == 0.0
    assert first["first_ratio_deviation"] > 0.01


@pytest.mark.parametrize("step", [1, 2, 3])
def test_dropout_is_really_drawn(runs: Runs, step):
    """The twin: without dropout the run is another one, so the rows above compare random numbers too."""
    off = {"disable_dropout": True} if step < 3 else {"disable_actor_dropout": True, "disable_critic_dropout": True}
    one, two = runs.run(step, "dropout").weights, runs.run(step, "dropout", **off).weights
    assert max(float((one[name] - two[name]).abs().max()) for name in one) > 1000 * TOLERANCE


@pytest.mark.parametrize("step", [1, 2, 3])
def test_activations_are_really_computed_again(runs: Runs, monkeypatch, step):
    """The twin: every layer runs more often."""
    calls = []
    forward = LlamaAttention.forward

    def counted(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs)

    runs.world("llama")
    monkeypatch.setattr(LlamaAttention, "forward", counted)
    counts = []
    for given in ({}, RECOMPUTED if step < 3 else RECOMPUTED3):
        calls.clear()
        runs.run(step, under="counted", **given, max_steps=1)
        counts.append(len(calls))
    layers, models = 2, 1 if step < 3 else 2
    steps = 1 if step < 3 else 4  # two minibatches, twice
    assert counts[1] - counts[0] == layers * models * steps, counts

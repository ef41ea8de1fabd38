"""Step 3 as it is shipped, watched from outside: what each rollout's policy gives on average, beside what was sampled.

``run_ppo`` calls step 3's ``main(argv)``. The trainer it makes there enumerates the policy before its rollouts and
leaves everything else to the trainer that it inherits from.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer, RolloutInTraining
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import (
    FunctionReward,
    load_reward_function,
)
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Sequences
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer, vocabulary_size
from alpaca_rlhf.runtime.run import command
from benchmarks.enumeration import ROUNDING, AnswerTree, Expected, Problem
from benchmarks.small_task import COPIES, MOST_TOKENS, PROMPTS, Task

ENOUGH_VISITS = 30  # of a state or action, for its mean to be nearly normal

SETTINGS: dict[str, object] = {  # what the size of the task asks for; all else are the defaults of step 3
    "per_device_train_batch_size": COPIES * len(PROMPTS), "per_device_mini_train_batch_size": 48,
    "actor_learning_rate": 1e-3, "critic_learning_rate": 3e-3, "kl_coef": 0.25, "max_prompt_seq_len": 8,
    "max_answer_seq_len": MOST_TOKENS, "data_split": "0,0,1",
}  # fmt: skip


class Round(NamedTuple):
    """One rollout: its number from 0, the answers sampled before it, what its policy gives, what it gave."""

    number: int
    answers: int
    expected: Expected
    experience: Experience


@dataclass
class Watch:
    """Enumerates the policy of every ``every``-th rollout; with ``exact_critic`` the critic's values are exact too."""

    problem: Problem
    every: int = 4
    exact_critic: bool = False
    rounds: list[Round] = field(default_factory=list)
    answers: int = 0  # sampled so far

    def trainer(self) -> type[DeepSpeedPPOTrainer]:
        """Step 3's trainer, watched."""
        watch = self

        class WatchedTrainer(DeepSpeedPPOTrainer):
            def generate_experience(self, batches: Sequence[dict]) -> RolloutInTraining:
                due = self.rollouts % watch.every == 0
                expected = watch.expected(lambda rows: self.roles.actor.score(rows)[0]) if due else None
                if watch.exact_critic:
                    assert expected is not None, "exact values need every rollout to be enumerated"
                    self.roles.critic.score = partial(exact_values, watch.problem.tree, expected)
                rollout = super().generate_experience(batches)
                if expected is not None:
                    watch.rounds.append(Round(self.rollouts, watch.answers, expected, rollout.experience))
                watch.answers += len(rollout.experience)
                return rollout

        return WatchedTrainer

    def expected(self, score: Callable[[Sequences], Tensor]) -> Expected:
        """The figures of a policy, given by how it scores sequences."""
        return self.problem.expected(self.problem.tree.log_probs(score))

    def shares(self) -> list[tuple[int, float]]:
        """(answers sampled so far, share of the gap that is closed)."""
        return [(one.answers, self.share(float(one.expected.reward.mean()))) for one in self.rounds]

    def share(self, objective: float) -> float:
        """How much of the way from J(reference) to the optimum a policy with this J has gone."""
        start = self.problem.objective(self.problem.ref_log_probs)
        return (objective - start) / (self.problem.optimum() - start)


def log_probs_of(folder: Path, tree: AnswerTree) -> Tensor:
    """(Q, N, R) of the saved language model, loaded as step 3 loads it."""
    tokenizer = load_tokenizer(str(folder), notice=lambda _: None)
    model = load_causal_lm(str(folder), tokenizer, notice=lambda _: None)
    policy = CausalLM(model, vocabulary_limit=vocabulary_size(tokenizer))
    with torch.no_grad():
        return tree.log_probs(lambda rows: policy(rows.ids, rows.attention_mask, rows.response_mask,
                                                  start=rows.prompt_length).log_probs)  # fmt: skip


def make_problem(task: Task, seed: int, beta: float) -> Problem:
    """The task with the reward table of this seed; scores come from the function that step 3 is given."""
    tree, tokenizer = task.tree(), load_tokenizer(str(task.reference), notice=lambda _: None)
    reward = FunctionReward(load_reward_function(task.table(seed)), tokenizer)
    rows = tree.sequences()
    scores = reward.score(rows, torch.ones(len(rows.ids), dtype=torch.bool)).double().view(len(PROMPTS), -1)
    return Problem(tree, log_probs_of(task.reference, tree), scores, beta)


def run_ppo(task: Task, watch: Watch, output: Path, *, seed: int, samples: int, settings: dict[str, object]) -> None:
    """Step 3 with the table and the random numbers of ``seed``, for at most ``samples`` answers; ``output`` gets its
    models, metrics.jsonl and output.txt.

    Raises:
        RuntimeError: step 3 ended with an exit code other than 0.
    """
    flags = {
        "data_path": task.prompts, "data_output_path": task.cache, "actor_model_name_or_path": task.reference,
        "reward_fn": task.table(seed), "num_train_epochs": samples // (COPIES * len(PROMPTS)), "seed": seed,
        "output_dir": output, **SETTINGS, **settings,
    }  # fmt: skip
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if output.exists():
        shutil.rmtree(output)  # of an earlier run: step 3 would want to go on with it
    output.mkdir(parents=True)
    with (output / "output.txt").open("w", encoding="utf-8") as file, _in_place_of_the_trainer(watch.trainer()):
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            code = command(step3.main)(argv)
    if code:
        raise RuntimeError(f"step 3 ended with exit code {code}: {(output / 'output.txt').read_text()[-2000:]}")


@contextlib.contextmanager
def _in_place_of_the_trainer(trainer: type[DeepSpeedPPOTrainer]) -> Iterator[None]:
    original, step3.DeepSpeedPPOTrainer = step3.DeepSpeedPPOTrainer, trainer
    try:
        yield
    finally:
        step3.DeepSpeedPPOTrainer = original


def exact_values(tree: AnswerTree, expected: Expected, rows: Sequences) -> Tensor:
    """(B, R): the value of the state before each action, in place of the critic's estimate."""
    prompts, before, _ = tree.nodes(rows)
    return (expected.values[prompts[:, None], before].nan_to_num() * rows.response_mask).float()


def compare_log(watch: Watch, output: Path, names: Sequence[str] = ("score", "kl", "reward")) -> dict[str, list[float]]:
    """z-scores of the logged means ``names`` of the watched rollouts: (logged − enumerated) / standard error.

    The standard error is exact: it comes from the enumerated variances and the number of answers to each prompt. Where
    nothing varies (the KL of the first rollout, whose policy is the reference) there is no z-score.
    """
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    z: dict[str, list[float]] = {name: [] for name in names}
    for one in watch.rounds:
        prompts, _, _ = watch.problem.tree.nodes(_rows(one.experience))
        counts = torch.bincount(prompts, minlength=len(PROMPTS)).double()
        for name, found in z.items():
            mean = (counts * getattr(one.expected, name)).sum() / counts.sum()
            error = (counts * getattr(one.expected, f"{name}_variance")).sum().sqrt() / counts.sum()
            if error > ROUNDING:
                found.append(float((logged[one.number][name] - mean) / error))
    return z


class Agreement(NamedTuple):
    """How far sampled advantages and returns are from the enumerated ones."""

    advantages: list[float]
    """z-scores: for each action at each state the mean advantage against Q − V."""
    returns: list[float]
    """z-scores: for each state the mean return against V."""
    certain: float
    """Largest difference where the return is certain (an answer's last action), which no sampling excuses."""


def compare_advantages(watch: Watch) -> Agreement:
    """From rollouts with exact values, lambda 1 and no whitening, where GAE is unbiased.

    Differences are added up over all rollouts and divided by the root of their added variances, which are enumerated;
    states and actions with fewer than ``ENOUGH_VISITS`` visits are left out.
    """
    advantages, returns, certain = _Visits(), _Visits(), 0.0
    for one in watch.rounds:
        expected, rollout = one.expected, one.experience
        prompts, before, after = watch.problem.tree.nodes(_rows(rollout))
        prompt, counted = prompts[:, None].expand_as(before), rollout.response_mask.bool()
        values, action_values = expected.values[prompt, before], expected.action_values[prompt, after]
        off = rollout.advantages.double() - (action_values - values)
        last = after.eq(after[:, -1:])  # and what is off the mask
        certain = max(certain, float(off[counted & last].abs().max()))
        advantages.add(prompt, after, off, expected.action_variances, counted & ~last)
        returns.add(prompt, before, rollout.returns.double() - values, expected.state_variances, counted)
    return Agreement(advantages.z(), returns.z(), certain)


class _Visits:
    """Sums by prompt and node."""

    def __init__(self) -> None:
        self.sums: dict[tuple[int, int], list[float]] = {}  # visits, differences, variances

    def add(self, prompt: Tensor, node: Tensor, difference: Tensor, variances: Tensor, used: Tensor) -> None:
        """Of (B, R) visits those that are ``used``; ``variances`` (Q, M)."""
        places = zip(prompt[used].tolist(), node[used].tolist(), strict=True)
        terms = torch.stack([difference[used], variances[prompt, node][used]], 1).tolist()
        for place, (off, variance) in zip(places, terms, strict=True):
            total = self.sums.setdefault(place, [0.0, 0.0, 0.0])
            total[:] = [total[0] + 1, total[1] + off, total[2] + variance]

    def z(self) -> list[float]:
        return [off / math.sqrt(variance) for visits, off, variance in self.sums.values()
                if visits >= ENOUGH_VISITS and variance > 0]  # fmt: skip


def _rows(experience: Experience) -> Sequences:
    """The sampled sequences of a rollout."""
    return Sequences(
        experience.sequences, experience.attention_mask, experience.response_mask, experience.prompt_length
    )

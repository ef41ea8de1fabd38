"""The three steps on two tiny models, run in this process; equal settings are run once, so that rows share them.

The records are few and of very unequal lengths: a mean over micro-batches differs from the mean over a step, and the
last step of an epoch is incomplete and odd, so that one of two ranks gets a filler. The models are trained before PPO
meets them, and its rates are high: the policy moves, ratios are clipped, the KL grows.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from alpaca_rlhf.engines.base import OptimizerSettings
from alpaca_rlhf.runtime import tracking
from alpaca_rlhf.runtime.run import command
from tests.equivalence.comparison import Outcome, outcome
from tests.pipeline.steps import PROGRAMS
from tests.tiny import WORDS, save_model, tiny_gpt2, tiny_llama, word_tokenizer, write_jsonl

# Adam divides a gradient by its own size, so one that is 0 in exact arithmetic (GPT-2's key bias; the last norm's bias
# in a reward model, which both scores of a pair share) becomes a whole step in the direction of its rounding error.
# With Adam's own eps of 1e-8 the weights of 2x4 against 8x1 differ by 6e-3 there and by 2e-5 in LLaMA (the losses by
# 1e-7), with 1e-5 by 8e-6, with 1e-4 by 5e-6, with 1e-3 by 3e-7: one or two last places of a float32 near 1. An eps far
# above the rounding makes such a step nothing. It also makes the size of a gradient count, which Adam alone forgives.
EPS = 1e-3

# LLaMA with relative positions; GPT-2 with learned absolute ones, which would notice a position counted over padding;
# and GPT-2 whose own configuration has dropout, for runs that must draw the same random numbers.
MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "dropout": partial(tiny_gpt2, dropout=0.1)}
LENGTHS = {"max_seq_len": 48, "per_device_eval_batch_size": 3}
REFERENCE: dict[int, dict[str, object]] = {
    1: {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2, **LENGTHS},
    2: {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2, **LENGTHS},
    3: {
        "per_device_train_batch_size": 16, "per_device_mini_train_batch_size": 8, "ppo_epochs": 2,
        "max_prompt_seq_len": 24, "max_answer_seq_len": 8, "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2,
        "num_warmup_steps": 0,
    },
}  # fmt: skip
SPLITS = {1: "1,0,0", 2: "0,1,0", 3: "0,0,1"}  # all 21 records for each step: 8, 8, 5; in step 3 rollouts of 16 and 5

LORA = {"lora_dim": 4, "lora_alpha": 8, "only_optimize_lora": True}
LORA3 = {
    "actor_lora_dim": 4, "actor_lora_alpha": 8, "critic_lora_dim": 4, "critic_lora_alpha": 8, "only_optimize_lora": True
}  # fmt: skip
TEXTS = {"unsupervised_dataset_name": Path("texts.jsonl"), "unsup_coef": 0.5}


def write_data(folder: Path) -> None:
    """21 pairs to train on and 7 to evaluate on: prompts of 2 to 10 words, answers of 1 to 9; and plain texts."""
    words, rows, chance = [word for word in WORDS if word.isalpha()], [], random.Random(0)
    for _ in range(28):
        prompt, chosen, rejected = (
            " ".join(chance.choices(words, k=chance.randint(*length))) for length in ((2, 10), (1, 9), (1, 9))
        )
        row = {"prompt": f"Human: {prompt} Assistant:", "chosen": f" {chosen}", "rejected": f" {rejected}"}
        rows.append(row)
    write_jsonl(folder / "train.jsonl", rows[:21])
    write_jsonl(folder / "test.jsonl", rows[21:])
    texts = [{"text": " ".join(chance.choices(words, k=chance.randint(3, 20)))} for _ in range(12)]
    write_jsonl(folder.parent / "texts.jsonl", texts)


def argv(step: int, folder: Path, output: Path, **flags: object) -> list[str]:
    """The command line of a step in ``folder`` (data, cache, base, actor, critic).

    ``flags`` go over the reference's: name → value; True is a switch, None leaves the flag out, a path is one in
    ``folder``.
    """
    given = {"data_path": folder / "data", "data_output_path": folder / "cache", "data_split": SPLITS[step]}
    if step < 3:
        given["model_name_or_path"] = folder / "base"
    else:
        given |= {"actor_model_name_or_path": folder / "actor", "critic_model_name_or_path": folder / "critic"}
    words: list[str] = []
    for name, value in (given | REFERENCE[step] | flags | {"output_dir": output}).items():
        value = folder / value if isinstance(value, Path) else value
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


@contextmanager
def tight(eps: float = EPS) -> Iterator[None]:
    """Inside, every optimizer is made with this eps; and no curves are drawn, which take most of a tiny run's time."""
    with pytest.MonkeyPatch.context() as patch:
        defaults = OptimizerSettings.__init__.__defaults__
        assert defaults == ((0.9, 0.95), 1e-8), f"eps is no longer the last default: {defaults}"
        patch.setattr(OptimizerSettings.__init__, "__defaults__", (*defaults[:-1], eps))
        patch.setattr(tracking, "draw_curves", lambda *_: None)
        yield


class Runs:
    """Runs of the steps, each kept under its settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[Path, Outcome] = {}

    def world(self, kind: str) -> Path:
        """The folder of one kind of model: data, base, and an actor and a critic trained by steps 1 and 2."""
        folder = self.folder / kind
        if not folder.exists():
            write_data(folder / "data")
            tokenizer = word_tokenizer()
            save_model(folder / "base", MODELS[kind](len(tokenizer)), tokenizer)
            longer = {"num_train_epochs": 8}
            start(1, argv(1, folder, folder / "actor", **longer))
            start(2, argv(2, folder, folder / "critic", model_name_or_path=folder / "actor", **longer))
        return folder

    def run(self, step: int, kind: str = "llama", under: str = "", **flags: object) -> Outcome:
        """The outcome of the reference run with ``flags`` changed. ``under`` names what the caller has patched."""
        output = self.output(step, kind, under, **flags)
        if output not in self._done:
            start(step, argv(step, self.world(kind), output, **flags))
            self._done[output] = outcome(output)
        return self._done[output]

    def output(self, step: int, kind: str = "llama", under: str = "", **flags: object) -> Path:
        """Where :meth:`run` puts such a run: equal settings, equal place."""
        digest = hashlib.sha256(json.dumps(flags, sort_keys=True, default=str).encode()).hexdigest()[:12]
        return self.folder / kind / f"step{step}" / f"{under or 'as_it_is'}_{digest}"


def start(step: int, words: list[str]) -> None:
    """Run one step's program as a shell would; it must succeed."""
    with tight():
        assert command(PROGRAMS[step])(words) == 0, words

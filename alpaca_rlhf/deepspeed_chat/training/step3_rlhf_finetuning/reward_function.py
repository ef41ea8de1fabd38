"""A user's Python function in the place of the reward model: ``--reward_fn FILE.py:NAME``.

    def score(prompts: list[str], answers: list[str]) -> Sequence[float]:
        return [float(answer.endswith(".")) for answer in answers]

It gets the texts of this process's part of a rollout, special tokens left out and blanks around them stripped, as the
program prints them: the prompt as the chat template renders it, the answer up to its end. It returns one number for
each: a list, a numpy array or a tensor.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Sequences

RewardFunction = Callable[[list[str], list[str]], Any]


def load_reward_function(place: str, option: str = "--reward_fn") -> RewardFunction:
    """The function that ``FILE.py:NAME`` names; runs the file once. What the file itself raises is not caught.

    ``option``: what the user typed it behind, for sentences.

    Raises:
        UserError: no such file, no such name in it, or a name that cannot be called.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{option} {place}: there is no file {file}; check the path")
    module_name = f"reward_fn_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, f"{path} does not end in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up by its name
    spec.loader.exec_module(module)
    function = vars(module).get(name)
    if function is None:
        raise UserError(f"{option} {place}: {file} defines no {name}; check the name behind the colon")
    if not callable(function):
        raise UserError(f"{option} {place}: {name} is {type(function).__name__}, not a function; name a function")
    return function


def reward_function_digest(place: str) -> str:
    """SHA-256 of the file's bytes and the function's name, wherever the file lies; not of what the file reads."""
    file, _, name = place.rpartition(":")
    return hashlib.sha256(Path(file).read_bytes() + name.encode()).hexdigest()


class FunctionReward:
    """The role of the reward, played by a function: one score for each answer (roles.Reward with a model)."""

    def __init__(self, function: RewardFunction, tokenizer: PreTrainedTokenizerBase) -> None:
        """``tokenizer`` turns ids into the texts that ``function`` gets."""
        self.function, self.tokenizer = function, tokenizer

    @torch.no_grad()
    def score(self, sequences: Sequences, finished: Tensor) -> Tensor:
        """Scores (B,) float32; ``finished`` (B,) plays no part, an answer that was cut is judged as it is.

        Raises:
            UserError: not one number for each answer. One that is not finite passes: the trainer skips such rollouts.
        """
        start, mask = sequences.prompt_length, sequences.attention_mask.bool()
        prompts = self._texts(sequences.ids[:, :start], mask[:, :start])
        answers = self._texts(sequences.ids[:, start:], sequences.response_mask.bool())
        return one_number_each(self.function(prompts, answers), len(answers)).to(sequences.ids.device)

    def _texts(self, ids: Tensor, mask: Tensor) -> list[str]:
        rows = [row[kept].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
        decode = self.tokenizer.decode
        return [decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip() for row in rows]


def one_number_each(returned: Any, answers: int, option: str = "--reward_fn") -> Tensor:
    """What the function of ``option`` gave, as (answers,) float32 on the CPU; they may be not finite.

    Raises:
        UserError: anything but one number for each answer.
    """
    needed = f"it must return {answers} numbers, one for each of the {answers} answers that it was given"
    try:
        scores = torch.as_tensor(returned).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        count = f"{len(returned)} values" if isinstance(returned, Sequence | set | dict) else "one value"
        what = f"{count} that are no numbers ({type(returned).__name__})"
        raise UserError(f"the function of {option} returned {what}; {needed}") from error
    if scores.is_complex() or scores.shape != (answers,):
        shape = " x ".join(str(size) for size in scores.shape) or "no list but a single"
        kind = "complex numbers" if scores.is_complex() else "numbers" if scores.ndim else "number"
        raise UserError(f"the function of {option} returned {shape} {kind}; {needed}")
    return scores.float()

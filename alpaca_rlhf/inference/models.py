"""A model to talk with: any output of ours, any causal language model, an adapter; and a reward model beside it."""

import argparse
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import (
    POSITION_FIELDS,
    check_causal_lm,
    load_causal_lm,
    load_tokenizer,
    vocabulary_size,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel, check_reward_model
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import actor_directory
from alpaca_rlhf.inference.conversation import History, Prompt, TurnEnds, build_prompt, turn_ends
from alpaca_rlhf.runtime.run import Run

Notice = Callable[[str], None]
UNLIMITED = 2048  # tokens of a conversation where the model names no limit
MEMORY_ADVICE = "use a smaller --max_length, --dtype bf16, or a smaller model"
STEPS = {"sft": "SFT", "ppo_actor": "RLHF", "ppo_actor_ema": "RLHF, moving average"}


@dataclass
class ChatModel:
    """A loaded model with everything that an answer needs. One answer at a time holds ``lock``."""

    name: str
    step: str  # which step of ours made it; "" for anybody else's
    date: str
    model: PreTrainedModel
    encoder: TextEncoder
    limit: int  # tokens of prompt and answer together
    ends: TurnEnds
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def label(self) -> str:
        """Name, step and date."""
        return f"{self.name} ({', '.join(part for part in (self.step, self.date) if part)})".removesuffix(" ()")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's EOS and whatever else the model's own generation settings end at."""
        own = self.model.generation_config.eos_token_id
        return tuple(dict.fromkeys([self.encoder.eos_id, *(own if isinstance(own, list) else [])]))

    @property
    def vocabulary_limit(self) -> int:
        """Ids from here on have no token and are never drawn (T-10)."""
        return vocabulary_size(self.encoder.tokenizer)

    def prompt(self, history: History, message: str, max_new_tokens: int) -> Prompt:
        """The prompt that leaves room for the answer; see :func:`build_prompt` for what is refused."""
        if max_new_tokens >= self.limit:
            raise UserError(
                f"max_new_tokens is {max_new_tokens} and {self.name} holds {self.limit} tokens in all; lower it"
            )
        return build_prompt(self.encoder, history, message, self.limit - max_new_tokens)


@dataclass
class Scorer:
    """A reward model that scores answers; its own tokenizer and template read the conversation."""

    model: RewardModel
    encoder: TextEncoder
    limit: int

    @torch.no_grad()
    def score(self, history: History, message: str, answer: str) -> float | None:
        """The raw score of an answer, the oldest rounds left out as far as needed; None where it does not fit."""
        new = self.encoder.answer_ids((*history, Turn("user", message)), answer)
        try:
            ids = build_prompt(self.encoder, history, message, self.limit - len(new)).ids + new
        except UserError:
            return None
        batch = torch.tensor([ids], device=next(self.model.parameters()).device)
        return self.model.forward_value(batch, torch.ones_like(batch)).scores.item()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which models talk."""
    parser.add_argument("--path", required=True, metavar="DIR",
                        help="the model: an output of ours (also step 3's whole output), any causal language model's "
                        "directory or hub name, or an adapter's directory")  # fmt: skip
    parser.add_argument("--compare_path", metavar="DIR", help="a second model that answers the same questions")
    parser.add_argument("--template", default="auto", help="chat template (default auto: the tokenizer's own)")
    parser.add_argument("--max_length", type=int, metavar="N",
                        help="most tokens of a conversation and its next answer together (default: what the model "
                        f"holds, or {UNLIMITED} where it names no limit)")  # fmt: skip
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16", "fp16"),
                        help="default auto: bf16 on a GPU that has it, fp32 on a CPU")  # fmt: skip


def load_chat_models(args: argparse.Namespace, run: Run) -> list[ChatModel]:
    """The model of ``--path`` and, where it is given, that of ``--compare_path``; one directory is loaded once.

    Raises:
        UserError: before any weights are read, where one of them is no language model.
    """
    paths = [actor_directory(path) for path in (args.path, args.compare_path) if path is not None]
    for path in paths:
        check_causal_lm(path)
    if args.max_length is not None and args.max_length < 2:
        raise UserError(f"--max_length is {args.max_length}; a question and an answer need at least 2 tokens")
    names = model_names(paths)
    loaded: dict[str, ChatModel] = {}
    for path, name in zip(paths, names, strict=True):
        if path not in loaded:
            loaded[path] = load_chat_model(path, name, args.template, args.max_length, run)
    return [loaded[path] for path in paths]


def load_chat_model(path: str, name: str, template: str, max_length: int | None, run: Run) -> ChatModel:
    """Load one model in evaluation mode onto the run's device; see ``load_causal_lm`` for what is refused."""
    tokenizer = load_tokenizer(path, notice=run.print)
    encoder = TextEncoder(tokenizer, template)
    model = load_causal_lm(path, tokenizer, notice=run.print, dtype=run.dtype).to(run.device).requires_grad_(False)
    step, date = made_by(path)
    limit = position_limit(model)
    if max_length is not None:
        if limit is not None and max_length > limit:
            raise UserError(f"--max_length is {max_length}, but {path} has {limit} positions; lower it")
        limit = max_length
    return ChatModel(name, step, date, model, encoder, limit or UNLIMITED, turn_ends(encoder))


def load_scorer(path: str, run: Run) -> Scorer:
    """Load a reward model to show its scores. Raises UserError where ``path`` is none."""
    check_reward_model(path)
    tokenizer = load_tokenizer(path, notice=run.print)
    model = RewardModel.from_pretrained(path, tokenizer, notice=run.print, dtype=run.dtype).eval().to(run.device)
    return Scorer(model, TextEncoder(tokenizer), position_limit(model.model) or UNLIMITED)


def model_names(paths: Sequence[str]) -> list[str]:
    """A short name for each model: the last part of its path, with as many before it as tell the models apart."""
    parts = [Path(path).parts for path in paths]
    counts = [2 if own[-1] in ("actor", "actor_ema", "adapter") else 1 for own in parts]
    while True:
        names = ["/".join(own[-count:]) for own, count in zip(parts, counts, strict=True)]
        if len(set(names)) == len(set(parts)) or all(c >= len(own) for c, own in zip(counts, parts, strict=True)):
            return names
        counts = [count + 1 for count in counts]


def made_by(path: str) -> tuple[str, str]:
    """Which step of ours wrote this directory and on which day; two empty strings for anybody else's."""
    file = Path(path) / "training_arguments.json"
    if not file.is_file():
        return "", ""
    try:
        arguments = json.loads(file.read_text(encoding="utf-8"))
        step, finished = arguments.get("step"), arguments.get("finished")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{file} is not the JSON object that a step writes: {error}") from error
    return STEPS.get(step, str(step or "")), str(finished or "")[:10]


def position_limit(model: PreTrainedModel) -> int | None:
    """How many tokens the model can hold; None where it names no limit (ALiBi)."""
    config = model.config.get_text_config()
    limits = [getattr(config, name, None) for name in POSITION_FIELDS]
    return next((limit for limit in limits if isinstance(limit, int)), None)

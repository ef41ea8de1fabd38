"""Who says which answer is better: a reward model, or a rule in a Python file. Wins are against the first model."""

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from alpaca_rlhf.algorithms.evaluation_metrics import length_controlled_win_rate, preferences, wilson_interval
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import RewardFunction, one_number_each
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import check_positions, load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import model_digest
from alpaca_rlhf.evaluation.stored import StoredRecords
from alpaca_rlhf.runtime.run import Run


def rule_scores(rule: RewardFunction, option: str, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """The numbers that a rule gives; ``option``: ``--rule FILE.py:NAME``, for sentences.

    Raises:
        UserError: not one finite number for each answer.
    """
    scores = one_number_each(rule(list(prompts), list(answers)), len(answers), option).tolist()
    finite = sum(map(math.isfinite, scores))
    if finite < len(scores):
        raise UserError(f"the function of {option} returned {len(scores)} numbers, {finite} of them finite: all must")
    return scores


class Judge:
    """A reward model that scores answers of any model as texts, with its own tokenizer and chat template.

    Each text is prompt + answer + EOS, also where the answer was cut at the limit: a reward model knows nothing else.
    """

    def __init__(self, path: str, template: str, batch_size: int, run: Run) -> None:
        """Reads tokenizer and weights."""
        tokenizer = load_tokenizer(path, notice=run.print)
        self.encoder, self.batch_size, self.run, self.path = TextEncoder(tokenizer, template), batch_size, run, path
        self.digest = model_digest(path)
        model = RewardModel.from_pretrained(path, tokenizer, notice=run.print, dtype=run.dtype)
        self.model = model.eval().to(run.device)

    @torch.no_grad()
    def scores(
        self, name: str, conversations: Sequence[Conversation], answers: Sequence[str], folder: Path
    ) -> list[float]:
        """One score an answer, kept in ``folder``; ``name`` is that of the model that answered.

        Raises:
            UserError: a text is longer than the model, or a score is not finite.
        """
        encoder, asked = self.encoder, [conversation.prompt for conversation in conversations]
        texts = [encoder.prompt_ids(t) + encoder.answer_ids(t, a) for t, a in zip(asked, answers, strict=True)]
        check_positions(self.model, f"the judge {self.path}", max(map(len, texts)), "the tokens of prompt and answer")
        decisive = {"judge": self.digest, "texts": texts, "dtype": str(self.run.dtype)}
        stored, collate = StoredRecords(folder, "scores", decisive), DataCollatorRLHF(encoder.pad_id)
        missing = stored.missing(len(texts))
        bar = self.run.progress(len(texts), f"scores of {name}", start=len(texts) - len(missing))
        for start in range(0, len(missing), self.batch_size):
            rows = missing[start : start + self.batch_size]
            batch = collate([{"prompt_ids": texts[row], "row": row} for row in rows], len(rows))
            ids, mask = batch["prompt_ids"].to(self.run.device), batch["prompt_mask"].to(self.run.device)
            scores = self.model.forward_value(ids, mask).scores.tolist()
            if not all(map(math.isfinite, scores)):
                raise UserError(f"the judge {self.path} gives scores that are not finite; it cannot judge")
            stored.add({row: {"score": score} for row, score in zip(rows, scores, strict=True)})
            bar.update(len(rows))
        bar.close()
        return [record["score"] for record in stored.ordered(len(texts))]


def warn_of_own_judge(judge: str, models: dict[str, str], notice: Callable[[str], None]) -> None:
    """Say so when one of the models (name → path) was trained against the judge, which then flatters it."""
    for name, path in models.items():
        file = Path(path) / "training_arguments.json"
        made = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        trained_against = (made.get("critic") or {}).get("path")
        if trained_against and os.path.realpath(trained_against) == os.path.realpath(judge):
            notice(f"warning: {name} was trained against the judge {judge}, so its win rate says little; give another")


def verdict(scores: Sequence[float], first_scores: Sequence[float], answers: Sequence[str],
            first_answers: Sequence[str]) -> dict[str, Any]:  # fmt: skip
    """Win rate against the first model (ties half) with Wilson's 95 % interval, wins and ties, and the win rate at
    equal length (in characters, which no tokenizer changes) with its interval."""
    wins = preferences(scores, first_scores)
    lengths = [float(len(own) - len(first)) for own, first in zip(answers, first_answers, strict=True)]
    controlled = length_controlled_win_rate(wins, lengths)
    return {
        "win_rate": sum(wins) / len(wins),
        "win_rate_interval": list(wilson_interval(sum(wins), len(wins))),
        "wins": wins.count(1.0),
        "ties": wins.count(0.5),
        "length_controlled_win_rate": controlled.rate,
        "length_controlled_interval": list(controlled.interval),
        "length_effect": controlled.length_effect,
    }

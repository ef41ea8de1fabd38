"""Answers of one model to the prompts, and how far it went from the first model: both batched and kept on disk."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from alpaca_rlhf.algorithms.masking import first_eos_mask
from alpaca_rlhf.algorithms.metrics import ended_rows
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer, vocabulary_size
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import model_digest
from alpaca_rlhf.evaluation.stored import StoredRecords
from alpaca_rlhf.rollout.base import SamplingSettings, row_uniforms
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout
from alpaca_rlhf.runtime.run import Run


class Settings(NamedTuple):
    """How all models answer."""

    max_prompt_tokens: int
    max_answer_tokens: int
    temperature: float
    top_p: float
    seed: int
    batch_size: int
    template: str


class Answering:
    """One model with its tokenizer; the weights are read only when they are needed, and can be let go.

    Attributes: ``name``, ``encoder``, ``digest`` (of the weights), ``vocabulary``, ``prompts`` (ids).
    """

    def __init__(
        self, name: str, path: str, settings: Settings, conversations: Sequence[Conversation], run: Run
    ) -> None:
        """Reads the tokenizer and encodes the prompts.

        Raises:
            UserError: a prompt is longer than the limit.
        """
        self.name, self.path, self.settings, self.run = name, path, settings, run
        self.tokenizer = load_tokenizer(path, notice=run.print)
        self.encoder = TextEncoder(self.tokenizer, settings.template)
        self.vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self.digest = model_digest(path)
        self.prompts = [self.encoder.prompt_ids(conversation.prompt) for conversation in conversations]
        for conversation, ids in zip(conversations, self.prompts, strict=True):
            if len(ids) > settings.max_prompt_tokens:
                raise UserError(
                    f"the prompt {conversation.record} has {len(ids)} tokens for {name}; raise --max_prompt_seq_len"
                )

    @cached_property
    def model(self) -> CausalLM:
        """The model on the run's device, in evaluation mode."""
        loaded = load_causal_lm(self.path, self.tokenizer, notice=self.run.print, dtype=self.run.dtype)
        return CausalLM(loaded, vocabulary_limit=vocabulary_size(self.tokenizer)).eval().to(self.run.device)

    def release(self) -> None:
        """Let the weights go."""
        self.__dict__.pop("model", None)

    def answers(self, folder: Path) -> StoredRecords:
        """``text``, ``ids`` (the end token included) and ``ended`` (by itself) of each prompt's answer."""
        settings = self.settings
        stored = StoredRecords(folder, "answers", {
            "model": self.digest, "encoder": self.encoder.fingerprint, "prompts": self.prompts, "seed": settings.seed,
            "temperature": settings.temperature, "top_p": settings.top_p, "most": settings.max_answer_tokens,
            "dtype": str(self.run.dtype),
        })  # fmt: skip
        self._batched(stored, f"answers of {self.name}", self._answer)
        return stored

    def kl_to(self, first: "Answering", answers: StoredRecords, folder: Path) -> list[float | None]:
        """Of each answer log p(answer) - log p_first(answer), nats: its mean is a sample of KL(model, first).

        None for every answer where that is no sample of the KL: greedy or truncated sampling, or other token ids.
        """
        count, settings = len(self.prompts), self.settings
        if settings.temperature == 0 or settings.top_p < 1 or first.vocabulary != self.vocabulary:
            return [None] * count
        if first.digest == self.digest and first.prompts == self.prompts:
            return [0.0] * count
        decisive = {"answers": answers.digest, "first": first.digest, "first_prompts": first.prompts}
        stored = StoredRecords(folder, "kl", decisive)

        def log_ratios(rows: Sequence[int]) -> dict[int, dict]:
            own, other = (answering._log_probs(rows, answers) for answering in (self, first))
            return {row: {"kl": value} for row, value in zip(rows, (own - other).tolist(), strict=True)}

        self._batched(stored, f"KL of {self.name} to {first.name}", log_ratios)
        return [record["kl"] for record in stored.ordered(count)]

    def _batched(
        self, stored: StoredRecords, description: str, work: Callable[[Sequence[int]], dict[int, dict]]
    ) -> None:
        missing, size = stored.missing(len(self.prompts)), self.settings.batch_size
        bar = self.run.progress(len(self.prompts), description, start=len(self.prompts) - len(missing))
        for start in range(0, len(missing), size):
            rows = missing[start : start + size]
            stored.add(work(rows))
            bar.update(len(rows))
        bar.close()

    @torch.no_grad()
    def _answer(self, rows: Sequence[int]) -> dict[int, dict]:
        encoder, settings = self.encoder, self.settings
        sampling = SamplingSettings(
            max_new_tokens=settings.max_answer_tokens, eos_ids=(encoder.eos_id,), pad_id=encoder.pad_id,
            temperature=settings.temperature, top_p=settings.top_p, vocabulary_limit=self.model.vocabulary_limit,
        )  # fmt: skip
        batch = self._collated(rows)
        uniforms = row_uniforms(settings.seed, 0, rows, settings.max_answer_tokens)
        rollout = HFGenerateRollout(self.model.model, sampling)
        responses = rollout.generate(batch["prompt_ids"], batch["prompt_mask"], uniforms)
        mask = first_eos_mask(responses, sampling.eos_ids)
        ended = ended_rows(responses, mask, sampling.eos_ids).tolist()
        records = {}
        for index, length in enumerate(mask.sum(1).tolist()):
            ids = responses[index, :length].tolist()
            records[rows[index]] = {"text": encoder.decode(ids), "ids": ids, "ended": ended[index]}
        return records

    @torch.no_grad()
    def _log_probs(self, rows: Sequence[int], answers: StoredRecords) -> torch.Tensor:
        """log p of whole answers (B,) float64 to this model's own prompts."""
        batch = self._collated(rows)
        prompts = batch["prompt_ids"]
        ids = [answers.rows[row]["ids"] for row in rows]
        width = max(1, *(len(answer) for answer in ids))
        responses = prompts.new_full((len(rows), width), self.encoder.pad_id)
        mask = torch.zeros_like(responses)
        for index, answer in enumerate(ids):
            responses[index, : len(answer)] = torch.tensor(answer, dtype=responses.dtype)
            mask[index, : len(answer)] = 1
        whole = torch.cat([prompts, responses], 1), torch.cat([batch["prompt_mask"], mask], 1), mask
        scores = self.model(*whole, start=prompts.shape[1], temperature=self.settings.temperature)
        return scores.log_probs.double().sum(1)

    def _collated(self, rows: Sequence[int]) -> dict:
        items = [{"prompt_ids": self.prompts[row], "row": row} for row in rows]
        batch = DataCollatorRLHF(self.encoder.pad_id)(items, len(items))
        return {name: batch[name].to(self.run.device) for name in ("prompt_ids", "prompt_mask")}

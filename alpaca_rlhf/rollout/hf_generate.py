"""Sampling with transformers' ``generate``: the plain way, and the reference for any faster one (P-13)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from alpaca_rlhf.rollout.base import Rollout, SamplingSettings


class HFGenerateRollout(Rollout):
    """Samples from the very module that trains, so there is nothing to bring up to date.

    Call it inside the engine's ``gathered()``: under ZeRO-3 the weights are then whole on every rank, and ranks may
    stop at different lengths without waiting for one another (Z-02).
    """

    def __init__(self, model: PreTrainedModel, settings: SamplingSettings) -> None:
        self.model = model
        self.settings = settings

    @torch.no_grad()
    def generate(self, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor) -> Tensor:
        """See :meth:`Rollout.generate`."""
        settings = self.settings
        config = GenerationConfig(
            do_sample=False,  # the processor below has drawn the token already: the argmax of one candidate
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=list(settings.eos_ids),
            pad_token_id=settings.pad_id,
            use_cache=True,
        )
        sampler = UniformSampler(uniforms.to(prompt_ids.device), settings, prompt_ids.shape[1])
        with neutral_generation_config(self.model):
            sequences = self.model.generate(
                input_ids=prompt_ids,
                attention_mask=prompt_mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                synced_gpus=False,
            )
        return sequences[:, prompt_ids.shape[1] :]

    def sync_weights(self) -> None:
        """Nothing to do: the module that samples is the module that trains."""


class UniformSampler(LogitsProcessor):
    """Draws each row's token by inverting the cumulative distribution at a given uniform number.

    Leaves one candidate a row (0 there, −inf elsewhere), so that whatever picks next picks it.
    """

    def __init__(self, uniforms: Tensor, settings: SamplingSettings, prompt_length: int) -> None:
        self.uniforms = uniforms
        self.settings = settings
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` (B, V) → (B, V), 0 at the drawn id and −inf elsewhere."""
        step = input_ids.shape[1] - self.prompt_length
        drawn = draw(scores, self.uniforms[:, step], self.settings)
        return torch.full_like(scores, float("-inf")).scatter_(1, drawn[:, None], 0.0)


def draw(logits: Tensor, uniforms: Tensor, settings: SamplingSettings) -> Tensor:
    """Ids (B,) drawn from ``logits`` (B, V) with ``uniforms`` (B,): the first id whose cumulative probability exceeds
    the number, in the order of the ids. In float64, so that the sum over a large vocabulary ends at 1."""
    logits = logits.double()
    if settings.vocabulary_limit is not None:
        logits = logits.clone()
        logits[:, settings.vocabulary_limit :] = float("-inf")
    if settings.temperature == 0:
        return logits.argmax(-1)
    probabilities = filtered(logits / settings.temperature, settings.top_k, settings.top_p).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms.to(cumulative.dtype)[:, None] * cumulative[:, -1:], right=True)
    # The sum of the last possible id can round below the number by an ulp: then it is that id.
    last_possible = probabilities.shape[1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(drawn[:, 0], last_possible)


def filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits (B, V) with −inf outside the ``top_k`` likeliest ids and outside the smallest set whose probability
    reaches ``top_p`` (nucleus sampling, arXiv 1904.09751); 0 and 1 keep everything."""
    if 0 < top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        outside = torch.zeros_like(before, dtype=torch.bool).scatter_(1, order, before >= top_p)
        outside.scatter_(1, order[:, :1], False)  # top_p 0 keeps the likeliest id
        logits = logits.masked_fill(outside, float("-inf"))
    return logits


@contextmanager
def neutral_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's own generation settings: ``generate`` fills whatever a given config leaves open from them."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own

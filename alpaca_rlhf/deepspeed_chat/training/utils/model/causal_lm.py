"""The policy: log-probabilities of given tokens under a causal language model."""

import functools
import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from alpaca_rlhf.algorithms.log_probs import selected_log_probs
from alpaca_rlhf.algorithms.masking import position_ids


class TokenScores(NamedTuple):
    """Of the tokens at positions ``start`` … S-1 of each sequence; 0 where they were not asked for."""

    log_probs: Tensor
    """(B, S - start) float32, nats."""
    entropy: Tensor | None
    """(B, S - start) float32, nats, without a gradient: of the distribution that the token was drawn from."""


class CausalLM(nn.Module):
    """A causal language model (in ``.model``) that gives log-probabilities and never builds a (B, S, V) tensor.

    Args:
        model: as ``load_causal_lm`` gives it.
        vocabulary_limit: ids from here on are no tokens (embeddings padded beyond the tokenizer) and have
            probability 0: ``vocabulary_size(tokenizer)``. None: every row of the output layer is a token.
    """

    def __init__(self, model: PreTrainedModel, vocabulary_limit: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)  # a loaded model is in evaluation mode: so is its wrapper
        self.vocabulary_limit = vocabulary_limit

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor,
        start: int = 1,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> TokenScores:
        """Log-probability of each token at position ``start`` and later, read at the position before it.

        Computed only where ``response_mask`` is 1. With prompts of width P, ``start = P`` gives action t in column t.

        Args:
            input_ids: (B, S), padded on either side.
            attention_mask: (B, S), 1 = a real token; positions are counted over these.
            response_mask: (B, S - start), 1 = the token at position start + column is wanted.
            start: first position wanted, at least 1.
            temperature: what the logits are divided by.
            with_entropy: also give the entropy.
        """
        batch, width = input_ids.shape
        assert 1 <= start <= width and response_mask.shape == (batch, width - start), (
            f"response_mask {tuple(response_mask.shape)} does not fit input_ids {tuple(input_ids.shape)} from {start}"
        )
        hidden = last_hidden_state(self.model, input_ids, attention_mask)[:, start - 1 : -1]
        wanted = response_mask.bool()
        # The weight is taken here, once: under ZeRO-3 this is what gathers it, and the number of pieces that the
        # projection is cut into (different on every rank) then costs no communication.
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        log_probs, entropy = selected_log_probs(
            hidden[wanted],
            input_ids[:, start:][wanted],
            lambda rows: F.linear(rows, weight, bias),
            temperature=temperature,
            with_entropy=with_entropy,
            vocabulary_limit=self.vocabulary_limit,
        )
        zeros = torch.zeros(wanted.shape, dtype=torch.float32, device=hidden.device)
        return TokenScores(
            zeros.masked_scatter(wanted, log_probs),
            None if entropy is None else zeros.masked_scatter(wanted, entropy),
        )

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of ``.model`` from that of this wrapper."""
        return {name.removeprefix("model."): tensor for name, tensor in state_dict.items()}


def last_hidden_state(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden states (B, S, H) that the output layer of ``model`` reads, the same wherever the padding is.

    Positions are the running sum of the mask; an architecture without ``position_ids`` (ALiBi) derives them itself.
    """
    positions = {"position_ids": position_ids(attention_mask)} if _takes_positions(type(model.base_model)) else {}
    output = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
    return output.last_hidden_state


@functools.lru_cache
def _takes_positions(backbone: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(backbone.forward).parameters

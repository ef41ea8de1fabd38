"""What every way of sampling answers has in common: its settings, and the one call a trainer makes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """Everything that decides which token is drawn; the model's own generation settings are never consulted (P-19).

    ``temperature`` divides the logits; 0 means greedy. ``top_k`` 0 and ``top_p`` 1 filter nothing.
    ``vocabulary_limit``: ids at or above it have no token and are never drawn (T-10).
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    vocabulary_limit: int | None = None


class Rollout(ABC):
    """Draws one answer for each prompt."""

    settings: SamplingSettings

    @abstractmethod
    def generate(self, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor) -> Tensor:
        """Answers (B, R), R ≤ ``max_new_tokens``: sampled ids up to the first EOS, ``pad_id`` after it.

        ``prompt_ids``, ``prompt_mask`` (B, P) are padded on the left. ``uniforms`` (B, max_new_tokens) in [0, 1) are
        the random numbers: token t of row b is a function of the logits and of ``uniforms[b, t]`` alone, so an answer
        does not depend on which other prompts share its batch, nor on the number of processes.
        """

    @abstractmethod
    def sync_weights(self) -> None:
        """Bring the weights that sample up to date with the ones that train."""


def row_uniforms(seed: int, round_index: int, row_ids: Sequence[int], length: int) -> Tensor:
    """Random numbers (B, length), float64 in [0, 1), a function of (seed, round, row id) alone (P-20)."""
    rows = []
    for row in row_ids:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + round_index) * 1_000_003 + int(row) & (2**63 - 1))
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)

"""The record that travels from the rollout to the updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

_RESPONSE_FIELDS = (
    "response_mask", "old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns",
)  # fmt: skip
_ROW_FIELDS = ("scores", "row_mask")


@dataclass(frozen=True, eq=False)
class Experience:
    """A batch of sampled answers with all that PPO has recorded about them. No tensor carries a gradient.

    Action t of a row is the token at position ``prompt_length + t``; its log-prob and its value were read at position
    ``prompt_length + t - 1``. Off ``response_mask`` a (B, R) field holds anything and counts for nothing.

    Raises:
        AssertionError: shapes that disagree, or a tensor that requires a gradient.
    """

    sequences: Tensor
    """(B, S) int64: prompt padded on the left, then the response padded on the right."""
    attention_mask: Tensor
    """(B, S): 1 on every token of prompt and response, the end token included."""
    prompt_length: int
    """P, the width of the prompt part, padding included; the same for all rows. R = S - P."""
    response_mask: Tensor
    """(B, R): 1 = an action that was sampled and is trained."""
    old_log_probs: Tensor
    """(B, R) nats, of the actions under the policy that sampled them."""
    ref_log_probs: Tensor
    """(B, R) nats, of the actions under the reference."""
    values: Tensor
    """(B, R): the critic's value of the state before each action, when sampled."""
    rewards: Tensor
    """(B, R): KL penalty per action, the score added at the last one."""
    advantages: Tensor
    """(B, R), whitened or not."""
    returns: Tensor
    """(B, R): targets of the critic."""
    scores: Tensor
    """(B,): the reward model's raw scores."""
    row_mask: Tensor
    """(B,): 1 = a real row, 0 = a filler that counts nowhere."""

    def __post_init__(self) -> None:
        """Check shapes and that nothing carries a graph."""
        batch, width = self.sequences.shape
        response = (batch, width - self.prompt_length)
        expected: dict[str, tuple[int, ...]] = {"sequences": (batch, width), "attention_mask": (batch, width)}
        expected |= dict.fromkeys(_RESPONSE_FIELDS, response) | dict.fromkeys(_ROW_FIELDS, (batch,))
        actual = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}
        assert actual == expected, f"prompt_length {self.prompt_length} and shapes disagree: {actual}"
        with_graph = [name for name, tensor in self._tensors().items() if tensor.requires_grad]
        assert not with_graph, f"an experience carries no graph, but these require a gradient: {with_graph}"

    def __len__(self) -> int:
        """B, the number of rows."""
        return int(self.sequences.shape[0])

    @property
    def response_length(self) -> int:
        """R, the width of the response part, padding included."""
        return int(self.sequences.shape[1]) - self.prompt_length

    @property
    def responses(self) -> Tensor:
        """(B, R): the response part of the sequences."""
        return self.sequences[:, self.prompt_length :]

    def to(self, device: torch.device | str) -> Experience:
        """The same record with every tensor on ``device``."""
        return self._with({name: tensor.to(device) for name, tensor in self._tensors().items()})

    def select(self, index: Tensor) -> Experience:
        """The rows ``index`` (n,) int64, in that order. Widths stay; :meth:`trim` cuts them."""
        return self._with({name: tensor[index] for name, tensor in self._tensors().items()})

    def trim(self) -> Experience:
        """Without the columns that are padding in every row: prompt columns on the left, response columns on the right.

        A response column is padding when ``response_mask`` is 0 in it: later columns cannot reach the earlier ones of a
        causal model. At least one column of each part stays.
        """
        prompt_used = self.attention_mask[:, : self.prompt_length].bool().any(dim=0)
        response_used = self.response_mask.bool().any(dim=0)
        first = min(int((prompt_used.long().cumsum(0) == 0).sum()), max(self.prompt_length - 1, 0))
        unused_at_end = int((response_used.flip(0).long().cumsum(0) == 0).sum())
        last = max(self.response_length - unused_at_end, min(self.response_length, 1))
        kept = {name: tensor[:, :last] for name, tensor in self._tensors().items() if name in _RESPONSE_FIELDS}
        for name in ("sequences", "attention_mask"):
            kept[name] = getattr(self, name)[:, first : self.prompt_length + last]
        return self._with(kept, prompt_length=self.prompt_length - first)

    @staticmethod
    def concat(experiences: Sequence[Experience], pad_id: int) -> Experience:
        """All rows one below the other; narrower prompts are padded on the left, narrower responses on the right.

        Args:
            experiences: at least one, widths may differ.
            pad_id: what ``sequences`` is padded with; every other field is padded with 0.

        Raises:
            ValueError: an empty list.
        """
        if not experiences:
            raise ValueError("concat needs at least one experience")
        prompt_length = max(experience.prompt_length for experience in experiences)
        response_length = max(experience.response_length for experience in experiences)
        parts: dict[str, list[Tensor]] = {}
        for experience in experiences:
            left = prompt_length - experience.prompt_length
            right = response_length - experience.response_length
            for name, tensor in experience._tensors().items():
                if name not in _ROW_FIELDS:
                    widths = (0 if name in _RESPONSE_FIELDS else left, right)
                    fill = pad_id if name == "sequences" else 0
                    tensor = torch.nn.functional.pad(tensor, widths, value=fill)
                parts.setdefault(name, []).append(tensor)
        joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
        return experiences[0]._with(joined, prompt_length=prompt_length)

    def _tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "prompt_length"}

    def _with(self, tensors: dict[str, Tensor], prompt_length: int | None = None) -> Experience:
        length = self.prompt_length if prompt_length is None else prompt_length
        return Experience(**{**self._tensors(), **tensors}, prompt_length=length)

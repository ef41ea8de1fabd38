"""Items of a data set become padded tensors. Masks come from lengths and never from comparing ids (fault T-02).

``real`` is the number of items that count: items after it are fillers, repeated records that give every rank equally
many rows. A filler's rows are ordinary input whose response_mask or row_mask is 0, so that they add nothing to a loss.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def collate_sft(items: Sequence[dict], real: int, pad_id: int) -> dict[str, Tensor]:
    """SFT items, padded on the right to the longest.

    Returns input_ids, attention_mask, response_mask, each (B, S) int64; response_mask is 1 where the token at that
    position is trained.
    """
    _check_fillers(items, real)
    input_ids, attention_mask = _pad([item["input_ids"] for item in items], pad_id)
    response_mask, _ = _pad([item["trained"] for item in items], 0)
    response_mask[real:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": response_mask}


def collate_pairs(items: Sequence[dict], real: int, pad_id: int) -> dict[str, Tensor]:
    """Preference pairs, padded on the right to the longest of both sides.

    Returns input_ids, attention_mask (2B, S) int64, the B chosen rows first, then the B rejected ones; divergence (B,)
    int64, the first position at which the two sequences differ (the shorter one's length if it is a prefix of the
    longer); margin (B,) float32; row_mask (B,) float32, 1 for a real pair.
    """
    _check_fillers(items, real)
    chosen = [item["chosen_ids"] for item in items]
    rejected = [item["rejected_ids"] for item in items]
    input_ids, attention_mask = _pad([*chosen, *rejected], pad_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "divergence": torch.tensor([_first_difference(c, r) for c, r in zip(chosen, rejected, strict=True)]),
        "margin": torch.tensor([item["margin"] for item in items], dtype=torch.float32),
        "row_mask": _row_mask(items, real),
    }


class DataCollatorRLHF:
    """Prompts for generation, padded on the LEFT: the last column is always a real token (fault P-04)."""

    def __init__(self, pad_id: int, pad_to: int | None = None) -> None:
        """``pad_to``: a fixed width; None pads to the longest prompt of the batch."""
        self.pad_id = pad_id
        self.pad_to = pad_to

    def __call__(self, items: Sequence[dict], real: int) -> dict:
        """Returns prompt_ids, prompt_mask (B, P) int64, row_mask (B,) float32 and row_ids, the items' rows (list)."""
        _check_fillers(items, real)
        prompt_ids, prompt_mask = _pad([item["prompt_ids"] for item in items], self.pad_id, self.pad_to, left=True)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "row_mask": _row_mask(items, real),
            "row_ids": [item["row"] for item in items],
        }


def _pad(
    rows: Sequence[Sequence[int]], value: int, width: int | None = None, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows as one (B, S) int64 tensor, and its mask: 1 on the rows' own entries."""
    longest = max(len(row) for row in rows)
    width = longest if width is None else width
    assert min(len(row) for row in rows) > 0 and longest <= width, ([len(row) for row in rows], width)
    padded = torch.full((len(rows), width), value, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        padded[index, place] = torch.tensor(row, dtype=torch.int64)
        mask[index, place] = 1
    return padded, mask


def _row_mask(items: Sequence[dict], real: int) -> Tensor:
    return (torch.arange(len(items)) < real).to(torch.float32)


def _check_fillers(items: Sequence[dict], real: int) -> None:
    assert 0 <= real <= len(items) and len(items) > 0, (real, len(items))


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    assert len(first) != len(second), f"two equal sequences of {len(first)} ids are no pair"
    return min(len(first), len(second))

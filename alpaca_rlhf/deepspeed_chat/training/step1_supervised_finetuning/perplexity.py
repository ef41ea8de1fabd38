"""Conversations through the model: the loss of a micro-batch, and the perplexity of records it never saw (M-03)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.losses import sft_loss_sum
from alpaca_rlhf.algorithms.metrics import perplexity
from alpaca_rlhf.engines.base import Engine
from alpaca_rlhf.engines.stepping import to_device


def batch_loss(engine: Engine, batch: dict) -> Tensor:
    """Summed cross-entropy (nats) of the trained tokens of one micro-batch."""
    mask = batch["response_mask"][:, 1:]
    scores = engine(batch["input_ids"], batch["attention_mask"], mask)
    return sft_loss_sum(scores.log_probs, mask)


@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[dict], run: Any) -> dict[str, float]:
    """exp(total loss / total tokens) over the records of all ranks; ``batches``: this rank's share. {} without any."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    with engine.evaluation_mode():
        for batch in batches:
            batch = to_device(batch, run.device)
            sums += torch.stack([batch_loss(engine, batch), batch["response_mask"][:, 1:].sum()])
    loss, tokens = run.sum(sums).tolist()
    if not tokens:
        return {}
    run.print(f"perplexity {perplexity(loss, tokens):.4f} over {tokens:.0f} trained tokens")
    return {"eval_perplexity": perplexity(loss, tokens), "eval_loss": loss / tokens, "eval_tokens": tokens}

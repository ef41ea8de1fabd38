"""Pairs through the reward model: the loss of a micro-batch, and how good the model is on pairs it never saw (R-09)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.losses import pairwise_loss_sum
from alpaca_rlhf.algorithms.metrics import Averages, pearson
from alpaca_rlhf.algorithms.rewards import RewardStats
from alpaca_rlhf.engines.base import Engine
from alpaca_rlhf.engines.stepping import to_device

FAR = 5.0  # deviations: where step 3 clips normalised scores, unless it is told otherwise


@dataclass(frozen=True)
class PairScores:
    """Scores and lengths of N pairs, all ranks together, in an order that does not matter."""

    chosen: Tensor  # (N,) float64
    rejected: Tensor  # (N,)
    chosen_length: Tensor  # (N,) tokens of prompt and answer
    rejected_length: Tensor  # (N,)

    def metrics(self) -> dict[str, float]:
        """Accuracy (a tie is not correct), count, ties, mean and std per side, gap, loss of the end scores (without
        margin), and score against length."""
        count = len(self.chosen)
        if not count:
            return {}
        scores, lengths = torch.cat([self.chosen, self.rejected]), torch.cat([self.chosen_length, self.rejected_length])
        return {
            "eval_accuracy": float((self.chosen > self.rejected).double().mean()),
            "eval_count": float(count),
            "eval_ties": float((self.chosen == self.rejected).sum()),
            "eval_chosen_mean": float(self.chosen.mean()),
            "eval_chosen_std": float(self.chosen.std(correction=0)),
            "eval_rejected_mean": float(self.rejected.mean()),
            "eval_rejected_std": float(self.rejected.std(correction=0)),
            "eval_gap": float((self.chosen - self.rejected).mean()),
            "eval_loss": float(pairwise_loss_sum(self.chosen, self.rejected, 0.0, torch.ones(count))) / count,
            "eval_length_correlation": pearson(scores, lengths),
        }

    def chosen_stats(self) -> RewardStats | None:
        """Mean, std (of the population) and count of the chosen answers' finite scores; None when there is none."""
        scores = self.chosen[torch.isfinite(self.chosen)]
        if not len(scores):
            return None
        return RewardStats(float(scores.mean()), float(scores.std(correction=0)), len(scores))

    def scale_warning(self) -> str | None:
        """What to say where step 3 could not use :meth:`chosen_stats`: the chosen answers' scores differ so little that
        those of other answers, divided by their deviation, would all be clipped."""
        stats, rejected = self.chosen_stats(), self.rejected[torch.isfinite(self.rejected)]
        if stats is None or not len(rejected):
            return None
        below = (stats.mean - float(rejected.mean())) / max(stats.std, 1e-6)
        if below <= FAR:
            return None
        return (
            f"warning: the scores of the chosen answers differ by {stats.std:.2g} only, and the rejected answers lie "
            f"{below:.0f} such deviations below: step 3 would clip them all to one score; give it "
            "--reward_normalization off"
        )


@torch.no_grad()
def score_pairs(engine: Engine, batches: Iterable[dict], run: Any) -> PairScores:
    """Score every pair once, in evaluation mode; ``batches`` are this rank's share (M-04)."""
    rows: list[list[float]] = []
    with engine.evaluation_mode():
        for batch in batches:
            batch = to_device(batch, run.device)
            chosen, rejected = engine(batch["input_ids"], batch["attention_mask"]).scores.double().chunk(2)
            lengths = batch["attention_mask"].sum(1).double().chunk(2)
            real = batch["row_mask"].bool()
            rows += torch.stack([chosen, rejected, *lengths], 1)[real].tolist()
    table = torch.tensor([row for part in run.gather(rows) for row in part], dtype=torch.float64).reshape(-1, 4)
    return PairScores(*table.unbind(1))


def told(run: Any, metrics: dict[str, float]) -> dict[str, float]:
    """The evaluation's figures, printed in one line on the way; nothing is printed for an empty evaluation part."""
    if metrics:
        run.print(
            f"accuracy {metrics['eval_accuracy']:.4f} over {metrics['eval_count']:.0f} pairs "
            f"({metrics['eval_ties']:.0f} ties), "
            f"chosen {metrics['eval_chosen_mean']:.3f} ± {metrics['eval_chosen_std']:.3f}, "
            f"rejected {metrics['eval_rejected_mean']:.3f} ± {metrics['eval_rejected_std']:.3f}, "
            f"gap {metrics['eval_gap']:.3f}, score-length correlation {metrics['eval_length_correlation']:.2f}"
        )
    return metrics


def told_scale(run: Any, scores: PairScores, population: str) -> RewardStats | None:
    """The statistics that step 3 normalises by, printed on the way, with a warning where they are no scale for it."""
    stats = scores.chosen_stats()
    run.print(f"scores of the {population}: {stats or 'none is finite, so no statistics are saved'}")
    if warning := scores.scale_warning():
        run.print(warning)
    return stats


def batch_loss(engine: Engine, pair_loss: str, averages: Averages, batch: dict) -> Tensor:
    """Summed loss of one micro-batch's pairs; notes the scores of both sides on the way."""
    names = ("input_ids", "attention_mask", "divergence", "margin", "row_mask")
    output = engine(*(batch[name] for name in names), pair_loss)
    rows, chosen, rejected = batch["row_mask"], output.chosen_scores.detach(), output.rejected_scores.detach()
    figures = {"chosen_score": chosen, "rejected_score": rejected, "gap": chosen - rejected}
    for name, values in {**figures, "accuracy": chosen > rejected}.items():
        averages.add(name, (values * rows).sum(), rows.sum())
    return output.loss_sum

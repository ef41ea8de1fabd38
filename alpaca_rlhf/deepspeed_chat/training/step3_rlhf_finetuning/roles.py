"""The four roles of PPO. Each computes its own loss and steps its own engine; only records cross to the trainer.

Shapes: B rows, P prompt columns (padded left), R response columns (padded right), S = P + R. Action t is the token at
position P + t; its log-prob and its value are read at position P + t − 1.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.algorithms.losses import policy_loss_sum, sft_loss_sum, value_loss_sum
from alpaca_rlhf.algorithms.metrics import Averages
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.engines.base import Engine, StepReport
from alpaca_rlhf.rollout.base import Rollout


class Sequences(NamedTuple):
    """Prompts with their sampled responses, on the device of the models."""

    ids: Tensor  # (B, S)
    attention_mask: Tensor  # (B, S), 0 on the padding of both sides
    response_mask: Tensor  # (B, R), 1 up to and including the first EOS
    prompt_length: int  # P


class Trained:
    """What actor and critic share: gradients of several micro-batches, then one step or none."""

    def __init__(self, engine: Engine, module: CausalLM | RewardModel) -> None:
        self.engine, self.module = engine, module
        self._losses_finite = torch.ones((), dtype=torch.bool)

    def _accumulate(self, loss: Tensor, last: bool) -> None:
        self._losses_finite = self._losses_finite.to(loss.device) & torch.isfinite(loss.detach())
        self.engine.accumulate(loss, last=last)

    def losses_finite(self) -> bool:
        """Whether every loss since the last step was finite on this rank."""
        return bool(self._losses_finite)

    def finish(self, good: bool) -> StepReport:
        """Take the optimizer step, or throw the gradients away; the trainer decides for both roles together (Z-07)."""
        self._losses_finite = torch.ones((), dtype=torch.bool)
        return self.engine.step() if good else self.engine.discard()


class Actor(Trained):
    """The policy. ``temperature`` divides its logits when it samples and when it is scored alike (P-02)."""

    def __init__(self, engine: Engine, module: CausalLM, rollout: Rollout, *, temperature: float, clip: float) -> None:
        super().__init__(engine, module)
        self.rollout, self.temperature, self.clip = rollout, temperature, clip

    def sample(self, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor) -> Tensor:
        """Responses (B, R) to prompts (B, P), in evaluation mode."""
        with self.engine.evaluation_mode(), self.engine.gathered():
            return self.rollout.generate(prompt_ids, prompt_mask, uniforms)

    @torch.no_grad()
    def score(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy (B, R) of the actions, in evaluation mode."""
        with self.engine.evaluation_mode():
            scores = self.engine(
                sequences.ids, sequences.attention_mask, sequences.response_mask,
                start=sequences.prompt_length, temperature=self.temperature, with_entropy=True,
            )  # fmt: skip
        return scores.log_probs, scores.entropy

    def accumulate(self, rows: Experience, *, tokens: float, last: bool, averages: Averages) -> None:
        """Add the gradient of the clipped objective of these rows, as their share of ``tokens`` (the whole step's)."""
        scores = self.engine(
            rows.sequences, rows.attention_mask, rows.response_mask,
            start=rows.prompt_length, temperature=self.temperature,
        )  # fmt: skip
        loss = policy_loss_sum(scores.log_probs, rows.old_log_probs, rows.advantages, rows.response_mask, self.clip)
        count = rows.response_mask.sum()
        averages.add("actor_loss", loss.loss_sum.detach(), count)
        averages.add("clip_share", loss.clip_count.detach(), count)
        averages.add("ratio_deviation", loss.ratio_deviation_sum.detach(), count)
        averages.add("policy_kl", loss.approx_kl_sum.detach(), count)
        self._accumulate(loss.loss_sum / tokens, last)

    def accumulate_text(self, batch: dict, *, weight: float, last: bool, averages: Averages) -> None:
        """Add ``weight`` × the summed cross-entropy of plain text (PPO-ptx, arXiv 2203.02155 eq. 2)."""
        mask = batch["response_mask"][:, 1:]
        loss = sft_loss_sum(self.engine(batch["input_ids"], batch["attention_mask"], mask).log_probs, mask)
        averages.add("unsupervised_loss", loss.detach(), mask.sum())
        self._accumulate(loss * weight, last)


class Critic(Trained):
    """The value function, started from the reward model."""

    def __init__(self, engine: Engine, module: RewardModel, *, clip: float | None) -> None:
        super().__init__(engine, module)
        self.clip = clip

    @torch.no_grad()
    def score(self, sequences: Sequences) -> Tensor:
        """Values (B, R) before each action, in evaluation mode."""
        with self.engine.evaluation_mode():
            return self._values(sequences.ids, sequences.attention_mask, sequences.prompt_length)

    def accumulate(self, rows: Experience, *, tokens: float, last: bool, averages: Averages) -> None:
        """Add the gradient of the clipped squared error of these rows, as their share of ``tokens``."""
        values = self._values(rows.sequences, rows.attention_mask, rows.prompt_length)
        loss = value_loss_sum(values, rows.values, rows.returns, rows.response_mask, self.clip)
        count = rows.response_mask.sum()
        averages.add("critic_loss", loss.loss_sum.detach(), count)
        averages.add("value_clip_share", loss.clip_count.detach(), count)
        self._accumulate(loss.loss_sum / tokens, last)

    def _values(self, ids: Tensor, attention_mask: Tensor, prompt_length: int) -> Tensor:
        return self.engine(ids, attention_mask).values[:, prompt_length - 1 : -1]


class Reference:
    """The frozen start of the policy. With LoRA only it is the actor with its adapters off (``without_adapters``)."""

    def __init__(self, forward: Callable[..., Any], *, temperature: float,
                 around: Callable[[], AbstractContextManager] = nullcontext) -> None:  # fmt: skip
        self.forward, self.temperature, self.around = forward, temperature, around

    @torch.no_grad()
    def score(self, sequences: Sequences) -> Tensor:
        """Log-probs (B, R) of the actions under the reference."""
        with self.around():
            return self.forward(
                sequences.ids, sequences.attention_mask, sequences.response_mask,
                start=sequences.prompt_length, temperature=self.temperature,
            ).log_probs  # fmt: skip


class Reward:
    """The frozen reward model: one score for each whole sequence.

    A reward model is trained on texts that end in EOS, so an unfinished answer is judged with an EOS appended in the
    reward model's own copy, where the model has a position left for it; what the policy sampled is never changed
    (P-10).
    """

    def __init__(self, forward: Callable[..., Any], *, eos_id: int, pad_id: int, positions: int | None,
                 around: Callable[[], AbstractContextManager] = nullcontext) -> None:  # fmt: skip
        self.forward, self.eos_id, self.pad_id, self.positions, self.around = forward, eos_id, pad_id, positions, around

    @torch.no_grad()
    def score(self, sequences: Sequences, finished: Tensor) -> Tensor:
        """Scores (B,) of the sequences; ``finished`` (B,) tells which responses end in EOS."""
        lengths = sequences.attention_mask.sum(1)
        append = ~finished if self.positions is None else ~finished & (lengths < self.positions)
        column = torch.where(append, self.eos_id, self.pad_id)[:, None].to(sequences.ids.dtype)
        ids = torch.cat([sequences.ids, column], 1)
        mask = torch.cat([sequences.attention_mask, append[:, None].to(sequences.attention_mask.dtype)], 1)
        with self.around():
            return self.forward(ids, mask).scores

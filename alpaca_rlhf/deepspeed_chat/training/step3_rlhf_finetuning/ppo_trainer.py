"""The order of the algorithm: from prompts to experience, from experience to two optimizer steps.

Every rank samples and scores its own prompts; then all ranks hold the whole rollout, so statistics, advantages and the
composition of the minibatches are the same on each and do not depend on how many there are.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from alpaca_rlhf.algorithms.advantages import gae
from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.algorithms.kl import AdaptiveKLController, FixedKLController, kl_estimate
from alpaca_rlhf.algorithms.masking import first_eos_mask, masked_sum, whiten
from alpaca_rlhf.algorithms.metrics import (
    Averages,
    distinct_n,
    distinct_token_shares,
    empty_rows,
    ended_rows,
    explained_variance,
    padding_share,
)
from alpaca_rlhf.algorithms.rewards import RewardStats, RunningRewardStats, shape_rewards
from alpaca_rlhf.arguments.schema import PPOArguments
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.alarms import Alarms, kl_limit
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.rlhf_engine import RLHFEngine
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Sequences
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader
from alpaca_rlhf.engines.stepping import SkippedSteps, to_device
from alpaca_rlhf.rollout.base import row_uniforms


@dataclass
class RolloutInTraining:
    """A rollout of which some optimizer steps are taken: what a checkpoint between two of them has to hold."""

    experience: Experience
    figures: dict[str, float]  # of its generation
    done: int = 0  # optimizer steps
    averages: Averages = field(default_factory=Averages)  # over these
    first: dict[str, float] = field(default_factory=dict)  # figures of the first of them

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors."""
        return {**vars(self), "experience": dict(vars(self.experience)), "averages": self.averages.state_dict()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "RolloutInTraining":
        """The same again."""
        one = cls(**{**state, "experience": Experience(**state["experience"]), "averages": Averages()})
        one.averages.load_state_dict(state["averages"])
        return one


class DeepSpeedPPOTrainer:
    """PPO (arXiv 1707.06347) as InstructGPT uses it (arXiv 2203.02155): a score at the end, a KL penalty per token."""

    def __init__(
        self,
        roles: RLHFEngine,
        run: Any,
        settings: PPOArguments,
        *,
        seed: int,
        reward_stats: RewardStats | RunningRewardStats | None,
        minibatches: Callable[[Experience, int], Iterator[list[Experience]]],
        texts: StepLoader | None = None,
        unsup_coef: float = 0.0,
        max_skipped_steps: int = 3,
    ) -> None:
        """``minibatches(experience, epoch)`` cuts a rollout into this rank's share of each optimizer step; ``texts``
        gives the micro-batches of plain text that an optimizer step adds, weighted by ``unsup_coef``; more than
        ``max_skipped_steps`` steps in a row that are not finite end the run."""
        self.roles, self.run, self.settings, self.seed = roles, run, settings, seed
        self.reward_stats, self.minibatches, self.texts, self.unsup_coef = reward_stats, minibatches, texts, unsup_coef
        if settings.kl_target is None:
            self.kl_controller = FixedKLController(settings.kl_coef)
        else:
            self.kl_controller = AdaptiveKLController(settings.kl_coef, settings.kl_target, settings.kl_horizon)
        self.skipped = SkippedSteps(max_skipped_steps)
        self.optimizer_steps = self.rollouts = self.text_steps = 0  # taken, finished, used
        self.present: RolloutInTraining | None = None
        self._text_stream: Iterator[tuple[int, int, list[dict]]] | None = None
        limit = kl_limit(settings.kl_alarm, settings.kl_target)
        self.alarms = Alarms(kl_limit=limit, clip_reward=settings.clip_reward)

    def generate_experience(self, batches: Sequence[dict]) -> RolloutInTraining:
        """The whole rollout of all ranks, and its figures.

        1 sample, 2 cut at EOS, 3 score by the four roles, 4 normalise and clip the scores, 5 shape the rewards with
        the KL penalty, 6 advantages.
        """
        settings, averages, started = self.settings, Averages(), time.perf_counter()
        sampled = [self._generate_sequence(batch, self.rollouts) for batch in batches]  # 1, 2
        generated = time.perf_counter()
        local = self._score(sampled, batches, averages)  # 3
        rollout = Experience.concat(self.run.gather(local), pad_id=self.roles.pad_id)
        # In the order in which the prompts were dealt out to the ranks, or a minibatch would hold other rows with each
        # number of ranks; and without the rows that only evened out the ranks.
        dealt = torch.arange(len(rollout)).view(self.run.world_size, -1).T.flatten()
        rollout = rollout.select(dealt[rollout.row_mask[dealt] > 0])

        normalized = self._normalize(rollout.scores)  # 4
        clipped = normalized.clamp(-settings.clip_reward, settings.clip_reward)
        ended = ended_rows(rollout.responses, rollout.response_mask, self.roles.eos_ids)
        if settings.missing_eos_penalty is not None:
            clipped = clipped - settings.missing_eos_penalty * (~ended).to(clipped.dtype)
        kl = kl_estimate(rollout.old_log_probs, rollout.ref_log_probs, settings.kl_estimator)  # 5
        rewards = shape_rewards(clipped, kl, rollout.response_mask, self.kl_controller.kl_coef)
        advantages, returns = gae(rewards, rollout.values, rollout.response_mask, settings.gamma, settings.lam)  # 6
        if settings.whiten_advantages:
            advantages = whiten(advantages, rollout.response_mask)
        rollout = replace(rollout, rewards=rewards, advantages=advantages, returns=returns)

        averages.reduce(self.run.sum)
        figures = averages.result() | self._figures(rollout, normalized, ended, kl)
        figures |= {"seconds_generate": generated - started, "seconds_score": time.perf_counter() - generated}
        if math.isfinite(figures["kl"]):
            self.kl_controller.update(figures["kl"], len(rollout))
        return RolloutInTraining(rollout, figures)

    def watch(self, figures: dict[str, float]) -> dict[str, float]:
        """Print the alarms that begin with these figures of a rollout and its training; returns what to log of all."""
        for sentence in self.alarms.rollout(figures):
            self.run.print(sentence)
        return self.alarms.metrics()

    def _generate_sequence(self, batch: dict, round_index: int) -> Sequences:
        """Answers to one batch of prompts, with everything after the first EOS masked."""
        settings = self.roles.actor.rollout.settings
        uniforms = row_uniforms(self.seed, round_index, batch["row_ids"], settings.max_new_tokens)
        batch = to_device(batch, self.run.device)
        responses = self.roles.actor.sample(batch["prompt_ids"], batch["prompt_mask"], uniforms.to(self.run.device))
        response_mask = first_eos_mask(responses, settings.eos_ids)
        ids = torch.cat([batch["prompt_ids"], responses], 1)
        mask = torch.cat([batch["prompt_mask"], response_mask.to(batch["prompt_mask"].dtype)], 1)
        return Sequences(ids, mask, response_mask, batch["prompt_ids"].shape[1])

    def _score(self, sampled: Sequence[Sequences], batches: Sequence[dict], averages: Averages) -> Experience:
        """This rank's records, on the CPU; rewards and advantages are filled in when the ranks have met."""
        roles, records = self.roles, []
        for sequences, batch in zip(sampled, batches, strict=True):
            log_probs, entropy = roles.actor.score(sequences)
            row_mask = batch["row_mask"].to(self.run.device)
            counted = sequences.response_mask * row_mask[:, None]
            averages.add("entropy", masked_sum(entropy, counted), counted.sum())
            responses = sequences.ids[:, sequences.prompt_length :]
            ended = ended_rows(responses, sequences.response_mask, roles.eos_ids)
            unknown = torch.zeros_like(log_probs)
            record = Experience(
                sequences=sequences.ids, attention_mask=sequences.attention_mask,
                prompt_length=sequences.prompt_length, response_mask=sequences.response_mask,
                old_log_probs=log_probs, ref_log_probs=roles.reference.score(sequences),
                values=roles.critic.score(sequences), scores=roles.reward.score(sequences, ended),
                rewards=unknown, advantages=unknown, returns=unknown, row_mask=row_mask,
            )  # fmt: skip
            records.append(record.to("cpu"))
        return Experience.concat(records, pad_id=roles.pad_id)

    def _normalize(self, scores: Tensor) -> Tensor:
        """Scores (B,) on the scale of the chosen answers' (saved), of this run's (running), or as they are (off)."""
        if isinstance(self.reward_stats, RunningRewardStats):
            wide = scores[torch.isfinite(scores)].double()
            if not len(wide):
                return scores  # nothing to go by; such a rollout is skipped anyway
            self.reward_stats.update(len(wide), float(wide.sum()), float((wide * wide).sum()))
            return self.reward_stats.stats.normalize(scores)
        return scores if self.reward_stats is None else self.reward_stats.normalize(scores)

    def _figures(self, rollout: Experience, normalized: Tensor, ended: Tensor, kl: Tensor) -> dict[str, float]:
        """What the log says of one rollout; rows are answers, tokens their actions, EOS included."""
        mask, lengths = rollout.response_mask, rollout.response_mask.sum(1).double()
        answers = [ids[:length] for ids, length in zip(rollout.responses.tolist(), lengths.int().tolist(), strict=True)]
        k3 = kl_estimate(rollout.old_log_probs, rollout.ref_log_probs, "k3")
        return {
            "score": float(rollout.scores.double().mean()),
            "score_std": float(rollout.scores.double().std(correction=0)),
            "normalized_score": float(normalized.double().mean()),
            "clipped_score_share": float((normalized.abs() > self.settings.clip_reward).double().mean()),
            "reward": float(masked_sum(rollout.rewards, mask)) / len(rollout),
            "kl": float(masked_sum(kl, mask)) / len(rollout),
            "kl_k3": float(masked_sum(k3, mask)) / len(rollout),
            "kl_coef": self.kl_controller.kl_coef,
            "length": float(lengths.mean()),
            "ended_share": float(ended.double().mean()),
            "empty_share": float(empty_rows(rollout.responses, mask, self.roles.eos_ids).double().mean()),
            "distinct_2": distinct_n(answers, 2),
            "distinct_token_share": float(distinct_token_shares(rollout.responses, mask).double().mean()),
            "padding_share": padding_share(rollout.attention_mask),
            "explained_variance": explained_variance(rollout.values, rollout.returns, mask),
            "answers": float(len(rollout)),
            "answer_tokens": float(lengths.sum()),
        }

    def train_rlhf(
        self, rollout: RolloutInTraining, after_step: Callable[[int], bool] = lambda step: False
    ) -> dict[str, float] | None:
        """All PPO epochs over one rollout; returns the rollout's figures, with averages over its optimizer steps.

        Epochs outside, minibatches inside, reshuffled each epoch; old log-probs and values stay those of the rollout
        (P-16). Optimizer steps that a checkpoint has behind it are not taken again. ``after_step(optimizer steps of
        the run)`` is called after each; where it returns True the training breaks off and None is returned.

        Raises:
            TrainingDiverged: too many skipped steps in a row.
        """
        started, experience, self.present = time.perf_counter(), rollout.experience, rollout
        bad_scores = int((~torch.isfinite(experience.scores)).sum())
        bad = bad_scores or int((~torch.isfinite(experience.advantages.sum(1))).sum())
        for position, micro_batches in enumerate(self._minibatches(experience)):
            if position < rollout.done:
                continue
            if bad:  # whitening has spread it over the whole rollout: nothing of it can be trained
                self._skip()
            else:
                self._train_step(micro_batches, rollout)
            rollout.done += 1
            if after_step(self.optimizer_steps):
                return None
        kind = "scores" if bad_scores else "answers' values or log-probs"
        what = f"{bad} of {len(experience)} {kind} of rollout {self.rollouts + 1} were not finite"
        if bad:
            self.run.print(f"step {self.optimizer_steps}: {what}; the rollout is skipped")
            self.skipped.note(True, self.optimizer_steps, what)
        self.present = None
        self.rollouts += 1
        seconds = {"seconds_train": time.perf_counter() - started}
        return rollout.figures | rollout.averages.result() | rollout.first | seconds

    def _minibatches(self, experience: Experience) -> Iterator[list[Experience]]:
        for epoch in range(self.settings.epochs):
            yield from self.minibatches(experience, self.rollouts * self.settings.epochs + epoch)

    def _train_step(self, micro_batches: Sequence[Experience], rollout: RolloutInTraining) -> None:
        step = Averages()
        self._update(micro_batches, step)
        step.reduce(self.run.sum)
        figures = step.result()
        rollout.first = rollout.first or {"first_ratio_deviation": figures["ratio_deviation"]}
        for name, value in figures.items():
            rollout.averages.add(name, value, 1.0)

    def _skip(self) -> None:
        """Neither role takes this step; both schedules advance."""
        self.optimizer_steps += 1
        for role in (self.roles.actor, self.roles.critic):
            role.finish(False)

    def _update(self, micro_batches: Sequence[Experience], averages: Averages) -> None:
        """One optimizer step of actor and critic, by both or by neither: all ranks must find all of it finite."""
        actor, critic = self.roles.actor, self.roles.critic
        tokens = float(self.run.sum(torch.stack([rows.response_mask.sum() for rows in micro_batches]).sum()))
        texts = self._next_texts()
        with actor.engine.training_mode(), critic.engine.training_mode():
            for index, rows in enumerate(micro_batches):
                rows = rows.to(self.run.device)
                last = index == len(micro_batches) - 1
                actor.accumulate(rows, tokens=tokens, last=last and not texts, averages=averages)
                critic.accumulate(rows, tokens=tokens, last=last, averages=averages)
            if texts:
                self._accumulate_texts(texts, averages)
        losses_good = self.run.all_true(actor.losses_finite() and critic.losses_finite())
        gradients_finite = actor.engine.gradients_finite() and critic.engine.gradients_finite()
        good = self.run.all_true(losses_good and gradients_finite)
        self.optimizer_steps += 1
        for name, report in (("actor", actor.finish(good)), ("critic", critic.finish(good))):
            if not report.skipped:
                averages.add(f"{name}_grad_norm", report.grad_norm / self.run.world_size, 1.0 / self.run.world_size)
            averages.add(f"{name}_skipped", float(report.skipped), 1.0)
        self.roles.step_taken(good)
        # Under fp16 a gradient may overflow now and then: the loss scale goes down and no harm is done.
        failed = not losses_good or (not good and self.run.dtype != torch.float16)
        self.skipped.note(failed, self.optimizer_steps, "a loss or a gradient was not finite")

    def _next_texts(self) -> list[dict]:
        if self.texts is None:
            return []
        if self._text_stream is None:
            self._text_stream = self.texts.steps(self.text_steps, None)
        self.text_steps, _, batches = next(self._text_stream)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold beside the two engines; equal on all ranks."""
        running = isinstance(self.reward_stats, RunningRewardStats)
        return {
            "optimizer_steps": self.optimizer_steps, "rollouts": self.rollouts, "text_steps": self.text_steps,
            "kl_controller": self.kl_controller.state_dict(), "skipped": self.skipped.state_dict(),
            "reward_stats": self.reward_stats.state_dict() if running else None, "alarms": self.alarms.state_dict(),
            "present": None if self.present is None else self.present.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; a rollout that was in training waits in ``present``."""
        self.optimizer_steps, self.rollouts = state["optimizer_steps"], state["rollouts"]
        self.text_steps, self._text_stream = state["text_steps"], None
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.skipped.load_state_dict(state["skipped"])
        if isinstance(self.reward_stats, RunningRewardStats):
            self.reward_stats.load_state_dict(state["reward_stats"])
        self.alarms.load_state_dict(state["alarms"])
        self.present = None if state["present"] is None else RolloutInTraining.from_state(state["present"])

    def _accumulate_texts(self, texts: Sequence[dict], averages: Averages) -> None:
        count = float(self.run.sum(sum(batch["response_mask"][:, 1:].sum() for batch in texts)))
        for index, batch in enumerate(texts):
            last = index == len(texts) - 1
            batch = to_device(batch, self.run.device)
            self.roles.actor.accumulate_text(batch, weight=self.unsup_coef / count, last=last, averages=averages)

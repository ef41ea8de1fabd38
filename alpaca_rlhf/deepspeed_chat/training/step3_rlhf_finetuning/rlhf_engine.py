"""Put the four roles together: two trained models, and two frozen ones that share their weights where they can.

With LoRA only, the reference is the actor with its adapters off and the reward model is the critic's backbone with its
adapters off and a head of its own: four roles, two backbones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alpaca_rlhf.algorithms.rewards import RewardStats
from alpaca_rlhf.arguments.schema import ModelArguments, Step3Arguments
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import FunctionReward, RewardFunction
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Actor, Critic, Reference, Reward
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, vocabulary_size
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel, SharedRewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.module.adapt import adapt
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import adapters_disabled
from alpaca_rlhf.engines.base import Engine, OptimizerSettings
from alpaca_rlhf.engines.create import create_engine
from alpaca_rlhf.engines.ema import MovingAverage
from alpaca_rlhf.engines.frozen import freeze
from alpaca_rlhf.rollout.base import SamplingSettings
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout

MEMORY_ADVICE = (
    "use smaller --per_device_train_batch_size and --per_device_mini_train_batch_size, shorter --max_prompt_seq_len "
    "and --max_answer_seq_len, LoRA with --only_optimize_lora, --actor_gradient_checkpointing and "
    "--critic_gradient_checkpointing, or --deepspeed with ZeRO stages and --offload"
)


class RLHFEngine:
    """The four roles, the ids they agree on, and what happens around them."""

    def __init__(
        self,
        args: Step3Arguments,
        run: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reward_stats: RewardStats | None,
        optimizer_steps: int,
        reward_function: RewardFunction | None = None,
    ) -> None:
        """Load the models on the CPU, adapt them, hand them to their engines.

        ``optimizer_steps``: of the whole run. ``reward_function`` scores the answers; None: the reward model at
        ``args.critic.path`` does.
        """
        self.args, self.run, self.tokenizer, self.optimizer_steps = args, run, tokenizer, optimizer_steps
        self.eos_ids, self.pad_id = (tokenizer.eos_token_id,), tokenizer.pad_token_id
        self.actor, self.reference = self._policy()
        self.critic, self.reward = self._values(reward_stats, reward_function)
        self.ema = MovingAverage(self.actor.engine, args.ema_decay) if args.enable_ema else None

    def _policy(self) -> tuple[Actor, Reference]:
        args, run, settings = self.args, self.run, self.args.rollout
        limit = vocabulary_size(self.tokenizer)
        load = partial(load_causal_lm, args.actor.path, self.tokenizer)
        model = load(notice=run.print, dropout=args.actor.dropout)
        self._adapt("actor", model, args.actor)
        module = CausalLM(model, vocabulary_limit=limit)
        engine = self._engine(module, args.actor)
        sampling = SamplingSettings(
            max_new_tokens=settings.max_answer_len, eos_ids=self.eos_ids, pad_id=self.pad_id, vocabulary_limit=limit,
            temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
        )  # fmt: skip
        rollout = HFGenerateRollout(model, sampling)
        actor = Actor(engine, module, rollout, temperature=settings.temperature, clip=args.ppo.clip_ratio)
        if self._shares(args.actor):
            around = partial(_adapters_off, engine, model)
            return actor, Reference(engine, temperature=settings.temperature, around=around)
        frozen = CausalLM(load(notice=_say_nothing), vocabulary_limit=limit)  # freeze chooses the precision
        forward = self._freeze(frozen, args.actor, args.offload_reference_model)
        return actor, Reference(forward, temperature=settings.temperature)

    def _values(
        self, reward_stats: RewardStats | None, function: RewardFunction | None
    ) -> tuple[Critic, Reward | FunctionReward]:
        args, run = self.args, self.run
        if args.critic.path is None:
            load = partial(RewardModel.from_causal_lm, args.actor.path, self.tokenizer, seed=args.output.seed)
        else:
            load = partial(RewardModel.from_pretrained, args.critic.path, self.tokenizer)
        module = load(notice=run.print, dropout=args.critic.dropout)
        shares = function is None and self._shares(args.critic)
        head = module.frozen_head() if shares else None  # as it is before the next line
        if reward_stats is not None:
            module.fold_normalization(reward_stats.mean, reward_stats.std)  # values and rewards then share a scale
        self._adapt("critic", module.model, args.critic, keep_trainable=module.head_parameters())
        engine = self._engine(module, args.critic)
        critic = Critic(engine, module, clip=args.ppo.clip_value)
        if function is not None:
            return critic, FunctionReward(function, self.tokenizer)
        reward = partial(Reward, eos_id=self.eos_ids[0], pad_id=self.pad_id,
                         positions=getattr(module.model.config, "max_position_embeddings", None))  # fmt: skip
        if head is not None:
            return critic, reward(SharedRewardModel(engine, module, head), around=engine.evaluation_mode)
        return critic, reward(self._freeze(load(notice=_say_nothing), args.critic, args.offload_reward_model))

    def _shares(self, model: ModelArguments) -> bool:
        """Whether a frozen role can be the trained one with its adapters off: only adapters (and a head) train."""
        return self.args.only_optimize_lora and model.lora_dim > 0

    def _adapt(self, name: str, model: PreTrainedModel, settings: ModelArguments, keep_trainable: Any = ()) -> None:
        adapt(
            model, **settings.adaptation(), only_optimize_lora=self.args.only_optimize_lora,
            seed=self.args.output.seed, keep_trainable=keep_trainable,
            notice=lambda text: self.run.print(f"{name}: {text}"),
        )  # fmt: skip

    def _engine(self, module: torch.nn.Module, settings: ModelArguments) -> Engine:
        args = self.args
        rates = {**settings.optimizer(), **args.schedule.optimizer()}
        optimizer = OptimizerSettings(**rates, total_steps=self.optimizer_steps)
        return create_engine(
            module, optimizer, self.run, deepspeed=args.engine.deepspeed, zero_stage=settings.zero_stage,
            offload=settings.offload, micro_batch_size=args.ppo.per_device_mini_batch_size,
            micro_batches_per_step=args.schedule.gradient_accumulation_steps,
        )  # fmt: skip

    def _freeze(self, module: torch.nn.Module, settings: ModelArguments, offload: bool) -> Callable[..., Any]:
        """A frozen module's forward, held and computed like the trained model it is a copy of."""
        args, run = self.args, self.run
        return freeze(
            module, device=run.device, dtype=run.dtype, zero_stage=settings.zero_stage if args.engine.deepspeed else 0,
            offload=offload, micro_batch_size=args.rollout.per_device_batch_size, world_size=run.world_size,
        )  # fmt: skip

    def step_taken(self, good: bool) -> None:
        """After an optimizer step of both roles."""
        if good and self.ema is not None:
            self.ema.update()


@contextmanager
def _adapters_off(engine: Engine, model: torch.nn.Module) -> Iterator[None]:
    with engine.evaluation_mode(), adapters_disabled(model):
        yield


def _say_nothing(sentence: str) -> None:
    """The notices of a second copy of a model were given with the first."""

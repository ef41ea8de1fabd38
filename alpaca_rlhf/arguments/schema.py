"""Every setting of the three steps: one documented field per idea, shared by all dialects of the command line.

The dataclasses are frozen and check themselves: an object that exists can be run. None means absent, 0 is a value.
A refusal names the fields as ``<field>``; the command line puts the user's own flags in their place.
"""

import dataclasses

from alpaca_rlhf.arguments.fields import SettingError, Settings, setting
from alpaca_rlhf.arguments.parts import (
    DataArguments,
    EngineArguments,
    ModelArguments,
    OutputArguments,
    ScheduleArguments,
)

__all__ = [
    "CriticArguments",
    "DataArguments",
    "EngineArguments",
    "ModelArguments",
    "OutputArguments",
    "PPOArguments",
    "RolloutArguments",
    "ScheduleArguments",
    "Step1Arguments",
    "Step2Arguments",
    "Step3Arguments",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StepArguments(Settings):
    """What every step has."""

    data: DataArguments
    schedule: ScheduleArguments
    engine: EngineArguments
    output: OutputArguments
    only_optimize_lora: bool = setting(False, "freeze everything but the LoRA adapters (and a reward model's head)")

    def _check_models(self, names: tuple[str, ...]) -> None:
        """Refuse what contradicts itself between the models (by field name) and the rest of the step."""
        models: dict[str, ModelArguments] = {name: getattr(self, name) for name in names}
        for name, model in models.items():
            if self.only_optimize_lora and model.lora_dim == 0:
                raise SettingError(
                    f"<only_optimize_lora> trains adapters only, but <{name}.lora_dim> is 0, which means no adapters; "
                    f"give <{name}.lora_dim> a rank such as 8, or leave <only_optimize_lora> away"
                )
            if model.zero_stage > 0 and not self.engine.deepspeed:
                raise SettingError(
                    f"<{name}.zero_stage> is {model.zero_stage}, but ZeRO is a part of DeepSpeed and "
                    f"<engine.deepspeed> is not given; add <engine.deepspeed>, or leave <{name}.zero_stage> away"
                )
        if self.output.save_adapter and not self.only_optimize_lora:
            ranks = " and ".join(f"<{name}.lora_dim>" for name in names)
            raise SettingError(
                "<output.save_adapter> keeps an adapter alone, which is the trained model only if nothing else is "
                f"trained; add <only_optimize_lora>, with {ranks} such as 8"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SupervisedArguments(_StepArguments):
    """What steps 1 and 2 share: one model that learns from given records."""

    model: ModelArguments
    per_device_train_batch_size: int = setting(16, "records (step 2: pairs) per process and micro-batch", at_least=1)
    per_device_eval_batch_size: int = setting(
        16, "the same in the evaluation; changes no result", at_least=1, neutral=True
    )
    max_seq_len: int = setting(512, "most tokens of prompt and answer together", at_least=1)
    eval_interval: int = setting(
        0, "evaluate every so many optimizer steps; 0 = only before the training and after each epoch", at_least=0,
        neutral=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_models(("model",))
        if self.output.print_answers_interval:
            raise SettingError("<output.print_answers_interval> is for step 3: here no answers are generated")

    def evaluation_due(self, step: int, steps_per_epoch: int, total_steps: int) -> bool:
        """Whether to evaluate after this 1-based optimizer step: at the end of each epoch and of the run, and every
        ``eval_interval`` steps."""
        at_end = step == total_steps or step % steps_per_epoch == 0
        return at_end or (self.eval_interval > 0 and step % self.eval_interval == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step1Arguments(_SupervisedArguments):
    """Supervised fine-tuning."""

    train_prompt: bool = setting(
        False, "train on the whole text, the questions too; absent, on the answers and their ends only"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step2Arguments(_SupervisedArguments):
    """The reward model."""

    pair_loss: str = setting(
        "end",
        "end: log-sigmoid of the difference of the two last tokens' scores; per_token: its mean over the tokens "
        "from the first difference on",
        choices=("end", "per_token"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_sft_only(self.data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutArguments(Settings):
    """How answers are sampled. The model's own generation settings are ignored."""

    per_device_batch_size: int = setting(16, "prompts answered at once per process", at_least=1)
    generation_batches: int = setting(1, "such batches collected before each training phase", at_least=1)
    max_prompt_len: int = setting(
        256, "most tokens of a prompt; longer ones lose early turns or are dropped", at_least=1
    )
    max_answer_len: int = setting(256, "most tokens of an answer; it ends earlier at the end-of-text token", at_least=1)
    temperature: float = setting(1.0, "sampling temperature, also of the trained log-probabilities", above=0)
    top_p: float = setting(
        1.0, "sample from the most likely tokens with this total probability; 1 = from all", above=0, at_most=1
    )
    top_k: int = setting(0, "sample from so many most likely tokens; 0 = from all", at_least=0)

    def __post_init__(self) -> None:
        if self.temperature == 0:
            raise SettingError(
                "<temperature> is 0, which is greedy decoding, but PPO learns from sampled answers; "
                "give a value above 0, such as 1"
            )
        super().__post_init__()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOArguments(Settings):
    """The numbers of the algorithm."""

    epochs: int = setting(1, "passes over each rollout", at_least=1)
    per_device_mini_batch_size: int = setting(16, "answers per process and micro-batch of the training", at_least=1)
    kl_coef: float = setting(0.05, "weight of the KL penalty per token; 0 = no penalty", at_least=0)
    kl_estimator: str = setting(
        "k1",
        "KL per token, x = log-prob - reference log-prob: k1 = x, abs = |x|, k2 = x^2/2, k3 = exp(-x) - 1 + x",
        choices=("k1", "abs", "k2", "k3"),
    )
    kl_target: float | None = setting(
        None, "adapt <kl_coef> to keep this KL per answer (nats); absent, <kl_coef> is constant", above=0
    )
    kl_horizon: int = setting(
        10000, "answers over which an adaptive <kl_coef> reacts; larger = slower", at_least=1, needs="kl_target"
    )
    kl_alarm: float | None = setting(
        None, "KL per answer (nats) beyond which the log says so; absent, three times <kl_target>, else 30", above=0,
        neutral=True,
    )
    kl_stop: float | None = setting(
        None, "KL per answer (nats) beyond which the run ends early and saves what it has; absent, it goes on", above=0,
        neutral=True,
    )
    clip_ratio: float = setting(0.2, "PPO's epsilon: the policy ratio counts within 1 +- this", above=0)
    clip_value: float = setting(0.2, "new values count within old values +- this", above=0)
    clip_reward: float = setting(5.0, "normalised scores are cut to +- this", above=0)
    gamma: float = setting(1.0, "discount per token", at_least=0, at_most=1)
    lam: float = setting(0.95, "lambda of the generalised advantage estimation", at_least=0, at_most=1)
    whiten_advantages: bool = setting(True, "scale advantages to mean 0, std 1 over the whole batch of all processes")
    reward_normalization: str | None = setting(
        None,
        "mean and std that scores are normalised by: saved = of step 2 (reward_stats.json), running = of this "
        "run so far, off = none; absent, saved for a reward model and off for a reward function",
        choices=("saved", "running", "off"),
    )
    missing_eos_penalty: float | None = setting(
        None, "taken off the normalised score of an answer that does not end by itself; absent, nothing", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is not None and self.kl_coef == 0:
            raise SettingError(
                "<kl_coef> is 0 and stays 0 however it is adapted to <kl_target> {0}; give <kl_coef> a start such as "
                "0.05, or leave <kl_target> away",
                self.kl_target,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticArguments(ModelArguments):
    """The critic, which has no model of its own to start from where a function gives the scores."""

    path: str | None = setting(  # type: ignore[assignment]  # Step3Arguments accepts None with a reward function only
        None,
        "reward model, which scores the answers and starts the critic: a folder or a hub name; with a reward function "
        "it only starts the critic and may be absent: then that is the actor's model with a new head",
        neutral=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step3Arguments(_StepArguments):
    """PPO against the reward model, or a function in its place."""

    actor: ModelArguments
    critic: CriticArguments
    reward_fn: str | None = setting(
        None,
        "FILE.py:NAME, a Python function that scores answers in place of the reward model: NAME(prompts, answers) gets "
        "two lists of texts (special tokens left out) and returns one number for each; absent, the reward model scores",
        neutral=True,  # the file is compared
    )
    tokenizer_path: str | None = setting(
        None, "folder or hub name of the tokenizer; absent, <actor.path>", neutral=True
    )
    rollout: RolloutArguments
    ppo: PPOArguments
    enable_ema: bool = setting(False, "also keep a moving average of the actor, saved as actor_ema")
    ema_decay: float = setting(
        0.992, "share of the old average kept per optimizer step", at_least=0, at_most=1, needs="enable_ema"
    )
    offload_reference_model: bool = setting(
        False,
        "keep the frozen reference model in main memory between its uses (with <only_optimize_lora> it takes no memory "
        "anyway: it is the actor without its adapters)",
        neutral=True,
    )
    offload_reward_model: bool = setting(
        False,
        "keep the frozen reward model in main memory between its uses (with <only_optimize_lora> it shares the "
        "critic's weights)",
        neutral=True,
    )
    unsupervised_dataset_name: str | None = setting(
        None, "data set of plain text for the pre-training loss beside PPO (PPO-ptx): a file, folder or hub name",
        neutral=True,  # its texts are compared
    )
    unsupervised_dataset_config_name: str | None = setting(
        None, "configuration of that data set on the hub", needs="unsupervised_dataset_name", neutral=True
    )
    unsup_coef: float = setting(27.8, "weight of the pre-training loss", at_least=0, needs="unsupervised_dataset_name")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_models(("actor", "critic"))
        _refuse_sft_only(self.data)
        self._check_reward_source()
        if self.ppo.reward_normalization is None:  # what is saved beside the model says what was done
            ppo = dataclasses.replace(self.ppo, reward_normalization="off" if self.reward_fn else "saved")
            object.__setattr__(self, "ppo", ppo)

    def _check_reward_source(self) -> None:
        """Refuse to have no source of scores, and what only makes sense for a reward model where there is none."""
        if self.reward_fn is None:
            if self.critic.path is None:
                raise SettingError(
                    "<critic.path> must be given: it is the reward model that scores the answers; or score them with "
                    "<reward_fn>"
                )
            return
        file, colon, name = self.reward_fn.rpartition(":")
        if not (file.endswith(".py") and colon and name.isidentifier()):
            raise SettingError(
                "<reward_fn> is {0}; give the file, a colon and the function's name, such as rewards.py:score",
                repr(self.reward_fn),
            )
        if self.ppo.reward_normalization == "saved":
            raise SettingError(
                "<ppo.reward_normalization> saved reads what step 2 measured of a reward model's scores, but the "
                "scores come from <reward_fn>; choose running or off"
            )
        if self.offload_reward_model:
            raise SettingError(
                "<offload_reward_model> has no effect with <reward_fn>, because no reward model is held; leave "
                "<offload_reward_model> away"
            )

    def model_paths(self) -> tuple[str, ...]:
        """Where the models of the run come from: the actor's, and the critic's if it has its own."""
        return (self.actor.path,) if self.critic.path is None else (self.actor.path, self.critic.path)

    def rollout_size(self, world_size: int) -> int:
        """Prompts per rollout over all processes: batch x batches x processes."""
        return self.rollout.per_device_batch_size * self.rollout.generation_batches * world_size


def _refuse_sft_only(data: DataArguments) -> None:
    if data.sft_only_paths:
        raise SettingError("<data.sft_only_paths> is for step 1 only; leave it away here")

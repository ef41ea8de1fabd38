"""Every setting of the three steps: one documented field per idea, shared by all dialects of the command line.

The dataclasses are frozen and check themselves: an object that exists can be run. None means absent, 0 is a value.
A refusal names the fields as ``<field>``; the command line puts the user's own flags in their place.
"""

import dataclasses
import math
import os

from alpaca_rlhf.arguments.fields import SettingError, Settings, setting

LR_SCHEDULERS = ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup")
DTYPES = ("auto", "fp32", "bf16", "fp16")


def default_cache_dir() -> str:
    """The per-user cache folder: ``$XDG_CACHE_HOME/alpaca_rlhf``, or ``~/.cache/alpaca_rlhf``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "alpaca_rlhf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataArguments(Settings):
    """Which texts, and how they are shared out and encoded."""

    paths: tuple[str, ...] = setting(
        ("Dahoas/rm-static",), "data sets: files, folders or hub names, recognised by their columns"
    )
    split: tuple[float, float, float] = setting(
        (2.0, 4.0, 4.0),
        "disjoint shares of each data set for steps 1, 2 and 3, divided by their sum",
        at_least=0,
    )
    sft_only_paths: tuple[str, ...] = setting(
        (), "further data sets for step 1 only, used whole (MultiTurnAlpaca is unpacked from data/data.zip)"
    )
    probs: tuple[float, ...] | None = setting(
        None,
        "draw records from the data sets of <paths> with these probabilities (one each, divided by their sum); "
        "absent, the data sets are joined and every record is used",
        at_least=0,
    )
    max_samples: int | None = setting(None, "use at most so many records of each data set; absent, all", at_least=1)
    cache_dir: str = setting(
        factory=default_cache_dir, help="folder for downloaded, unpacked and encoded data, reused by later runs"
    )
    template: str = setting(
        "auto",
        "how turns become text: the tokenizer's own chat template if it has one, else human_assistant",
        choices=("auto", "human_assistant", "hh", "openllama2"),
    )
    workers: int | None = setting(
        None, "processes that encode data; absent, as many as the machine and the data justify", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.paths:
            raise SettingError("<paths> is empty; name at least one data set")
        if len(self.split) != 3:
            raise SettingError("<split> has {0} numbers; it needs three, such as 2,4,4", len(self.split))
        if sum(self.split) <= 0:
            raise SettingError("<split> is 0,0,0; at least one step must get a share")
        if self.probs is not None and len(self.probs) != len(self.paths):
            counts = f"<probs> holds {len(self.probs)} and <paths> holds {len(self.paths)}"
            raise SettingError(f"{counts}; give one probability for each data set")
        if self.probs is not None and sum(self.probs) <= 0:
            raise SettingError("<probs> has the sum 0; at least one data set must be drawn from")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments(Settings):
    """One trained model: where it starts, what of it is trained, how it is held."""

    path: str = setting(help="model to start from: a folder or a hub name")
    learning_rate: float = setting(
        help="highest learning rate, reached after the warm-up; 0 trains nothing", at_least=0
    )
    weight_decay: float = setting(0.0, "AdamW weight decay, never on norms and biases", at_least=0)
    lora_learning_rate: float | None = setting(
        None, "highest learning rate of the LoRA weights; absent, <learning_rate>", at_least=0, needs="lora_dim"
    )
    lora_dim: int = setting(0, "rank of the LoRA adapters; 0 = no adapters", at_least=0)
    lora_module_names: tuple[str, ...] = setting(
        (),
        "comma list of linear layers that get adapters, by parts of their names; absent, every linear layer",
        needs="lora_dim",
    )
    lora_alpha: float = setting(
        1.0, "an adapter's output is scaled by <lora_alpha> / <lora_dim>", above=0, needs="lora_dim"
    )
    lora_dropout: float = setting(0.0, "dropout on the adapters' input", at_least=0, below=1, needs="lora_dim")
    zero_stage: int = setting(0, "DeepSpeed ZeRO stage: 0, 1, 2 or 3", at_least=0, at_most=3)
    offload: bool = setting(
        False, "keep the optimizer (at ZeRO stage 3 also the weights) in main memory", needs="zero_stage"
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass: less memory, slower")
    dropout: float | None = setting(
        None, "dropout of the model while it trains; absent, as its configuration says", at_least=0, below=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleArguments(Settings):
    """How long, and along which learning-rate curve."""

    num_train_epochs: int = setting(1, "passes over the data", at_least=1)
    max_steps: int | None = setting(
        None,
        "stop after so many steps (steps 1, 2: optimizer steps; step 3: rollouts); absent, at the end of the data",
        at_least=1,
    )
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", at_least=1)
    lr_scheduler_type: str = setting("cosine", "curve of the learning rate after the warm-up", choices=LR_SCHEDULERS)
    num_warmup_steps: int = setting(help="optimizer steps until the highest learning rate; 0 = no warm-up", at_least=0)
    max_grad_norm: float = setting(
        1.0, "gradients are scaled down to this norm over all parameters; 0 = no clipping", at_least=0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArguments(Settings):
    """What carries the training."""

    deepspeed: bool = setting(
        False, "train with DeepSpeed (one or more processes, ZeRO, offload); absent, one process on plain torch"
    )
    dtype: str = setting(
        "auto",
        "precision of the forward and backward pass; auto = bf16 where the device does it well, else fp32",
        choices=DTYPES,
    )
    local_rank: int = setting(
        -1, "number of this process on its machine; set by the launcher, -1 = no launcher", at_least=-1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputArguments(Settings):
    """What the run leaves behind, and what it shows."""

    output_dir: str | None = setting(
        None, "folder for the model, its settings and the metrics; absent, nothing is saved"
    )
    seed: int = setting(1234, "seed of everything random", at_least=0, at_most=2**32 - 1)
    enable_tensorboard: bool = setting(False, "write TensorBoard event files as well")
    tensorboard_path: str = setting(help="folder of the event files", needs="enable_tensorboard")
    save_adapter: bool = setting(
        False, "also keep the LoRA adapter by itself, beside the merged model", needs="output_dir"
    )
    print_answers_interval: int = setting(
        0, "print sample prompts and answers every so many steps; 0 = never", at_least=0
    )


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
        if self.output.save_adapter and not any(model.lora_dim for model in models.values()):
            ranks = " and ".join(f"<{name}.lora_dim>" for name in names)
            raise SettingError(
                f"<output.save_adapter> has no adapter to keep while {ranks} is 0; give a rank such as 8"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SupervisedArguments(_StepArguments):
    """What steps 1 and 2 share: one model that learns from given records."""

    model: ModelArguments
    per_device_train_batch_size: int = setting(16, "records (step 2: pairs) per process and micro-batch", at_least=1)
    per_device_eval_batch_size: int = setting(16, "the same in the evaluation; changes no result", at_least=1)
    max_seq_len: int = setting(512, "most tokens of prompt and answer together", at_least=1)
    eval_interval: int = setting(
        0, "evaluate every so many optimizer steps; 0 = only before the training and after each epoch", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_models(("model",))
        if self.output.print_answers_interval:
            raise SettingError("<output.print_answers_interval> is for step 3: here no answers are generated")

    def global_batch_size(self, world_size: int) -> int:
        """Records per optimizer step over all processes: micro-batch x accumulation x processes."""
        return self.per_device_train_batch_size * self.schedule.gradient_accumulation_steps * world_size

    def total_steps(self, records: int, world_size: int) -> int:
        """Optimizer steps of the run; an incomplete last step of an epoch counts, since it is trained."""
        return _limited(math.ceil(records / self.global_batch_size(world_size)), self.schedule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step1Arguments(_SupervisedArguments):
    """Supervised fine-tuning."""


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
    clip_ratio: float = setting(0.2, "PPO's epsilon: the policy ratio counts within 1 +- this", above=0)
    clip_value: float = setting(0.2, "new values count within old values +- this", above=0)
    clip_reward: float = setting(5.0, "normalised scores are cut to +- this", above=0)
    gamma: float = setting(1.0, "discount per token", at_least=0, at_most=1)
    lam: float = setting(0.95, "lambda of the generalised advantage estimation", at_least=0, at_most=1)
    whiten_advantages: bool = setting(True, "scale advantages to mean 0, std 1 over the whole batch of all processes")
    reward_normalization: str = setting(
        "saved",
        "mean and std that scores are normalised by: saved = of step 2 (reward_stats.json), running = of this "
        "run so far, off = none",
        choices=("saved", "running", "off"),
    )
    missing_eos_penalty: float | None = setting(
        None, "taken off the normalised score of an answer that does not end by itself; absent, nothing", at_least=0
    )
    max_skipped_steps: int = setting(3, "stop after so many steps in a row with a loss that is not finite", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is not None and self.kl_coef == 0:
            raise SettingError(
                "<kl_coef> is 0 and stays 0 however it is adapted to <kl_target> {0}; give <kl_coef> a start such as "
                "0.05, or leave <kl_target> away",
                self.kl_target,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step3Arguments(_StepArguments):
    """PPO against the reward model."""

    actor: ModelArguments
    critic: ModelArguments
    tokenizer_path: str | None = setting(None, "folder or hub name of the tokenizer; absent, <actor.path>")
    rollout: RolloutArguments
    ppo: PPOArguments
    enable_ema: bool = setting(False, "also keep a moving average of the actor, saved as actor_ema")
    ema_decay: float = setting(
        0.992, "share of the old average kept per optimizer step", at_least=0, at_most=1, needs="enable_ema"
    )
    offload_reference_model: bool = setting(False, "keep the frozen reference model in main memory between its uses")
    offload_reward_model: bool = setting(False, "keep the frozen reward model in main memory between its uses")
    unsupervised_dataset_name: str | None = setting(
        None, "data set of plain text for the pre-training loss beside PPO (PPO-ptx): a file, folder or hub name"
    )
    unsupervised_dataset_config_name: str | None = setting(
        None, "configuration of that data set on the hub", needs="unsupervised_dataset_name"
    )
    unsup_coef: float = setting(27.8, "weight of the pre-training loss", at_least=0, needs="unsupervised_dataset_name")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_models(("actor", "critic"))
        _refuse_sft_only(self.data)

    def rollout_size(self, world_size: int) -> int:
        """Prompts per rollout over all processes: batch x batches x processes."""
        return self.rollout.per_device_batch_size * self.rollout.generation_batches * world_size

    def total_rollouts(self, prompts: int, world_size: int) -> int:
        """Rollouts of the run; an incomplete last one of an epoch counts, since every prompt is trained (P-22)."""
        return _limited(math.ceil(prompts / self.rollout_size(world_size)), self.schedule)

    def optimizer_steps_per_rollout(self, rows_per_device: int) -> int:
        """Optimizer steps of each model for a rollout of so many answers per process; remainders are trained."""
        rows_per_step = self.ppo.per_device_mini_batch_size * self.schedule.gradient_accumulation_steps
        return self.ppo.epochs * math.ceil(rows_per_device / rows_per_step)


def _limited(steps_per_epoch: int, schedule: ScheduleArguments) -> int:
    steps = steps_per_epoch * schedule.num_train_epochs
    return steps if schedule.max_steps is None else min(steps, schedule.max_steps)


def _refuse_sft_only(data: DataArguments) -> None:
    if data.sft_only_paths:
        raise SettingError("<data.sft_only_paths> is for step 1 only; leave it away here")

"""The settings that every step has: data, model, schedule, engine, output. ``schema`` puts them together."""

import dataclasses
import os
from typing import Any

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
        ("Dahoas/rm-static",),
        "data sets: files, folders or hub names, recognised by their columns",
        neutral=True,  # what they hold is compared, wherever it lies
    )
    split: tuple[float, float, float] = setting(
        (2.0, 4.0, 4.0),
        "disjoint shares of each data set for steps 1, 2 and 3, divided by their sum",
        at_least=0,
    )
    sft_only_paths: tuple[str, ...] = setting(
        (), "further data sets for step 1 only, used whole (MultiTurnAlpaca is unpacked from data/data.zip)",
        neutral=True,
    )
    probs: tuple[float, ...] | None = setting(
        None,
        "draw records from the data sets of <paths> with these probabilities (one each, divided by their sum); "
        "absent, the data sets are joined and every record is used",
        at_least=0,
    )
    max_samples: int | None = setting(None, "use at most so many records of each data set; absent, all", at_least=1)
    seed: int = setting(
        1234,
        "seed of the shuffle before the shares are cut; the same in all three steps, or their shares overlap",
        at_least=0,
        at_most=2**32 - 1,
    )
    cache_dir: str = setting(
        factory=default_cache_dir, help="folder for downloaded, unpacked and encoded data, reused by later runs",
        neutral=True,
    )
    template: str = setting(
        "auto",
        "how turns become text: the tokenizer's own chat template if it has one, else human_assistant",
        choices=("auto", "human_assistant", "hh", "openllama2"),
        neutral=True,  # the encoded data are compared
    )
    workers: int | None = setting(
        None, "processes that encode data; absent, as many as the machine and the data justify", at_least=1,
        neutral=True,
    )

    def reading(self) -> dict[str, Any]:
        """The keyword arguments that say which records are read and how they are shared out."""
        names = ("paths", "split", "seed", "cache_dir", "probs", "max_samples", "workers")
        return {name: getattr(self, name) for name in names}

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

    path: str = setting(help="model to start from: a folder or a hub name", neutral=True)  # its weights are compared
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
        "comma list of linear layers that get adapters, by whole parts of their names; absent, every linear layer",
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
    gradient_checkpointing: bool = setting(
        False, "recompute activations in the backward pass: less memory, slower", neutral=True
    )
    dropout: float | None = setting(
        None, "dropout of the model while it trains; absent, as its configuration says", at_least=0, below=1
    )

    def adaptation(self) -> dict[str, Any]:
        """The keyword arguments that say what of the loaded model is adapted."""
        names = ("lora_dim", "lora_module_names", "lora_alpha", "lora_dropout", "gradient_checkpointing")
        return {name: getattr(self, name) for name in names}

    def holding(self) -> dict[str, Any]:
        """The keyword arguments that say how DeepSpeed holds it."""
        return {"zero_stage": self.zero_stage, "offload": self.offload}

    def optimizer(self) -> dict[str, Any]:
        """This model's share of the optimizer's keyword arguments."""
        return {name: getattr(self, name) for name in ("learning_rate", "weight_decay", "lora_learning_rate")}


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
    max_skipped_steps: int = setting(
        3, "stop when more than so many steps in a row have a loss or gradient that is not finite", at_least=1,
        neutral=True,
    )

    def optimizer(self) -> dict[str, Any]:
        """The schedule's share of the optimizer's keyword arguments."""
        return {name: getattr(self, name) for name in ("lr_scheduler_type", "num_warmup_steps", "max_grad_norm")}

    def planned_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: epochs x steps of each, or ``max_steps`` if that is fewer."""
        steps = steps_per_epoch * self.num_train_epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)


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
        neutral=True,  # the precision it leads to is compared
    )
    local_rank: int = setting(
        -1, "number of this process on its machine; set by the launcher, -1 = no launcher", at_least=-1, neutral=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputArguments(Settings):
    """What the run leaves behind, and what it shows."""

    output_dir: str | None = setting(
        None, "folder for the model, its settings and the metrics; absent, nothing is saved", neutral=True
    )
    seed: int = setting(1234, "seed of everything random but the shares of the data", at_least=0, at_most=2**32 - 1)
    save_steps: int = setting(
        0, "write a checkpoint every so many optimizer steps and at the end; 0 = only when SIGTERM stops the run",
        at_least=0, needs="output_dir", neutral=True,
    )  # fmt: skip
    keep_checkpoints: int = setting(
        2, "keep so many newest checkpoints; 0 = all", at_least=0, needs="output_dir", neutral=True
    )
    resume: str | None = setting(
        None, "go on from the newest complete checkpoint of this folder (an earlier run's <output_dir>, or one "
        "checkpoint); auto, or no folder = of <output_dir>, and start anew where there is none yet",
        needs="output_dir", neutral=True,
    )  # fmt: skip
    enable_tensorboard: bool = setting(False, "write TensorBoard event files as well", neutral=True)
    tensorboard_path: str = setting(help="folder of the event files", needs="enable_tensorboard", neutral=True)
    save_adapter: bool = setting(
        False, "also keep the LoRA adapter by itself, beside the merged model", needs="output_dir", neutral=True
    )
    print_answers_interval: int = setting(
        0, "print sample prompts and answers every so many steps; 0 = never", at_least=0, neutral=True
    )
    inspect: int = setting(
        0, "print so many training records as the model will see them, then stop before any model loads", at_least=0,
        neutral=True,
    )

    def checkpoints(self) -> dict[str, Any]:
        """The keyword arguments that say where and when checkpoints are written, and where to go on from.

        With ``inspect`` nothing trains: there are none.
        """
        if self.inspect:
            return {"output_dir": None, "every": 0, "keep": 0, "resume": None}
        when = {"every": self.save_steps, "keep": self.keep_checkpoints, "resume": self.resume}
        return {"output_dir": self.output_dir, **when}

    def tracking(self) -> dict[str, Any]:
        """The keyword arguments that say where the log goes."""
        return {"tensorboard": self.enable_tensorboard, "tensorboard_path": self.tensorboard_path}

"""The command lines of the three step programs: alpaca-rlhf's flags, DeepSpeed-Chat's newer spellings, and our own.

One row per idea; the first spelling is the one that messages use. What a flag means is written in the schema. Defaults
are those of alpaca-rlhf but for: ``--data_split`` 2,4,4 (DeepSpeed-Chat's), ``--seed`` 1234 in step 3 too, the cache in
the user's own folder, ``--lora_module_name`` every linear layer instead of OPT's ``decoder.layers.``.
"""

from collections.abc import Sequence

from alpaca_rlhf.arguments.parser import (
    FOLDER,
    INTEGER,
    NAMES,
    NUMBER,
    NUMBERS,
    SWITCH,
    TEXT,
    TRUTH,
    WORDS,
    Dialect,
    Kind,
    Row,
)
from alpaca_rlhf.arguments.schema import Step1Arguments, Step2Arguments, Step3Arguments


def _row(group: str, flags: str, fields: str, kind: Kind, **more: object) -> Row:
    """A row from blank-separated flags and fields."""
    return Row(tuple(flags.split()), tuple(fields.split()), kind, group, **more)  # type: ignore[arg-type]


def _data(step: int) -> list[Row]:
    group = "data"
    sft_only = _row(group, "--sft_only_data_path", "data.sft_only_paths", WORDS)
    if step != 1:
        why = "its texts are for step 1 only; leave it away here"
        sft_only = _row(group, "--sft_only_data_path", "", WORDS, refused=why)
    return [
        _row(group, "--data_path", "data.paths", WORDS),
        _row(group, "--data_split", "data.split", NUMBERS),
        sft_only,
        _row(group, "--dataset_probs", "data.probs", NUMBERS),
        _row(group, "--max_samples", "data.max_samples", INTEGER),
        _row(group, "--data_seed", "data.seed", INTEGER),
        _row(group, "--data_output_path", "data.cache_dir", TEXT),
        _row(group, "--template", "data.template", TEXT),
        _row(group, "--preprocessing_num_workers", "data.workers", INTEGER),
    ]


def _model(group: str, field: str, prefix: str, rate: float, dropout_off: str) -> list[Row]:
    """The flags of one model; ``prefix`` is what its spellings begin with, ``dropout_off`` the switch of old."""
    return [
        _row(group, f"--{prefix}model_name_or_path", f"{field}.path", TEXT),
        _row(group, f"--{prefix}learning_rate", f"{field}.learning_rate", NUMBER, default=rate),
        _row(group, f"--{prefix}weight_decay", f"{field}.weight_decay", NUMBER),
        _row(group, f"--{prefix}dropout", f"{field}.dropout", NUMBER),
        _row(group, dropout_off, f"{field}.dropout", SWITCH, value=0.0, note=f"the same as --{prefix}dropout 0"),
        _row(group, f"--{prefix}gradient_checkpointing", f"{field}.gradient_checkpointing", SWITCH),
        _row(group, f"--{prefix}zero_stage", f"{field}.zero_stage", INTEGER),
        _row(group, f"--{prefix}lora_dim", f"{field}.lora_dim", INTEGER),
        _row(group, f"--{prefix}lora_module_name", f"{field}.lora_module_names", NAMES),
        _row(group, f"--{prefix}lora_learning_rate", f"{field}.lora_learning_rate", NUMBER),
        _row(group, f"--{prefix}lora_alpha", f"{field}.lora_alpha", NUMBER),
        _row(group, f"--{prefix}lora_dropout", f"{field}.lora_dropout", NUMBER),
    ]


def _schedule(warmup: int) -> list[Row]:
    group = "schedule"
    return [
        _row(group, "--num_train_epochs", "schedule.num_train_epochs", INTEGER),
        _row(group, "--gradient_accumulation_steps", "schedule.gradient_accumulation_steps", INTEGER),
        _row(group, "--lr_scheduler_type", "schedule.lr_scheduler_type", TEXT),
        _row(group, "--num_warmup_steps", "schedule.num_warmup_steps", INTEGER, default=warmup),
        _row(group, "--max_grad_norm", "schedule.max_grad_norm", NUMBER),
        _row(group, "--only_optimize_lora", "only_optimize_lora", SWITCH),
        _row(group, "--max_skipped_steps", "schedule.max_skipped_steps", INTEGER),
        _row(group, "--max_steps", "schedule.max_steps", INTEGER),
    ]


def _engine(offload: str) -> list[Row]:
    group = "engine"
    return [
        _row(group, "--deepspeed", "engine.deepspeed", SWITCH),
        _row(group, "--offload", offload, SWITCH),
        _row(group, "--dtype", "engine.dtype", TEXT),
        _row(group, "--local_rank --local-rank", "engine.local_rank", INTEGER),
    ]


def _output(step: int) -> list[Row]:
    group = "output"
    return [
        _row(group, "--output_dir", "output.output_dir", TEXT),
        _row(group, "--seed", "output.seed", INTEGER),
        _row(group, "--save_steps", "output.save_steps", INTEGER),
        _row(group, "--keep_checkpoints", "output.keep_checkpoints", INTEGER),
        _row(group, "--resume", "output.resume", FOLDER),
        _row(group, "--save_adapter", "output.save_adapter", SWITCH),
        _row(group, "--inspect", "output.inspect", INTEGER),
        _row(group, "--enable_tensorboard", "output.enable_tensorboard", SWITCH),
        _row(group, "--tensorboard_path", "output.tensorboard_path", TEXT, default=f"step{step}_tensorboard"),
    ]


_ACCEPTED = "accepted for old commands"
_REFUSED = "refused with the reason"


def _compatibility() -> list[Row]:
    """Flags of the predecessors, of every step, that set nothing here: those kept true anyway and those refused."""
    settings = "DeepSpeed is set up from this program's own options; use those"
    end = "an answer ends with the tokenizer's own end-of-text token; set that in the tokenizer"
    fp32 = "always so here: log-probabilities and losses are computed in float32"
    return [
        _row(_ACCEPTED, "--compute_fp32_loss", "", SWITCH, note=fp32),
        _row(_REFUSED, "--deepspeed_config --deepscale_config", "", TEXT, refused=settings),
        _row(_REFUSED, "--deepscale", "", SWITCH, refused="this is the old name of --deepspeed; use that"),
        _row(_REFUSED, "--add_eot_token", "", SWITCH, refused=end),
        _row(_REFUSED, "--eot_token", "", TEXT, refused=end),
    ]


def _padding() -> Row:
    note = "not needed here, for any value: the score is read at the last real token wherever the padding stands"
    return _row(_ACCEPTED, "--num_padding_at_beginning", "", INTEGER, note=note)


def _supervised(step: int, rate: float) -> list[Row]:
    group = "batches and evaluation"
    return [
        *_data(step),
        *_model("model and LoRA", "model", "", rate, "--disable_dropout"),
        _row(group, "--per_device_train_batch_size", "per_device_train_batch_size", INTEGER),
        _row(group, "--per_device_eval_batch_size", "per_device_eval_batch_size", INTEGER),
        _row(group, "--max_seq_len", "max_seq_len", INTEGER),
        _row(group, "--eval_interval", "eval_interval", INTEGER),
        *_schedule(warmup=0),
        *_engine("model.offload"),
        *_output(step),
        *_compatibility(),
    ]


def _step1() -> list[Row]:
    printed = "always so here: the progress bar and metrics.jsonl show every step's loss"
    return [
        *_supervised(1, rate=1e-3),
        _row("supervised fine-tuning", "--train_prompt", "train_prompt", SWITCH),
        _row(_ACCEPTED, "--print_loss", "", SWITCH, note=printed),
    ]


def _step2() -> list[Row]:
    whole = "an evaluation always uses the whole evaluation part; leave it away, or limit the data with --max_samples"
    return [
        *_supervised(2, rate=5e-5),
        _row("reward model", "--pair_loss", "pair_loss", TEXT),
        _padding(),
        _row(_REFUSED, "--eval_iters", "", INTEGER, refused=whole),
    ]


def _step3() -> list[Row]:
    shared = "models shared by actor and critic"
    return [
        *_data(3),
        *_model("actor", "actor", "actor_", 9.65e-6, "--disable_actor_dropout"),
        *_model("critic and reward model", "critic", "critic_", 5e-6, "--disable_critic_dropout"),
        _row("critic and reward model", "--reward_fn", "reward_fn", TEXT),
        _row(shared, "--tokenizer_name_or_path", "tokenizer_path", TEXT),
        _row(shared, "--enable_ema", "enable_ema", SWITCH),
        _row(shared, "--ema_decay", "ema_decay", NUMBER),
        _row(shared, "--offload_reference_model", "offload_reference_model", SWITCH),
        _row(shared, "--offload_reward_model", "offload_reward_model", SWITCH),
        *_rollout(),
        *_ppo(),
        *_schedule(warmup=100),
        _row(
            "schedule",
            "--test_stop_step",
            "schedule.max_steps",
            INTEGER,
            beside="--enable_test_mode",
            note="DeepSpeed-Chat's spelling of --max_steps",
        ),
        _row(
            "schedule",
            "--enable_test_mode",
            "schedule.max_steps",
            SWITCH,
            value=1,
            weak=True,
            note="stop after --test_stop_step rollouts, after one if that is not given",
        ),
        *_engine("actor.offload critic.offload"),
        *_output(3),
        _row("output", "--print_answers_interval", "output.print_answers_interval", INTEGER),
        _row(
            "output",
            "--print_answers",
            "output.print_answers_interval",
            SWITCH,
            value=1,
            weak=True,
            note="print sample answers at every step, or at every --print_answers_interval",
        ),
        *_compatibility(),
        _padding(),
        _row(
            _ACCEPTED,
            "--align_overflow",
            "",
            SWITCH,
            note="always so here: a step with a number that is not finite is skipped by all models and processes",
        ),
        *_hybrid_engine(),
    ]


def _rollout() -> list[Row]:
    group = "rollout: prompts and sampled answers"
    batch = "--per_device_train_batch_size --per_device_generation_batch_size"
    return [
        _row(group, batch, "rollout.per_device_batch_size", INTEGER),
        _row(group, "--generation_batch_numbers --generation_batches", "rollout.generation_batches", INTEGER),
        _row(group, "--max_prompt_seq_len", "rollout.max_prompt_len", INTEGER),
        _row(group, "--max_answer_seq_len", "rollout.max_answer_len", INTEGER),
        _row(group, "--temperature", "rollout.temperature", NUMBER),
        _row(group, "--top_p", "rollout.top_p", NUMBER),
        _row(group, "--top_k", "rollout.top_k", INTEGER),
    ]


def _ppo() -> list[Row]:
    group = "PPO"
    batch = "--per_device_mini_train_batch_size --per_device_training_batch_size"
    return [
        _row(group, "--ppo_epochs", "ppo.epochs", INTEGER),
        _row(group, batch, "ppo.per_device_mini_batch_size", INTEGER),
        _row(group, "--kl_coef --init_kl_coef", "ppo.kl_coef", NUMBER),
        _row(group, "--kl_estimator", "ppo.kl_estimator", TEXT),
        _row(group, "--kl_target", "ppo.kl_target", NUMBER),
        _row(group, "--kl_horizon", "ppo.kl_horizon", INTEGER),
        _row(group, "--kl_alarm", "ppo.kl_alarm", NUMBER),
        _row(group, "--kl_stop", "ppo.kl_stop", NUMBER),
        _row(group, "--clip_ratio --eps_clip", "ppo.clip_ratio", NUMBER),
        _row(group, "--clip_value --value_clip", "ppo.clip_value", NUMBER),
        _row(group, "--clip_reward", "ppo.clip_reward", NUMBER),
        _row(group, "--gamma", "ppo.gamma", NUMBER),
        _row(group, "--lam --lambd", "ppo.lam", NUMBER),
        _row(group, "--whiten_advantages", "ppo.whiten_advantages", TRUTH),
        _row(
            group,
            "--no_whiten_advantages",
            "ppo.whiten_advantages",
            SWITCH,
            value=False,
            note="the same as --whiten_advantages false",
        ),
        _row(group, "--reward_normalization", "ppo.reward_normalization", TEXT),
        _row(group, "--missing_eos_penalty", "ppo.missing_eos_penalty", NUMBER),
        _row(group, "--unsupervised_dataset_name", "unsupervised_dataset_name", TEXT),
        _row(group, "--unsupervised_dataset_config_name", "unsupervised_dataset_config_name", TEXT),
        _row(group, "--unsup_coef", "unsup_coef", NUMBER),
    ]


def _hybrid_engine() -> list[Row]:
    why = "DeepSpeed's hybrid engine is not used here; leave it away, generation needs no option for it"
    int8 = "frozen weights in int8 (ZeRO++) are not offered; save memory with --actor_zero_stage 3 or --offload"
    return [
        _row(_REFUSED, "--enable_hybrid_engine", "", SWITCH, refused=why),
        _row(_REFUSED, "--unpin_actor_parameters", "", SWITCH, refused=why),
        _row(_REFUSED, "--release_inference_cache", "", SWITCH, refused=why),
        _row(_REFUSED, "--inference_tp_size", "", INTEGER, refused=why, harmless=1),
        _row(_REFUSED, "--tp_gather_partition_size", "", INTEGER, refused=why, harmless=8),
        _row(_REFUSED, "--enable_mixed_precision_lora", "", SWITCH, refused=int8),
    ]


STEP1 = Dialect(
    "step1_supervised_finetuning/main.py",
    "Step 1: supervised fine-tuning of a language model on conversations.",
    Step1Arguments,
    tuple(_step1()),
)
STEP2 = Dialect(
    "step2_reward_model_finetuning/main.py",
    "Step 2: a reward model from pairs of a preferred and a rejected answer.",
    Step2Arguments,
    tuple(_step2()),
)
STEP3 = Dialect(
    "step3_rlhf_finetuning/main.py",
    "Step 3: PPO of step 1's model against step 2's reward model.",
    Step3Arguments,
    tuple(_step3()),
)


def parse_step1(argv: Sequence[str] | None = None) -> Step1Arguments:
    """Settings of step 1 from its command line (None: the program's own). Raises UserError; ``--help`` exits with 0."""
    return STEP1.parse(argv)


def parse_step2(argv: Sequence[str] | None = None) -> Step2Arguments:
    """Settings of step 2 from its command line (None: the program's own). Raises UserError; ``--help`` exits with 0."""
    return STEP2.parse(argv)


def parse_step3(argv: Sequence[str] | None = None) -> Step3Arguments:
    """Settings of step 3 from its command line (None: the program's own). Raises UserError; ``--help`` exits with 0."""
    return STEP3.parse(argv)

"""The three command lines: the seeds' commands, every flag of both predecessors, and that each flag does something."""

import dataclasses
import re

import pytest

from alpaca_rlhf.arguments import deepspeed_chat, parser
from alpaca_rlhf.arguments.errors import UserError

DIALECTS = {1: deepspeed_chat.STEP1, 2: deepspeed_chat.STEP2, 3: deepspeed_chat.STEP3}
REQUIRED = {
    1: ["--model_name_or_path", "m"],
    2: ["--model_name_or_path", "m"],
    3: ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"],
}
ROWS = [(step, row) for step, dialect in DIALECTS.items() for row in dialect.rows]


def fields_of(step, words):
    """Dotted path -> value of the parsed command line."""
    return dict(_leaves(DIALECTS[step].parse(REQUIRED[step] + words)))


def _leaves(settings, prefix=""):
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


# --- the seeds' own commands ---------------------------------------------------------------------------------

SEED_1 = (
    "--sft_only_data_path MultiTurnAlpaca --data_output_path /cache/ --model_name_or_path /llama "
    "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --max_seq_len 512 --learning_rate 3e-4 "
    "--num_train_epochs 1 --gradient_accumulation_steps 8 --num_warmup_steps 100 --output_dir /out/actor --lora_dim 8 "
    "--lora_module_name q_proj,k_proj --only_optimize_lora --deepspeed --zero_stage 2"
)
SEED_2 = (
    "--data_output_path /cache/ --model_name_or_path /llama --num_padding_at_beginning 0 "
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 64 --learning_rate 5e-4 --num_train_epochs 1 "
    "--gradient_accumulation_steps 1 --num_warmup_steps 0 --zero_stage 2 --deepspeed --output_dir /out/critic "
    "--lora_dim 8 --lora_module_name q_proj,k_proj --only_optimize_lora"
)
SEED_3 = (
    "--data_output_path /cache/ --actor_model_name_or_path /out/actor/ --tokenizer_name_or_path /llama "
    "--critic_model_name_or_path /out/critic --actor_zero_stage 2 --critic_zero_stage 2 --num_padding_at_beginning 0 "
    "--per_device_train_batch_size 4 --per_device_mini_train_batch_size 4 --ppo_epochs 2 "
    "--actor_learning_rate 9.65e-6 --critic_learning_rate 5e-6 --gradient_accumulation_steps 1 --deepspeed "
    "--actor_lora_dim 8 --actor_lora_module_name q_proj --critic_lora_dim 8 --critic_lora_module_name q_proj,k_proj "
    "--only_optimize_lora --output_dir /out/final"
)
DATA = {
    "paths": ["Dahoas/rm-static"], "split": [2, 4, 4], "sft_only_paths": [], "probs": None, "max_samples": None,
    "seed": 1234, "cache_dir": "/cache/", "template": "auto", "workers": None,
}  # fmt: skip
MODEL = {
    "path": "/llama", "weight_decay": 0, "lora_learning_rate": None, "lora_dim": 8,
    "lora_module_names": ["q_proj", "k_proj"], "lora_alpha": 1, "lora_dropout": 0, "zero_stage": 2, "offload": False,
    "gradient_checkpointing": False, "dropout": None,
}  # fmt: skip
SCHEDULE = {
    "num_train_epochs": 1, "max_steps": None, "gradient_accumulation_steps": 1, "lr_scheduler_type": "cosine",
    "num_warmup_steps": 0, "max_grad_norm": 1, "max_skipped_steps": 3,
}  # fmt: skip
ENGINE = {"deepspeed": True, "dtype": "auto", "local_rank": 1}
OUTPUT = {"seed": 1234, "enable_tensorboard": False, "save_adapter": False, "print_answers_interval": 0,
          "save_steps": 0, "keep_checkpoints": 2, "resume": None, "inspect": 0}  # fmt: skip


def test_seed_command_of_step_1_means_what_it_says():
    parsed = deepspeed_chat.parse_step1(["--local_rank=1", *SEED_1.split()])
    assert parsed.to_dict() == {
        "data": DATA | {"sft_only_paths": ["MultiTurnAlpaca"]},
        "model": MODEL | {"learning_rate": 3e-4},
        "schedule": SCHEDULE | {"gradient_accumulation_steps": 8, "num_warmup_steps": 100},
        "engine": ENGINE,
        "output": OUTPUT | {"output_dir": "/out/actor", "tensorboard_path": "step1_tensorboard"},
        "only_optimize_lora": True,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_seq_len": 512,
        "eval_interval": 0,
        "train_prompt": False,
    }


def test_seed_command_of_step_2_means_what_it_says():
    parsed = deepspeed_chat.parse_step2(["--local_rank=1", *SEED_2.split()])
    assert parsed.to_dict() == {
        "data": DATA,
        "model": MODEL | {"learning_rate": 5e-4},
        "schedule": SCHEDULE,
        "engine": ENGINE,
        "output": OUTPUT | {"output_dir": "/out/critic", "tensorboard_path": "step2_tensorboard"},
        "only_optimize_lora": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 64,
        "max_seq_len": 512,
        "eval_interval": 0,
        "pair_loss": "end",
    }


def test_seed_command_of_step_3_means_what_it_says():
    parsed = deepspeed_chat.parse_step3(["--local_rank=1", *SEED_3.split()])
    assert parsed.to_dict() == {
        "data": DATA,
        "actor": MODEL | {"path": "/out/actor/", "learning_rate": 9.65e-6, "lora_module_names": ["q_proj"]},
        "critic": MODEL | {"path": "/out/critic", "learning_rate": 5e-6},
        "reward_fn": None,
        "tokenizer_path": "/llama",
        "schedule": SCHEDULE | {"num_warmup_steps": 100},
        "engine": ENGINE,
        "output": OUTPUT | {"output_dir": "/out/final", "tensorboard_path": "step3_tensorboard"},
        "only_optimize_lora": True,
        "rollout": {
            "per_device_batch_size": 4, "generation_batches": 1, "max_prompt_len": 256, "max_answer_len": 256,
            "temperature": 1, "top_p": 1, "top_k": 0,
        },
        "ppo": {
            "epochs": 2, "per_device_mini_batch_size": 4, "kl_coef": 0.05, "kl_estimator": "k1", "kl_target": None,
            "kl_horizon": 10000, "kl_alarm": None, "kl_stop": None, "clip_ratio": 0.2, "clip_value": 0.2,
            "clip_reward": 5, "gamma": 1, "lam": 0.95, "whiten_advantages": True, "reward_normalization": "saved",
            "missing_eos_penalty": None,
        },
        "enable_ema": False,
        "ema_decay": 0.992,
        "offload_reference_model": False,
        "offload_reward_model": False,
        "unsupervised_dataset_name": None,
        "unsupervised_dataset_config_name": None,
        "unsup_coef": 27.8,
    }  # fmt: skip


def test_defaults_are_alpaca_rlhfs():
    one, two, three = (dialect.parse(REQUIRED[step]) for step, dialect in DIALECTS.items())
    assert (one.model.learning_rate, two.model.learning_rate) == (1e-3, 5e-5)
    assert (three.actor.learning_rate, three.critic.learning_rate) == (9.65e-6, 5e-6)
    assert [step.schedule.num_warmup_steps for step in (one, two, three)] == [0, 0, 100]
    assert {step.output.seed for step in (one, two, three)} == {1234}
    assert not any(step.engine.deepspeed for step in (one, two, three))


# --- every flag of the predecessors is known -------------------------------------------------------------------

COMMON = """data_path data_split data_output_path num_train_epochs lr_scheduler_type gradient_accumulation_steps
    num_warmup_steps output_dir seed local_rank offload only_optimize_lora deepspeed deepspeed_config deepscale
    deepscale_config dtype compute_fp32_loss enable_tensorboard tensorboard_path add_eot_token"""
SUPERVISED = """model_name_or_path per_device_train_batch_size per_device_eval_batch_size max_seq_len learning_rate
    weight_decay gradient_checkpointing disable_dropout dropout zero_stage lora_dim lora_module_name
    lora_learning_rate"""
PREDECESSORS = {
    1: f"{COMMON} {SUPERVISED} sft_only_data_path eot_token print_loss",
    2: f"{COMMON} {SUPERVISED} num_padding_at_beginning eval_interval eval_iters",
    3: f"""{COMMON} unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef actor_model_name_or_path
    tokenizer_name_or_path critic_model_name_or_path num_padding_at_beginning per_device_train_batch_size
    per_device_mini_train_batch_size generation_batch_numbers ppo_epochs max_prompt_seq_len max_answer_seq_len
    actor_learning_rate critic_learning_rate actor_weight_decay critic_weight_decay preprocessing_num_workers
    enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size tp_gather_partition_size
    offload_reference_model actor_zero_stage critic_zero_stage actor_gradient_checkpointing
    critic_gradient_checkpointing disable_actor_dropout disable_critic_dropout actor_lora_dim actor_lora_module_name
    critic_lora_dim critic_lora_module_name enable_ema per_device_generation_batch_size
    per_device_training_batch_size generation_batches actor_dropout critic_dropout offload_reward_model
    actor_lora_learning_rate critic_lora_learning_rate enable_mixed_precision_lora align_overflow print_answers
    print_answers_interval enable_test_mode test_stop_step""",
}


@pytest.mark.parametrize("step", DIALECTS)
def test_every_flag_of_the_predecessors_is_known(step):
    known = {flag for row in DIALECTS[step].rows for flag in row.flags}
    assert {f"--{name}" for name in PREDECESSORS[step].split()} <= known


@pytest.mark.parametrize("step", DIALECTS)
def test_help_names_every_flag_with_its_meaning(step, capsys):
    with pytest.raises(SystemExit):
        DIALECTS[step].parse(["--help"])
    printed = capsys.readouterr().out
    words = set(re.findall(r"--[\w-]+", printed))
    assert {flag for row in DIALECTS[step].rows for flag in row.flags} <= words
    assert "<" not in printed  # every field that a help text mentions is spelled as a flag
    for line in re.findall(r"^  (--\S+)$\n(?!  )", printed, re.M):
        pytest.fail(f"{line} has no help text")
    for row in DIALECTS[step].rows:
        assert row.refused or row.note or row.fields


def test_help_shows_the_dialects_default_and_what_is_required(capsys):
    with pytest.raises(SystemExit):
        deepspeed_chat.parse_step2(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "nothing (default: 5e-05)" in printed
    assert "hub name (required)" in printed
    assert "(default: step2_tensorboard)" in printed


# --- P-24: every flag sets exactly its fields, and every field has a flag --------------------------------------

EXAMPLES = {
    parser.INTEGER: ("2", 2), parser.NUMBER: ("0.5", 0.5), parser.TEXT: ("word", "word"),
    parser.WORDS: ("a b", ("a", "b")), parser.NAMES: ("a,b", ("a", "b")), parser.SWITCH: ("", True),
    parser.TRUTH: ("false", False), parser.FOLDER: ("word", "word"),
}  # fmt: skip
SPECIAL = {
    "data.split": ("1,2,3", (1, 2, 3)), "data.probs": ("1", (1,)), "engine.local_rank": ("0", 0),
    "reward_fn": ("r.py:score", "r.py:score"), "output.keep_checkpoints": ("3", 3),
}  # fmt: skip
CHOICES = {
    "data.template": "hh", "engine.dtype": "bf16", "schedule.lr_scheduler_type": "linear", "pair_loss": "per_token",
    "ppo.kl_estimator": "k3", "ppo.reward_normalization": "off",
}  # fmt: skip
COMPANIONS = {
    "enable_tensorboard": "--enable_tensorboard", "output_dir": "--output_dir o", "kl_target": "--kl_target 6",
    "enable_ema": "--enable_ema", "unsupervised_dataset_name": "--unsupervised_dataset_name d",
}  # fmt: skip


def companions(step, row):
    """The further words without which this row's flag is refused."""
    words = row.beside.split()
    for path in row.fields:
        group, _, name = path.rpartition(".")
        prefix = f"--{group}_" if group in ("actor", "critic") else "--"
        needed = parser._schema_field(DIALECTS[step].schema, path).metadata["needs"]
        if needed == "lora_dim":
            words += [f"{prefix}lora_dim", "4"]
        elif needed == "zero_stage":
            words += ["--deepspeed", f"{prefix}zero_stage", "1"]
        elif needed:
            words += COMPANIONS[needed].split()
        if name == "zero_stage":
            words.append("--deepspeed")
        if name in ("save_adapter", "only_optimize_lora"):
            ranks = ("--actor_lora_dim", "--critic_lora_dim") if step == 3 else ("--lora_dim",)
            words += [word for rank in ranks for word in (rank, "4")]
        if name == "save_adapter":
            words.append("--only_optimize_lora")
        if name == "reward_fn":  # it changes the default of this one
            words += ["--reward_normalization", "off"]
    return words


SETTING = [(step, row, flag) for step, row in ROWS if row.fields for flag in row.flags]


@pytest.mark.parametrize(("step", "row", "flag"), SETTING, ids=[f"{step}{flag}" for step, _, flag in SETTING])
def test_P24_every_flag_sets_its_fields_and_no_others(step, row, flag):
    path = row.fields[0]
    words, expected = SPECIAL.get(path) or EXAMPLES[row.kind]
    if path in CHOICES:
        words = expected = CHOICES[path]
    if row.value is not parser._ABSENT:
        expected = row.value
    others = companions(step, row)
    if flag in REQUIRED[step]:
        place = REQUIRED[step].index(flag)
        before = fields_of(step, [])
        after = dict(_leaves(DIALECTS[step].parse(
            REQUIRED[step][:place] + [flag, words] + REQUIRED[step][place + 2 :]
        )))  # fmt: skip
    else:
        before = fields_of(step, others)
        after = fields_of(step, [*others, flag, *words.split()])
    changed = {name for name in after if after[name] != before[name]}
    assert changed == set(row.fields)
    assert all(after[name] == expected for name in row.fields)


@pytest.mark.parametrize("step", DIALECTS)
def test_P24_every_field_has_a_flag(step):
    reachable = {path for row in DIALECTS[step].rows for path in row.fields}
    elsewhere = {1: {"output.print_answers_interval"}, 2: {"output.print_answers_interval", "data.sft_only_paths"},
                 3: {"data.sft_only_paths"}}  # fmt: skip
    assert set(parser._leaves(DIALECTS[step].schema)) - reachable == elsewhere[step]


REFUSED = [(step, row, flag) for step, row in ROWS if row.refused for flag in row.flags]


@pytest.mark.parametrize(("step", "row", "flag"), REFUSED, ids=[f"{step}{flag}" for step, _, flag in REFUSED])
def test_refused_flag_is_answered_with_the_reason(step, row, flag):
    words = EXAMPLES[row.kind][0].split()
    with pytest.raises(UserError) as refusal:
        fields_of(step, [flag, *words])
    assert str(refusal.value) == f"{flag} is not supported: {row.refused}"
    if row.harmless is not parser._ABSENT:
        assert fields_of(step, [flag, str(row.harmless)]) == fields_of(step, [])


ACCEPTED = [(step, row, flag) for step, row in ROWS if not row.fields and not row.refused for flag in row.flags]


@pytest.mark.parametrize(("step", "row", "flag"), ACCEPTED, ids=[f"{step}{flag}" for step, _, flag in ACCEPTED])
def test_accepted_flag_changes_nothing_and_its_help_says_why(step, row, flag):
    assert fields_of(step, [flag, *EXAMPLES[row.kind][0].split()]) == fields_of(step, [])
    assert row.note.startswith(("always so here", "not needed here"))


# --- flags that belong together --------------------------------------------------------------------------------


def test_test_mode_stops_at_its_step_and_after_one_without():
    assert fields_of(3, ["--enable_test_mode"])["schedule.max_steps"] == 1
    for words in ("--enable_test_mode --test_stop_step 5", "--test_stop_step 5 --enable_test_mode"):
        assert fields_of(3, words.split())["schedule.max_steps"] == 5
    with pytest.raises(UserError, match="--test_stop_step has no effect without --enable_test_mode"):
        fields_of(3, ["--test_stop_step", "5"])
    with pytest.raises(UserError, match="--test_stop_step and --max_steps set the same thing"):
        fields_of(3, "--enable_test_mode --test_stop_step 5 --max_steps 6".split())


def test_answers_are_printed_at_every_step_or_at_the_interval():
    assert fields_of(3, ["--print_answers"])["output.print_answers_interval"] == 1
    for words in ("--print_answers --print_answers_interval 5", "--print_answers_interval 5"):
        assert fields_of(3, words.split())["output.print_answers_interval"] == 5


def test_offload_of_step_3_holds_for_both_models():
    words = "--deepspeed --offload --actor_zero_stage 2 --critic_zero_stage 1".split()
    parsed = fields_of(3, words)
    assert parsed["actor.offload"] and parsed["critic.offload"]
    with pytest.raises(UserError, match="--offload has no effect without --critic_zero_stage"):
        fields_of(3, words[:-2])


def test_a_reward_function_needs_no_critic_of_its_own_and_no_saved_statistics():
    actor = ["--actor_model_name_or_path", "a"]
    parsed = deepspeed_chat.parse_step3([*actor, "--reward_fn", "~/r.py:score"])
    assert parsed.critic.path is None and parsed.model_paths() == ("a",)
    assert parsed.ppo.reward_normalization == "off" and parsed.to_dict()["ppo"]["reward_normalization"] == "off"
    assert parsed.reward_fn.endswith("/r.py:score") and not parsed.reward_fn.startswith("~")
    assert deepspeed_chat.parse_step3(REQUIRED[3]).ppo.reward_normalization == "saved"
    assert deepspeed_chat.parse_step3(REQUIRED[3]).model_paths() == ("a", "c")
    running = deepspeed_chat.parse_step3([*actor, "--reward_fn", "r.py:score", "--reward_normalization", "running"])
    assert running.ppo.reward_normalization == "running"
    with pytest.raises(UserError, match="--critic_model_name_or_path must be given.*--reward_fn"):
        deepspeed_chat.parse_step3(actor)


def test_M05_no_setting_is_a_secret():
    for dialect in DIALECTS.values():
        for path in parser._leaves(dialect.schema):
            assert not re.search(r"key|token$|password|secret|wandb", path)

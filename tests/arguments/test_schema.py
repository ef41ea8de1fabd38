"""The settings refuse what cannot be meant, in one sentence, and nothing else."""

import dataclasses
import json
import math

import pytest

from alpaca_rlhf.arguments.deepspeed_chat import STEP1, STEP2, STEP3
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.fields import SettingError, spelled
from alpaca_rlhf.arguments.parser import _leaves
from alpaca_rlhf.arguments.schema import (
    CriticArguments,
    DataArguments,
    EngineArguments,
    ModelArguments,
    OutputArguments,
    PPOArguments,
    RolloutArguments,
    ScheduleArguments,
    Step1Arguments,
    Step2Arguments,
    Step3Arguments,
)


def model(**changes):
    return ModelArguments(**{"path": "m", "learning_rate": 1e-3} | changes)


def critic(**changes):
    return CriticArguments(**{"learning_rate": 1e-3} | changes)


def schedule(**changes):
    return ScheduleArguments(**{"num_warmup_steps": 0} | changes)


def output(**changes):
    return OutputArguments(**{"tensorboard_path": "board"} | changes)


def common(**changes):
    parts = {"data": DataArguments(), "schedule": schedule(), "engine": EngineArguments(), "output": output()}
    return parts | changes


def step1(**changes):
    return Step1Arguments(**common() | {"model": model()} | changes)


def step3(**changes):
    parts = {"actor": model(), "critic": critic(path="m"), "rollout": RolloutArguments(), "ppo": PPOArguments()}
    return Step3Arguments(**common() | parts | changes)


def test_defaults_are_those_of_the_contract():
    assert DataArguments().split == (2, 4, 4)
    assert DataArguments().paths == ("Dahoas/rm-static",)
    assert step3().ppo == PPOArguments(
        epochs=1, per_device_mini_batch_size=16, kl_coef=0.05, kl_estimator="k1", kl_target=None, kl_horizon=10000,
        kl_alarm=None, kl_stop=None, clip_ratio=0.2, clip_value=0.2, clip_reward=5.0, gamma=1.0, lam=0.95,
        whiten_advantages=True, reward_normalization="saved", missing_eos_penalty=None,
    )  # fmt: skip
    assert Step2Arguments(**common(), model=model()).pair_loss == "end"


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        step1().max_seq_len = 3


def test_to_dict_is_json_with_every_field():
    saved = json.loads(json.dumps(step3().to_dict()))
    assert saved["data"]["split"] == [2, 4, 4]
    assert saved["actor"]["lora_module_names"] == []
    assert saved["ppo"]["kl_target"] is None
    assert set(saved) == {field.name for field in dataclasses.fields(Step3Arguments)}
    assert set(saved["ppo"]) == {field.name for field in dataclasses.fields(PPOArguments)}


REFUSED = [
    (lambda: DataArguments(paths=()), "paths"),
    (lambda: DataArguments(paths=("a", " ")), "paths"),
    (lambda: DataArguments(split=(2.0, 4.0)), "split"),
    (lambda: DataArguments(split=(0.0, 0.0, 0.0)), "split"),
    (lambda: DataArguments(split=(2.0, -4.0, 4.0)), "split"),
    (lambda: DataArguments(probs=(0.5, 0.5)), "probs"),
    (lambda: DataArguments(probs=(0.0,)), "probs"),
    (lambda: DataArguments(probs=(-1.0,)), "probs"),
    (lambda: DataArguments(probs=(math.nan,)), "probs"),
    (lambda: DataArguments(max_samples=0), "max_samples"),
    (lambda: DataArguments(template="chatml"), "template"),
    (lambda: DataArguments(workers=0), "workers"),
    (lambda: DataArguments(seed=-1), "seed"),
    (lambda: model(path=""), "path"),
    (lambda: model(learning_rate=-1e-3), "learning_rate"),
    (lambda: model(learning_rate=math.nan), "learning_rate"),
    (lambda: model(learning_rate=math.inf), "learning_rate"),
    (lambda: model(weight_decay=-0.1), "weight_decay"),
    (lambda: model(lora_dim=-8), "lora_dim"),
    (lambda: model(lora_module_names=("q_proj",)), "lora_dim"),
    (lambda: model(lora_learning_rate=1e-4), "lora_dim"),
    (lambda: model(lora_dim=8, lora_alpha=0.0), "lora_alpha"),
    (lambda: model(lora_dim=8, lora_dropout=1.0), "lora_dropout"),
    (lambda: model(dropout=1.0), "dropout"),
    (lambda: model(zero_stage=4), "zero_stage"),
    (lambda: model(offload=True), "zero_stage"),
    (lambda: schedule(num_train_epochs=0), "num_train_epochs"),
    (lambda: schedule(max_steps=0), "max_steps"),
    (lambda: schedule(gradient_accumulation_steps=0), "gradient_accumulation_steps"),
    (lambda: schedule(num_warmup_steps=-1), "num_warmup_steps"),
    (lambda: schedule(lr_scheduler_type="cosin"), "lr_scheduler_type"),
    (lambda: schedule(max_grad_norm=-1.0), "max_grad_norm"),
    (lambda: EngineArguments(dtype="float16"), "dtype"),
    (lambda: output(seed=2**32), "seed"),
    (lambda: output(output_dir=""), "output_dir"),
    (lambda: output(save_adapter=True), "output_dir"),
    (lambda: RolloutArguments(temperature=0.0), "temperature"),
    (lambda: RolloutArguments(top_p=0.0), "top_p"),
    (lambda: RolloutArguments(top_p=1.1), "top_p"),
    (lambda: RolloutArguments(top_k=-1), "top_k"),
    (lambda: RolloutArguments(per_device_batch_size=0), "per_device_batch_size"),
    (lambda: RolloutArguments(max_answer_len=0), "max_answer_len"),
    (lambda: PPOArguments(epochs=0), "epochs"),
    (lambda: PPOArguments(kl_coef=-0.1), "kl_coef"),
    (lambda: PPOArguments(kl_estimator="k4"), "kl_estimator"),
    (lambda: PPOArguments(kl_target=0.0), "kl_target"),
    (lambda: PPOArguments(kl_coef=0.0, kl_target=6.0), "kl_coef"),
    (lambda: PPOArguments(kl_horizon=5), "kl_target"),
    (lambda: PPOArguments(clip_ratio=0.0), "clip_ratio"),
    (lambda: PPOArguments(clip_value=0.0), "clip_value"),
    (lambda: PPOArguments(clip_reward=0.0), "clip_reward"),
    (lambda: PPOArguments(gamma=1.01), "gamma"),
    (lambda: PPOArguments(lam=-0.1), "lam"),
    (lambda: PPOArguments(reward_normalization="batch"), "reward_normalization"),
    (lambda: PPOArguments(missing_eos_penalty=-1.0), "missing_eos_penalty"),
    (lambda: step1(per_device_train_batch_size=0), "per_device_train_batch_size"),
    (lambda: step1(max_seq_len=0), "max_seq_len"),
    (lambda: step1(eval_interval=-1), "eval_interval"),
    (lambda: step1(only_optimize_lora=True), "model.lora_dim"),
    (lambda: step1(model=model(zero_stage=2)), "engine.deepspeed"),
    (lambda: step1(output=output(output_dir="o", save_adapter=True)), "model.lora_dim"),
    (lambda: step1(output=output(print_answers_interval=1)), "output.print_answers_interval"),
    (lambda: step3(only_optimize_lora=True, actor=model(lora_dim=8)), "critic.lora_dim"),
    (lambda: step3(only_optimize_lora=True, critic=model(lora_dim=8)), "actor.lora_dim"),
    (lambda: step3(critic=model(zero_stage=1)), "critic.zero_stage"),
    (lambda: step3(data=DataArguments(sft_only_paths=("x",))), "data.sft_only_paths"),
    (lambda: step3(ema_decay=0.9), "enable_ema"),
    (lambda: step3(critic=critic()), "critic.path"),
    (lambda: step3(reward_fn="rewards.py"), "reward_fn"),
    (lambda: step3(reward_fn="rewards:score"), "reward_fn"),
    (lambda: step3(reward_fn="rewards.py:"), "reward_fn"),
    (lambda: step3(reward_fn="rewards.py:a b"), "reward_fn"),
    (lambda: step3(reward_fn="r.py:f", ppo=PPOArguments(reward_normalization="saved")), "ppo.reward_normalization"),
    (lambda: step3(reward_fn="r.py:f", offload_reward_model=True), "offload_reward_model"),
    (lambda: step3(enable_ema=True, ema_decay=1.1), "ema_decay"),
    (lambda: step3(unsupervised_dataset_config_name="c"), "unsupervised_dataset_name"),
    (lambda: step3(unsup_coef=1.0), "unsupervised_dataset_name"),
]


@pytest.mark.parametrize(("make", "named"), REFUSED, ids=[f"{i}-{named}" for i, (_, named) in enumerate(REFUSED)])
def test_refused_in_one_sentence_that_names_the_setting(make, named):
    with pytest.raises(UserError) as refusal:
        make()
    sentence = str(refusal.value)
    assert named in sentence
    assert "\n" not in sentence and "<" not in sentence and "{" not in sentence
    assert not sentence.endswith(".")


def test_P18_zero_is_a_value_and_not_absence():
    assert model(learning_rate=0.0).learning_rate == 0
    assert model(dropout=0.0).dropout == 0
    assert model(lora_dim=8, lora_learning_rate=0.0).optimizer()["lora_learning_rate"] == 0
    assert PPOArguments(kl_coef=0.0, gamma=0.0, lam=0.0, missing_eos_penalty=0.0).missing_eos_penalty == 0
    assert RolloutArguments(top_k=0).top_k == 0
    assert step3(enable_ema=True, ema_decay=0.0).ema_decay == 0
    assert step3(unsupervised_dataset_name="d", unsup_coef=0.0).unsup_coef == 0
    assert schedule(max_grad_norm=0.0).max_grad_norm == 0


def test_zero_stage_with_deepspeed_and_offload_is_fine():
    held = step3(engine=EngineArguments(deepspeed=True), actor=model(zero_stage=3, offload=True))
    assert held.actor.offload and not held.critic.offload


def test_P22_prompts_of_a_rollout_by_hand():
    arguments = step3(rollout=RolloutArguments(per_device_batch_size=4, generation_batches=3))
    assert arguments.rollout_size(world_size=2) == 24


def test_planned_steps_are_limited_by_max_steps_only_when_it_is_less():
    assert schedule(num_train_epochs=3).planned_steps(5) == 15
    assert schedule(num_train_epochs=3, max_steps=4).planned_steps(5) == 4
    assert schedule(max_steps=9).planned_steps(5) == 5


def test_shares_of_the_optimizer_do_not_overlap():
    ours = model(lora_dim=4, weight_decay=0.1).optimizer()
    assert ours == {"learning_rate": 1e-3, "weight_decay": 0.1, "lora_learning_rate": None}
    theirs = schedule().optimizer()
    assert theirs == {"lr_scheduler_type": "cosine", "num_warmup_steps": 0, "max_grad_norm": 1.0}
    assert model(lora_dim=4).adaptation() == {
        "lora_dim": 4, "lora_module_names": (), "lora_alpha": 1.0, "lora_dropout": 0.0, "gradient_checkpointing": False,
    }  # fmt: skip


def test_cache_folder_follows_the_users_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert DataArguments().cache_dir == "/somewhere/alpaca_rlhf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/of/me")
    assert DataArguments().cache_dir == "/home/of/me/.cache/alpaca_rlhf"


def test_a_value_that_looks_like_a_placeholder_is_shown_as_it_is():
    error = SettingError("<path> is {0}; give another", "<path>{0}").inside("actor")
    assert error.sentence(str.upper) == "ACTOR.PATH is <path>{0}; give another"
    assert spelled("<a> and <b.c>", lambda name: f"--{name}") == "--a and --b.c"


NEUTRAL = {  # what leaves the trained weights as they are; a field that is not listed here decides them
    1: """data.paths data.sft_only_paths data.cache_dir data.template data.workers schedule.max_skipped_steps
        engine.dtype engine.local_rank output.output_dir output.save_steps output.keep_checkpoints output.resume
        output.enable_tensorboard output.tensorboard_path output.save_adapter output.print_answers_interval
        output.inspect model.path model.gradient_checkpointing per_device_eval_batch_size eval_interval""",
    3: """actor.path actor.gradient_checkpointing critic.path critic.gradient_checkpointing tokenizer_path reward_fn
        ppo.kl_alarm ppo.kl_stop offload_reference_model offload_reward_model unsupervised_dataset_name
        unsupervised_dataset_config_name""",
}


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_setting_decides_the_weights_but_for_those_listed(step):
    dialect = {1: STEP1, 2: STEP2, 3: STEP3}[step]
    settings = dialect.parse({3: ["--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]}.get(
        step, ["--model_name_or_path", "m"]
    ))  # fmt: skip
    listed = set(NEUTRAL[1].split()) | (set(NEUTRAL[3].split()) if step == 3 else set())
    every = set(_leaves(dialect.schema))
    assert every - settings.decisive().keys() == listed & every

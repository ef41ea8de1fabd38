"""The seed's three commands under the DeepSpeed launcher: two ranks on a CPU, ZeRO 2, LoRA; the numbers of one process.

The data are 24 pairs, of which 5 are left for step 3, so that ranks and batches never come out even (Z-06, M-04, P-22).
"""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.pipeline.steps import make_base, metrics, run_step

ROOT = Path(__file__).resolve().parents[2]
STEPS = "alpaca_rlhf/deepspeed_chat/training/"
LORA = ["--lora_dim", "8", "--lora_module_name", "q_proj,k_proj", "--only_optimize_lora"]


def start(script: str, *words: object) -> subprocess.Popen:
    """``sh run.sh --num_gpus 2 script words…`` from another folder."""
    command = ["sh", str(ROOT / "run.sh"), "--num_gpus", "2", str(ROOT / STEPS / script), *map(str, words)]
    env = {**os.environ, "ALPACA_RLHF_INSTALL": "no", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd="/", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def launch(script: str, *words: object) -> None:
    """Start, wait; its output is shown when it fails."""
    process = start(script, *words)
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed[-6000:]


def data_flags(folder: Path, split: str) -> list[object]:
    return ["--data_path", folder / "data", "--data_split", split, "--data_output_path", folder / "cache"]


@pytest.mark.launcher
def test_the_seeds_three_commands_on_two_ranks(tmp_path):
    make_base(tmp_path)
    base, actor, critic, final = (tmp_path / name for name in ("base", "actor", "critic", "final"))
    launch(
        "step1_supervised_finetuning/main.py", *data_flags(tmp_path, "1,0,0"), "--model_name_or_path", base,
        *"--per_device_train_batch_size 5 --per_device_eval_batch_size 3 --max_seq_len 32 --learning_rate 3e-2".split(),
        *"--num_train_epochs 1 --gradient_accumulation_steps 2 --num_warmup_steps 1 --deepspeed --zero_stage 2".split(),
        *LORA, "--output_dir", actor,
    )  # fmt: skip
    launch(
        "step2_reward_model_finetuning/main.py", *data_flags(tmp_path, "0,19,5"), "--model_name_or_path", base,
        *"--num_padding_at_beginning 0 --per_device_train_batch_size 4 --per_device_eval_batch_size 64".split(),
        *"--max_seq_len 32 --learning_rate 5e-2 --num_train_epochs 1 --gradient_accumulation_steps 1".split(),
        *"--num_warmup_steps 0 --zero_stage 2 --deepspeed".split(), *LORA, "--output_dir", critic,
    )  # fmt: skip
    launch(
        "step3_rlhf_finetuning/main.py", *data_flags(tmp_path, "0,19,5"), "--actor_model_name_or_path", actor,
        "--tokenizer_name_or_path", base, "--critic_model_name_or_path", critic,
        *"--actor_zero_stage 2 --critic_zero_stage 2 --num_padding_at_beginning 0".split(),
        *"--per_device_train_batch_size 2 --per_device_mini_train_batch_size 1 --ppo_epochs 2".split(),
        *"--actor_learning_rate 1e-2 --critic_learning_rate 1e-2 --gradient_accumulation_steps 1 --deepspeed".split(),
        *"--actor_lora_dim 8 --actor_lora_module_name q_proj --critic_lora_dim 8".split(),
        *"--critic_lora_module_name q_proj,k_proj --only_optimize_lora --max_prompt_seq_len 16".split(),
        *"--max_answer_seq_len 6 --num_warmup_steps 0".split(), "--output_dir", final,
    )  # fmt: skip

    _, info = AutoModelForCausalLM.from_pretrained(final / "actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    AutoModelForSequenceClassification.from_pretrained(critic)
    records = metrics(final)
    assert [record["answers"] for record in records] == [4, 1] and records[0]["kl"] == pytest.approx(0, abs=1e-6)
    pairs = [record for record in metrics(critic) if "eval_count" in record]
    assert all(record["eval_count"] == 8 for record in pairs)
    _equals_one_process(tmp_path)


@pytest.mark.launcher
@pytest.mark.slow
def test_C01_SIGTERM_to_the_launcher_saves_on_all_ranks(tmp_path):
    """Whoever ends ``run.sh`` ends the ranks after their step, with a checkpoint; resumed, it equals one long run."""
    make_base(tmp_path)
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = [
        "step1_supervised_finetuning/main.py", *data_flags(tmp_path, "1,0,0"),
        "--model_name_or_path", tmp_path / "base",
        *"--per_device_train_batch_size 2 --max_seq_len 32 --learning_rate 1e-2 --num_train_epochs 60".split(),
        *"--deepspeed --zero_stage 2 --dropout 0.1".split(),
    ]  # fmt: skip
    process = start(*words, "--output_dir", out)
    while not (out / "metrics.jsonl").exists() or len(metrics(out)) < 20:
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "stopped by SIGTERM after optimizer step" in printed
    assert not (out / "model.safetensors").exists()
    launch(*words, "--output_dir", out, "--resume")
    launch(*words, "--output_dir", whole)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, whole))
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert [record["loss"] for record in metrics(out)[1:]] == [record["loss"] for record in metrics(whole)[1:]]


def _equals_one_process(folder: Path) -> None:
    """The same three runs in this process, on the plain engine with the same global batches, agree."""
    lora = {"lora_dim": 8, "lora_module_name": "q_proj,k_proj", "only_optimize_lora": True}
    one = folder / "one"
    base = {"model_name_or_path": folder / "base"}
    flags = {"per_device_train_batch_size": 20, "learning_rate": 3e-2, "num_warmup_steps": 1}
    assert run_step(1, folder, **base, **lora, **flags, output_dir=one / "actor") == 0
    flags = {"per_device_train_batch_size": 8, "learning_rate": 5e-2, "num_train_epochs": 1, "data_split": "0,19,5"}
    assert run_step(2, folder, **base, **lora, **flags, output_dir=one / "critic") == 0
    flags = {"actor_model_name_or_path": folder / "actor", "critic_model_name_or_path": folder / "critic"}
    flags |= {"per_device_train_batch_size": 4, "per_device_mini_train_batch_size": 2, "ppo_epochs": 2}
    flags |= {"actor_lora_dim": 8, "actor_lora_module_name": "q_proj", "critic_lora_dim": 8, "data_split": "0,19,5"}
    flags |= {"critic_lora_module_name": "q_proj,k_proj", "only_optimize_lora": True, "max_steps": None}
    assert run_step(3, folder, **flags, output_dir=one / "final") == 0
    for name, kind in {"actor": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}.items():
        theirs, ours = kind.from_pretrained(folder / name).state_dict(), kind.from_pretrained(one / name).state_dict()
        for key in ours:  # Adam's first steps divide by tiny gradients, which makes 1e-8 of rounding visible
            near = torch.allclose(theirs[key], ours[key], atol=1e-5, rtol=1e-5)
            assert near, f"{name} {key}: {(theirs[key] - ours[key]).abs().max()}"
    # For the same reason PPO, whose first gradients are far smaller, is compared by what its first rollout logged.
    theirs, ours = metrics(folder / "final")[0], metrics(one / "final")[0]
    for key in ("score", "score_std", "normalized_score", "reward", "length", "entropy", "distinct_2", "answer_tokens",
                "ended_share", "explained_variance"):  # fmt: skip
        assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-5), key

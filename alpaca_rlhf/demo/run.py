"""The whole main job on the embedded world: SFT, reward model, PPO, and SFT compared with RLHF.

    sh run.sh demo [--model tiny|smollm2] [--output_dir output/demo] [--seed 1234]

Runs the real step programs one after the other, each in a process of its own. A step that fails ends the demo with its
exit code; later steps do not start. Writes report.json and report.md.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from alpaca_rlhf.demo.report import build_report, closing_table, step_result, write_report

DATA = Path(__file__).resolve().parents[2] / "data"
STEPS = "alpaca_rlhf.deepspeed_chat.training."


class Sizes(NamedTuple):
    """How long the demo works on one kind of model; chosen so that the tiny one takes minutes on two cores."""

    prompt_tokens: int
    answer_tokens: int
    sft: tuple[str, ...]
    reward_model: tuple[str, ...]
    ppo: tuple[str, ...]
    prompts: int  # held-out prompts that the report compares on


TINY = Sizes(
    prompt_tokens=96,
    answer_tokens=96,
    sft=(
        "--learning_rate",
        "3e-3",
        "--num_train_epochs",
        "6",
        "--per_device_train_batch_size",
        "32",
        "--num_warmup_steps",
        "20",
        "--weight_decay",
        "0.1",
    ),
    reward_model=(
        "--learning_rate",
        "5e-4",
        "--num_train_epochs",
        "3",
        "--per_device_train_batch_size",
        "16",
        "--num_warmup_steps",
        "10",
    ),
    ppo=(
        "--actor_learning_rate",
        "3e-4",
        "--critic_learning_rate",
        "5e-4",
        "--per_device_train_batch_size",
        "64",
        "--per_device_mini_train_batch_size",
        "32",
        "--ppo_epochs",
        "2",
        "--num_warmup_steps",
        "5",
        "--kl_coef",
        "0.1",
        "--lr_scheduler_type",
        "constant_with_warmup",
        "--max_steps",
        "40",
        "--num_train_epochs",
        "3",
    ),
    prompts=300,
)
LORA = ("--only_optimize_lora",)
_LAYERS = "q_proj,k_proj,v_proj,o_proj"
SMOLLM2 = Sizes(
    prompt_tokens=128,
    answer_tokens=64,
    sft=(
        "--learning_rate",
        "1e-3",
        "--per_device_train_batch_size",
        "8",
        "--max_steps",
        "40",
        "--lora_dim",
        "8",
        "--lora_module_name",
        _LAYERS,
        "--lora_alpha",
        "16",
        *LORA,
    ),
    reward_model=(
        "--learning_rate",
        "1e-3",
        "--per_device_train_batch_size",
        "8",
        "--max_steps",
        "40",
        "--lora_dim",
        "8",
        "--lora_module_name",
        _LAYERS,
        "--lora_alpha",
        "16",
        *LORA,
    ),
    ppo=(
        "--actor_learning_rate",
        "2e-4",
        "--critic_learning_rate",
        "2e-4",
        "--per_device_train_batch_size",
        "16",
        "--per_device_mini_train_batch_size",
        "8",
        "--num_warmup_steps",
        "2",
        "--max_steps",
        "8",
        "--kl_coef",
        "0.1",
        "--actor_lora_dim",
        "8",
        "--actor_lora_module_name",
        _LAYERS,
        "--actor_lora_alpha",
        "16",
        "--critic_lora_dim",
        "8",
        "--critic_lora_module_name",
        _LAYERS,
        "--critic_lora_alpha",
        "16",
        *LORA,
    ),
    prompts=32,
)


class StepFailed(Exception):
    """A program of the demo ended with this exit code; its own words are above."""

    def __init__(self, name: str, command: Sequence[str], code: int) -> None:
        words = shlex.join(command)
        super().__init__(f"the demo stopped: {name} ended with exit code {code}; the command was\n  {words}")
        self.code = code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(
        prog="sh run.sh demo",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        choices=("tiny", "smollm2"),
        default="tiny",
        help="tiny: a LLaMA made here; smollm2: SmolLM2-135M with LoRA, far slower (default tiny)",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("output/demo"), help="folder of all outputs (default output/demo)"
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of everything (default 1234)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs in order; returns the exit code."""
    args = parse(argv)
    try:
        report = run_demo(args.model, args.output_dir, args.seed)
    except StepFailed as failure:
        print(failure, file=sys.stderr)
        return failure.code
    print(closing_table(report))
    print(f"report: {args.output_dir / 'report.md'}, figures: {args.output_dir / 'report.json'}")
    return 0


def run_demo(model: str, output: Path, seed: int) -> dict:
    """All programs, then the report, also written to ``output``."""
    sizes, seconds = SMOLLM2 if model == "smollm2" else TINY, {}
    started = time.perf_counter()
    for name, command in commands(model, sizes, output, seed):
        print(f"\n== {name}\n$ {shlex.join(command)}", flush=True)
        begun = time.perf_counter()
        code = subprocess.run(command).returncode
        if code:
            raise StepFailed(name, command, code)
        seconds[name] = time.perf_counter() - begun
        print(f"== {name}: {step_result(name, output)} ({seconds[name]:.0f} s)", flush=True)
    seconds["total"] = time.perf_counter() - started
    report = build_report(output, DATA, model, seed, seconds)
    write_report(output, report)
    return report


def commands(model: str, sizes: Sizes, output: Path, seed: int) -> list[tuple[str, list[str]]]:
    """Name and command of each program, in order."""
    base, sft, reward, final = (str(output / part) for part in ("base", "sft", "reward_model", "rlhf"))
    same = ["--data_output_path", str(output / "cache"), "--seed", str(seed)]
    whole = ["--max_seq_len", str(sizes.prompt_tokens + sizes.answer_tokens)]
    lengths = ["--max_prompt_seq_len", str(sizes.prompt_tokens), "--max_answer_seq_len", str(sizes.answer_tokens)]
    preferences = ["--data_path", str(DATA / "preferences"), "--data_split", "0,1,1"]

    def program(module: str, *words: str) -> list[str]:
        return [sys.executable, "-m", module, *words]

    return [
        ("base", program("alpaca_rlhf.demo." + ("smollm2" if model == "smollm2" else "tiny_model"), base)),
        (
            "sft",
            program(
                STEPS + "step1_supervised_finetuning.main",
                "--data_path",
                "MultiTurnAlpaca",
                "--data_split",
                "1,0,0",
                "--model_name_or_path",
                base,
                *whole,
                *sizes.sft,
                "--output_dir",
                sft,
                *same,
            ),
        ),
        (
            "reward_model",
            program(
                STEPS + "step2_reward_model_finetuning.main",
                *preferences,
                "--model_name_or_path",
                sft,
                *whole,
                *sizes.reward_model,
                "--output_dir",
                reward,
                *same,
            ),
        ),
        (
            "ppo",
            program(
                STEPS + "step3_rlhf_finetuning.main",
                *preferences,
                "--actor_model_name_or_path",
                sft,
                "--critic_model_name_or_path",
                reward,
                *lengths,
                *sizes.ppo,
                "--output_dir",
                final,
                *same,
            ),
        ),
        (
            "compare",
            program(
                "alpaca_rlhf.evaluation.compare_models",
                "--models",
                sft,
                f"{final}/actor",
                "--names",
                "sft",
                "rlhf",
                "--prompts",
                str(DATA / "prompts.jsonl"),
                "--max_prompts",
                str(sizes.prompts),
                *lengths,
                "--output_dir",
                str(output / "comparison"),
                *same,
            ),
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())

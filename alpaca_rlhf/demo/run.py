"""The whole main job on the embedded world: SFT, reward model, PPO, and SFT compared with RLHF.

    sh run.sh demo [--model tiny|smollm2] [--output_dir output/demo] [--seed 1234]

Runs the real step programs one after the other, each in a process of its own. A step that fails ends the demo with its
exit code; later steps do not start. Writes report.html (one file: figures, curves, answers, settings),
report.md and report.json.
"""

import argparse
import importlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from alpaca_rlhf.demo.report import build_report, closing_table, step_result, write_report
from alpaca_rlhf.runtime.run import command

DATA = Path(__file__).resolve().parents[2] / "data"
STEPS = "alpaca_rlhf.deepspeed_chat.training."
STEP_NAMES = ("step1_supervised_finetuning", "step2_reward_model_finetuning", "step3_rlhf_finetuning")
BASES = {"tiny": "tiny_model", "smollm2": "smollm2"}


def words(text: str) -> tuple[str, ...]:
    """The words of a command line."""
    return tuple(text.split())


class Sizes(NamedTuple):
    """How long the demo works on one kind of model; chosen so that the tiny one takes minutes on two cores."""

    prompt_tokens: int
    answer_tokens: int
    sft: tuple[str, ...]
    reward_model: tuple[str, ...]
    ppo: tuple[str, ...]
    prompts: int  # held-out prompts that the report compares on


TINY = Sizes(
    prompt_tokens=128,
    answer_tokens=96,
    sft=words("--learning_rate 2e-3 --num_train_epochs 4 --per_device_train_batch_size 8 --num_warmup_steps 30 "
              "--eval_interval 187"),
    reward_model=words(
        "--learning_rate 5e-4 --num_train_epochs 1 --per_device_train_batch_size 8 --num_warmup_steps 20 "
        "--eval_interval 35"
    ),
    ppo=words(
        "--actor_learning_rate 2e-4 --critic_learning_rate 5e-4 --lr_scheduler_type constant_with_warmup "
        "--num_warmup_steps 5 --per_device_train_batch_size 64 --per_device_mini_train_batch_size 32 --ppo_epochs 2 "
        "--num_train_epochs 3 --max_steps 24 --kl_coef 0.1"
    ),
    prompts=300,
)
_LAYERS = "q_proj,k_proj,v_proj,o_proj"
_ONE_LORA = f"--lora_dim 8 --lora_module_name {_LAYERS} --lora_alpha 16 --only_optimize_lora"
_TWO_LORAS = " ".join(
    f"--{role}_lora_dim 8 --{role}_lora_module_name {_LAYERS} --{role}_lora_alpha 16" for role in ("actor", "critic")
)
SMOLLM2 = Sizes(
    prompt_tokens=128,
    answer_tokens=64,
    sft=words(f"--learning_rate 1e-3 --per_device_train_batch_size 8 --max_steps 40 {_ONE_LORA}"),
    reward_model=words(f"--learning_rate 1e-3 --per_device_train_batch_size 8 --max_steps 40 {_ONE_LORA}"),
    ppo=words(
        "--actor_learning_rate 2e-4 --critic_learning_rate 2e-4 --num_warmup_steps 2 --per_device_train_batch_size 16 "
        "--per_device_mini_train_batch_size 8 --max_steps 8 --kl_coef 0.1 --only_optimize_lora " + _TWO_LORAS
    ),
    prompts=32,
)

# Each part is seen at work in seconds, and nothing is learned: for tests, and for a first look at the notebooks.
GLANCE = Sizes(
    prompt_tokens=128,
    answer_tokens=24,
    sft=words("--learning_rate 2e-3 --max_steps 3 --per_device_train_batch_size 4 --max_samples 100"),
    reward_model=words("--learning_rate 5e-4 --max_steps 3 --per_device_train_batch_size 4 --max_samples 60"),
    ppo=words(
        "--actor_learning_rate 2e-4 --critic_learning_rate 5e-4 --per_device_train_batch_size 4 "
        "--per_device_mini_train_batch_size 4 --max_steps 2 --max_samples 60 --kl_coef 0.1"
    ),
    prompts=6,
)
SIZES = {"tiny": TINY, "smollm2": SMOLLM2, "glance": GLANCE}


class StepFailed(Exception):
    """A program of the demo ended with this exit code; its own words are above."""

    def __init__(self, name: str, command: Sequence[str], code: int) -> None:
        line = shlex.join(command)
        super().__init__(f"the demo stopped: {name} ended with exit code {code}; the command was\n  {line}")
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
        choices=tuple(BASES),
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
    print(f"as text: {args.output_dir / 'report.md'}, figures: {args.output_dir / 'report.json'}")
    print(f"report: {args.output_dir / 'report.html'} (open it in a browser)")
    return 0


def run_demo(model: str, output: Path, seed: int) -> dict:
    """All programs, then the report, also written to ``output``."""
    sizes, seconds = SMOLLM2 if model == "smollm2" else TINY, {}
    started = time.perf_counter()
    programs = commands(model, sizes, output, seed)
    for name, line in programs:
        print(f"\n== {name}\n$ {shlex.join(line)}", flush=True)
        begun = time.perf_counter()
        code = subprocess.run(line).returncode
        if code:
            raise StepFailed(name, line, code)
        seconds[name] = time.perf_counter() - begun
        print(f"== {name}: {step_result(name, output)} ({seconds[name]:.0f} s)", flush=True)
    seconds["total"] = time.perf_counter() - started
    report = build_report(output, DATA, model, seed, seconds, {name: readable(line) for name, line in programs})
    write_report(output, report)
    return report


def run_here(line: Sequence[str], *more: str) -> None:
    """Run a program (``python -m MODULE FLAGS``) in this process, as a notebook does, and show its command.

    Raises:
        StepFailed: it ended with another code than 0.
    """
    module, argv = line[2], [*line[3:], *more]
    print(readable([*line, *more]) + "\n", flush=True)
    code = command(importlib.import_module(module).main)(argv)
    if code:
        raise StepFailed(module, line, code)


def readable(line: Sequence[str]) -> str:
    """A command ``python -m MODULE FLAGS``, one flag a line, as it can be pasted into a shell."""
    lines = [f"python -m {line[2]}"]
    for word in line[3:]:
        if word.startswith("--"):
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def commands(model: str, sizes: Sizes, output: Path, seed: int, data: Path = DATA) -> list[tuple[str, list[str]]]:
    """Name and command of each program, in order; ``data``: the folder with the embedded data."""
    base, sft, reward, final = (str(output / part) for part in ("base", "sft", "reward_model", "rlhf"))
    same = {"--data_output_path": output / "cache", "--seed": seed}
    whole = {"--max_seq_len": sizes.prompt_tokens + sizes.answer_tokens}
    lengths = {"--max_prompt_seq_len": sizes.prompt_tokens, "--max_answer_seq_len": sizes.answer_tokens}
    preferences = {"--data_path": data / "preferences", "--data_split": "0,7,3"}
    conversations = {"--data_path": "MultiTurnAlpaca", "--data_split": "1,0,0"}
    start = {"--actor_model_name_or_path": sft, "--critic_model_name_or_path": reward}
    prompts = {"--prompts": data / "prompts.jsonl", "--max_prompts": sizes.prompts}

    def program(module: str, flags: dict[str, object], *more: str) -> list[str]:
        return [sys.executable, "-m", module, *(str(word) for flag in flags.items() for word in flag), *more]

    steps = [STEPS + name + ".main" for name in STEP_NAMES]
    sft_flags = {**conversations, "--model_name_or_path": base, **whole, "--output_dir": sft, **same}
    reward_flags = {**preferences, "--model_name_or_path": sft, **whole, "--output_dir": reward, **same}
    ppo_flags = {**preferences, **start, **lengths, "--output_dir": final, **same}
    compare_flags = {**prompts, **lengths, "--output_dir": output / "comparison", **same}
    models = ("--models", sft, f"{final}/actor", "--names", "sft", "rlhf")
    return [
        ("base", program(f"alpaca_rlhf.demo.{BASES[model]}", {}, base)),
        ("sft", program(steps[0], sft_flags, *sizes.sft)),
        ("reward_model", program(steps[1], reward_flags, *sizes.reward_model)),
        ("ppo", program(steps[2], ppo_flags, *sizes.ppo)),
        ("compare", program("alpaca_rlhf.evaluation.compare_models", compare_flags, *models)),
    ]


if __name__ == "__main__":
    raise SystemExit(main())

"""The three step programs on tiny models, called in the process: data, a base model, flags that keep them small."""

import json
from pathlib import Path

from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main as step1
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning import main as step2
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3
from alpaca_rlhf.runtime.run import command
from tests.tiny import PAIRS, save_model, write_jsonl

PROGRAMS = {1: step1.main, 2: step2.main, 3: step3.main}


def write_data(folder: Path, copies: int = 3) -> Path:
    """24 pairs to train on and the 8 originals to evaluate on; a word in front keeps the copies apart."""
    words = ["please", "thanks", "yes"][:copies]
    rows = [{**pair, "prompt": pair["prompt"].replace("Human: ", f"Human: {w} ")} for w in words for pair in PAIRS]
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "test.jsonl", PAIRS)
    return folder


def run_step(step: int, folder: Path, *words: object, **flags: object) -> int:
    """Run one step's program as a shell would and return its exit code; the words are those of :func:`argv_of`."""
    return command(PROGRAMS[step])(argv_of(step, folder, *words, **flags))


def argv_of(step: int, folder: Path, *words: object, **flags: object) -> list[str]:
    """The words of one step's command line; ``folder`` holds ``data`` and the cache.

    ``flags``: name → value; True is a switch, None leaves the flag out.
    """
    given = {"data_path": folder / "data", "data_split": "0,1,1" if step > 1 else "1,0,0"}
    given |= {"data_output_path": folder / "cache"}
    given |= DEFAULTS[step] | flags
    argv = [str(word) for word in words]
    for name, value in given.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None:
            argv += [f"--{name}", str(value)]
    return argv


DEFAULTS: dict[int, dict[str, object]] = {
    1: {"per_device_train_batch_size": 8, "max_seq_len": 32, "learning_rate": 1e-2},
    2: {"per_device_train_batch_size": 4, "max_seq_len": 32, "learning_rate": 1e-2, "num_train_epochs": 5},
    3: {
        "per_device_train_batch_size": 4, "per_device_mini_train_batch_size": 2, "max_prompt_seq_len": 16,
        "max_answer_seq_len": 6, "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2, "num_warmup_steps": 0,
        "max_steps": 2,
    },
}  # fmt: skip


def metrics(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def make_base(folder: Path, **model: object) -> Path:
    """A folder with data and a base model that was never trained."""
    write_data(folder / "data")
    save_model(folder / "base", **model)
    return folder


def three_steps(folder: Path) -> Path:
    """Base, SFT, reward model and PPO in ``folder``: base, actor, critic, final."""
    make_base(folder)
    assert run_step(1, folder, model_name_or_path=folder / "base", output_dir=folder / "actor") == 0
    assert run_step(2, folder, model_name_or_path=folder / "actor", output_dir=folder / "critic") == 0
    assert run_step(3, folder, **trained(folder), output_dir=folder / "final") == 0
    return folder


def trained(folder: Path) -> dict[str, object]:
    """Step 3's model flags for the outputs of :func:`three_steps`."""
    return {"actor_model_name_or_path": folder / "actor", "critic_model_name_or_path": folder / "critic"}

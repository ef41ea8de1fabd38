"""Real processes of a step, killed at random moments: a parent that has imported everything forks them one by one.

    python -m tests.pipeline.kill_worker FOLDER STEP KILLS SEED

FOLDER is one of steps.three_steps; the run goes into FOLDER/killedSTEP, the unbroken one into FOLDER/unbrokenSTEP. The
last line printed is a JSON object with what was counted.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alpaca_rlhf.runtime.checkpoint_files import checkpoints, half_written
from tests.pipeline.steps import run_step, trained

FLAGS: dict[int, dict] = {
    1: {"num_train_epochs": 30, "per_device_train_batch_size": 4, "dropout": 0.1, "eval_interval": 7},
    3: {"max_steps": 40, "num_train_epochs": 14, "ppo_epochs": 2, "kl_target": 3, "reward_normalization": "running"},
}


def child(work: Callable[[], int]) -> int:
    """Fork a process that does the work and ends; returns its number."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, 1)
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return pid


def newest(out: Path) -> int:
    """Optimizer steps that the newest checkpoint has behind it."""
    found = checkpoints(out)
    return int(found[0].name.removeprefix("step-")) if found else 0


def start(folder: Path, step: int, name: str, **more: object) -> int:
    """A process that runs the step and resumes what is there."""
    models = {"model_name_or_path": folder / "base"} if step == 1 else trained(folder)
    flags = FLAGS[step] | models | {"output_dir": folder / f"{name}{step}", "resume": True, "save_steps": 1} | more
    return child(lambda: run_step(step, folder, **flags))


def wait(pid: int) -> int:
    """Its exit code, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_random(folder: Path, step: int, kills: int, seed: int) -> dict:
    """Kill the run so many times, then let it end; count what was done and what was lost."""
    out, chance = folder / f"killed{step}", random.Random(seed)
    assert wait(start(folder, step, "unbroken")) == 0
    report = {"kills": 0, "while_writing": 0, "before_any": 0, "steps": newest(folder / f"unbroken{step}")}
    for _ in range(kills):
        before = newest(out)
        pid = start(folder, step, "killed")
        # Some steps further, then at any moment of the next one; every fourth time while it is still starting.
        further = chance.randint(0, 3)
        while further and newest(out) < before + further:
            time.sleep(0.001)
            assert os.waitpid(pid, os.WNOHANG)[0] == 0, f"the run ended by itself after {report['kills']} kills"
        end = time.monotonic() + chance.uniform(0, 0.1 if further else 1.5)
        while time.monotonic() < end and newest(out) < before + further + 3:  # a fast machine must not get to the end
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        assert wait(pid) == -signal.SIGKILL
        after = newest(out)
        assert before + further <= after, f"step {before + further} was saved, and now the newest is {after}"
        report["kills"] += 1
        report["while_writing"] += bool(half_written(out))
        report["before_any"] += after == 0
    assert wait(start(folder, step, "killed")) == 0
    return report


if __name__ == "__main__":
    print(json.dumps(kill_at_random(Path(sys.argv[1]), *map(int, sys.argv[2:]))))

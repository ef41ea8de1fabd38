"""Start the steps through DeepSpeed's launcher, and let SIGTERM reach the processes that train.

    python -m alpaca_rlhf.runtime.launcher --num_gpus 2 script.py flags…

DeepSpeed's launcher leaves the training running when it is terminated itself, or gives it 30 seconds. Here the signal
goes to the ranks of this machine, which finish their step, save a checkpoint and end with 0, and so does the launcher.
"""

import importlib.util
import signal
import subprocess
import sys
from typing import Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime.run import command


def main(argv: list[str] | None = None) -> int:
    """Run the launcher to its end and return its exit code.

    Raises UserError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("run.sh starts processes through the package deepspeed; install it with: pip install deepspeed")
    words = sys.argv[1:] if argv is None else argv
    launcher = subprocess.Popen([sys.executable, "-m", "deepspeed.launcher.runner", *words])

    def forward(number: int, frame: Any) -> None:
        found = ranks(launcher.pid)
        for rank in found:
            rank.terminate()
        if not found:  # nothing trains yet
            launcher.terminate()

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group; wait for its end
    return launcher.wait()


def ranks(launcher: int) -> list[Any]:
    """The training processes (psutil.Process): what DeepSpeed's runner has started through its launch program."""
    import psutil  # comes with deepspeed

    return [rank for node in psutil.Process(launcher).children() for rank in node.children()]


if __name__ == "__main__":
    raise SystemExit(command(main)())

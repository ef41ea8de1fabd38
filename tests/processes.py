"""Several ranks of one program, started as a launcher would start them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def launch(module: str, folder: Path, processes: int, words: list[str]) -> None:
    """Start ``python -m module FOLDER WORDS`` as so many ranks and wait; where one fails or hangs, the end of what each
    has printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes)}
    if processes > 1:  # one process alone needs no launcher
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", module, str(folder), *words]
    logs = [folder / f"rank{rank}of{processes}.log" for rank in range(processes)]
    ranks = []
    for rank, log in enumerate(logs):
        own = environment | {"RANK": str(rank)} | ({"LOCAL_RANK": str(rank)} if processes > 1 else {})
        with open(log, "wb") as output:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=600) for process in ranks]
    except subprocess.TimeoutExpired:
        codes = ["hangs"]
    finally:
        for process in ranks:
            process.kill()
    ends = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
    assert codes == [0] * processes, f"{codes}\n{ends}"

"""One rank of test_resume.py: each step once through, once stopped after its third optimizer step and resumed.

    RANK=0 WORLD_SIZE=2 … python -m tests.pipeline.resume_worker FOLDER
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.equivalence.worker import everything_sharded
from tests.pipeline.steps import PROGRAMS, argv_of
from tests.pipeline.test_resume import RANKS, STEPS, flags_of, stop_after


def main(folder: Path) -> None:
    """The steps' own ``main``, so that the process group lives on from one run to the next."""
    torch.set_num_threads(1)
    for name, (first, second) in RANKS.items():
        for step in STEPS:
            stages = {"zero_stage": first} if step < 3 else {"actor_zero_stage": first, "critic_zero_stage": second}
            for out, stop, resume in (("whole", False, None), ("out", True, None), ("out", False, True)):
                print(name, step, out, flush=True)
                flags = flags_of(step, folder, folder / f"{name}{step}-{out}", deepspeed=True, resume=resume, **stages)
                with pytest.MonkeyPatch.context() as patch, everything_sharded(True):
                    if stop and os.environ["RANK"] == "1":
                        stop_after(patch, 3)
                    PROGRAMS[step](argv_of(step, folder, **flags))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""What one process knows of its run: rank, device, dtype, how to talk to the other ranks and to the person watching."""

import importlib.util
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime.outputs import release_output_dirs

# Long enough for one rank to tokenise a large data set while the others wait, short enough that a hang ends overnight.
COLLECTIVE_TIMEOUT = timedelta(minutes=60)
SECONDS_BETWEEN_LOG_LINES = 15.0
MEMORY_ADVICE = (
    "use a smaller batch per device with more --gradient_accumulation_steps, a shorter sequence limit, "
    "--gradient_checkpointing, LoRA (--lora_dim 8), or --deepspeed with a higher ZeRO stage and offload"
)


@dataclass(frozen=True)
class Run:
    """One process of a run. Every method with more than one rank in its description must be called on all of them.

    dtype is the compute dtype (float32, bfloat16 or float16); the master weights are the engine's business.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def print(self, *words: object) -> None:
        """Print on the main rank, above the progress bars that may be on the screen."""
        if self.is_main:
            tqdm.write(" ".join(str(word) for word in words), file=sys.stdout)
            sys.stdout.flush()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum(self, tensor: Tensor) -> Tensor:
        """Elementwise sum over the ranks: a new tensor of the same shape, dtype and device on every rank."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Elementwise maximum over the ranks: a new tensor of the same shape, dtype and device on every rank."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def all_true(self, flag: bool) -> bool:
        """Whether the flag is true on every rank."""
        false_count = torch.tensor(0 if flag else 1, dtype=torch.int32)
        return self.max(false_count).item() == 0

    def gather(self, obj: Any) -> list[Any]:
        """The objects of all ranks in rank order, on every rank."""
        if self.world_size == 1:
            return [obj]
        objects: list[Any] = [None] * self.world_size
        dist.all_gather_object(objects, obj)
        return objects

    def write_once(self, done: Callable[[], bool], write: Callable[[], None]) -> None:
        """Let one rank per file system write what all ranks then read.

        The main rank writes unless done() already holds; then the first rank of every other node does if it cannot
        see the result (disks are not shared). Where a writer fails, its exception leaves this call on the writer and
        an error with the same text leaves it on every other rank, so that nobody waits for a file that never comes.
        """
        with _FailTogether(self):
            if self.is_main and not done():
                write()
        with _FailTogether(self):
            if self.local_rank == 0 and not done():
                write()
        missing = [rank for rank, found in enumerate(self.gather(done())) if not found]
        if missing:
            raise RuntimeError(f"written without an error, but not to be seen on rank {missing}: check the file system")

    def progress(self, total: int, description: str, start: int = 0) -> "ProgressBar":
        """A bar with rate and remaining time on stderr of the main rank; a line now and then where that is a file.

        start: how many of the total were done before this process.
        """
        return ProgressBar(total=total, description=description, shown=self.is_main, start=start)

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        # The copy lives on the run's device because NCCL cannot reduce a CPU tensor.
        copy = tensor.detach().to(self.device, copy=True)
        if self.world_size > 1:
            dist.all_reduce(copy, op=operation)
        return copy.to(tensor.device)


class _FailTogether:
    """Context in which an exception on one rank ends the block with an error on all of them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        report = None
        if error is not None:
            report = (isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error))
        reports = self.run.gather(report)
        if error is not None:
            return
        for rank, failed in enumerate(reports):
            if failed is not None:
                is_user_error, full_text, sentence = failed
                raise UserError(sentence) if is_user_error else RuntimeError(f"rank {rank} failed: {full_text}")


class ProgressBar(tqdm):
    """A tqdm bar that writes whole lines, and few of them, when stderr is not a terminal."""

    def __init__(self, *, total: int, description: str, shown: bool, start: int = 0) -> None:
        self.live = sys.stderr.isatty()
        super().__init__(
            total=total,
            initial=start,
            desc=description,
            disable=not shown,
            file=sys.stderr if self.live else _LogLines(),
            mininterval=0.2 if self.live else SECONDS_BETWEEN_LOG_LINES,
            maxinterval=10.0 if self.live else SECONDS_BETWEEN_LOG_LINES,
            ncols=None if self.live else 100,
            dynamic_ncols=self.live,
        )

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **words: Any) -> None:
        """Show the numbers behind the bar: at once on a terminal, with the next line in a log."""
        super().set_postfix(ordered_dict, refresh=refresh and self.live, **words)


class _LogLines:
    """A text stream to stderr on which every redrawn bar becomes a line of its own."""

    def write(self, text: str) -> None:
        line = text.replace("\r", "").replace("\x1b[A", "").strip()
        if line:
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def start_run(*, seed: int, dtype: str = "auto", local_rank: int = -1, deepspeed: bool = False) -> Run:
    """Join the other processes if a launcher started several, choose device and dtype, seed the generators.

    seed: for python, numpy and torch, the same on every rank so that models start equal; a step derives its own
    seeds per rank for sampling. dtype: auto, fp32, bf16 or fp16. local_rank: the launcher's flag, used where it
    sets no LOCAL_RANK. deepspeed: whether DeepSpeed will train; several processes need it. Raises UserError for
    several processes without it, for a missing DeepSpeed, and for a dtype or a device that this machine does not have.
    """
    rank, local_rank, world_size = _ranks(local_rank)
    if world_size > 1 and not deepspeed:
        raise UserError(f"{world_size} processes were started without DeepSpeed: add --deepspeed")
    if deepspeed and importlib.util.find_spec("deepspeed") is None:
        raise UserError("--deepspeed needs the package deepspeed; install it with: pip install deepspeed")
    device = _device(local_rank)
    compute_dtype, notice = choose_dtype(dtype, device)
    if device.type == "cpu":
        # transformers imports an installed deepspeed when it saves; told the answer, it warns of no missing GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if world_size > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    run = Run(rank, local_rank, world_size, device, compute_dtype)
    _share_cores(run)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if notice:
        run.print(notice)
    return run


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype for a --dtype word on a device, and a notice to print (empty if there is nothing to say).

    auto is bf16 on an accelerator that computes in it natively and fp32 everywhere else. Raises UserError for fp16 on
    a CPU and for an unknown word.
    """
    if name == "auto":
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, ""
        if device.type == "cuda":
            return torch.float32, "this GPU has no native bf16: computing in fp32 (--dtype fp16 is faster)"
        return torch.float32, ""
    if name == "fp32":
        return torch.float32, ""
    if name == "bf16":
        return torch.bfloat16, "bf16 on a CPU is slow: fp32 is usually faster" if device.type == "cpu" else ""
    if name == "fp16":
        if device.type == "cpu":
            raise UserError("--dtype fp16 needs a GPU and this run is on a CPU: use --dtype fp32 or bf16")
        return torch.float16, ""
    raise UserError(f"--dtype {name} is unknown: choose auto, fp32, bf16 or fp16")


def command(
    main: Callable[[Sequence[str] | None], int | None], memory_advice: str = MEMORY_ADVICE
) -> Callable[..., int]:
    """Turn a step's main(argv) into a program: `raise SystemExit(command(main)())`.

    The returned function gives the exit code. A UserError becomes one line on stderr and code 2, running out of
    memory one line with memory_advice (the options that exist for this step) and code 1, Ctrl-C one line and code
    130. Any other exception is a bug and keeps its traceback.
    """

    def program(argv: Sequence[str] | None = None) -> int:
        finished, on_sigterm = False, signal.getsignal(signal.SIGTERM)
        try:
            code = main(argv) or 0
            finished = True
        except UserError as error:
            _say_error(str(error))
            code = 2
            finished = True
        except KeyboardInterrupt:
            _say_error("interrupted")
            code = 130
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what the CPU allocator raises
            if not _is_out_of_memory(error):
                raise
            _say_error(f"out of memory: {memory_advice} ({str(error).splitlines()[0]})")
            code = 1
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # a run with checkpoints has its own handler
            release_output_dirs()
            _leave_group(finished)
        return code

    return program


def _ranks(local_rank_flag: int) -> tuple[int, int, int]:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return 0, max(0, int(os.environ.get("LOCAL_RANK", local_rank_flag))), 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if "LOCAL_RANK" not in os.environ and local_rank_flag < 0:
        missing.append("LOCAL_RANK")
    if missing:
        raise UserError(
            f"WORLD_SIZE is {world_size} but {', '.join(missing)} is not set: start several processes with the "
            "launcher (sh run.sh --num_gpus N script.py ...) or unset WORLD_SIZE"
        )
    return int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", local_rank_flag)), world_size


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"process {local_rank} of this machine has no GPU of its own, {count} can be seen: start at most {count} "
            "processes (--num_gpus)"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _share_cores(run: Run) -> None:
    """Split the cores of a machine among its CPU ranks, where the user has not: oversubscribed threads crawl."""
    if run.world_size == 1 or run.device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return
    hosts = run.gather(socket.gethostname())
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hosts.count(socket.gethostname())))


def _say_error(sentence: str) -> None:
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    print(f"{prefix}error: {sentence}", file=sys.stderr, flush=True)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _leave_group(finished: bool) -> None:
    # After a crash on one of several ranks the others may be inside a collective, and taking NCCL down would wait for
    # them; the launcher ends them when this process is gone.
    if dist.is_available() and dist.is_initialized() and (finished or dist.get_world_size() == 1):
        dist.destroy_process_group()

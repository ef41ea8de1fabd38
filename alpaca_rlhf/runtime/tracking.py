"""The numbers of a run: metrics.jsonl always, TensorBoard when asked, curves as pictures at the end."""

import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime.curves import Curve, draw_curves


class MetricsLog:
    """One line of metrics.jsonl per optimizer step: {"step": n, "time": seconds since 1970, name: value, ...}.

    output_dir: None keeps nothing on disk. run: only is_main is read, the other ranks log nothing. tensorboard: also
    write TensorBoard events, to tensorboard_path as given. curves: name -> what close() draws
    into output_dir/curves/<name>.png. A log of an earlier run in output_dir is kept as metrics.previous.jsonl, but with
    resuming: load_state_dict() then says which part of it stays. Lines that a full disk refuses are kept and tried
    again with the next one. Raises UserError, on every rank and before anything is written, if a package that
    this needs is not installed.
    """

    def __init__(
        self,
        output_dir: str | Path | None,
        run: Any,
        curves: Mapping[str, Curve] | None = None,
        *,
        tensorboard: bool = False,
        tensorboard_path: str | Path = "",
        resuming: bool = False,
    ) -> None:
        self.curves = curves or {}
        self.last_step: int | None = None
        self.history: dict[str, tuple[list[int], list[float]]] = {}
        self._output_dir = Path(output_dir) if output_dir is not None and run.is_main else None
        self._run = run
        self._record: dict[str, Any] = {}
        self._finished: list[bytes] = []  # the lines of the steps before the present one
        self._on_disk, self._offset = 0, 0  # how many of them are on the disk, and where the last of these ends
        self._told = False
        self._file: IO[bytes] | None = None
        self._writer: Any = None
        self._writer_dir = str(tensorboard_path) if tensorboard and run.is_main else None
        if tensorboard:
            _need("tensorboard", "--enable_tensorboard")
        if output_dir is not None and self.curves:
            _need("matplotlib", "drawing the curves")
        if self._output_dir is not None:
            self._output_dir.mkdir(parents=True, exist_ok=True)
            path = self._output_dir / "metrics.jsonl"
            if path.exists() and not resuming:
                path.replace(path.with_name("metrics.previous.jsonl"))
            self._file = path.open("r+b" if resuming and path.exists() else "w+b", buffering=0)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record values under the run's one step counter, and bring them to the disk at once.

        A second call for the same step adds to that step's line (an evaluation after a training step); a step never
        goes back and no value is logged twice. Values that are not finite become null, which is all that JSON has.
        """
        if self.last_step is not None:
            assert step >= self.last_step, f"the log goes back from step {self.last_step} to {step}"
        for name, value in values.items():
            assert isinstance(value, int | float), f"{name} is a {type(value).__name__}, the log takes plain numbers"
        if step != self.last_step:
            if self._record:
                self._finished.append(_line(self._record))
            self._record = {"step": step, "time": round(time.time(), 3)}
            self.last_step = step
        repeated = self._record.keys() & values.keys()
        assert not repeated, f"logged twice at step {step}: {sorted(repeated)}"
        self._record.update({name: value if math.isfinite(value) else None for name, value in values.items()})
        problem = self._write()
        if problem and not self._told:
            self._run.print(f"warning: metrics.jsonl cannot be written ({problem}); its lines are kept and tried again")
        self._told = problem is not None
        for name, value in values.items():
            steps, numbers = self.history.setdefault(name, ([], []))
            steps.append(step)
            numbers.append(float(value))
            if self._writer_dir is not None:
                self._open_writer(step).add_scalar(name, value, step)

    def state_dict(self) -> str:
        """The log so far, as metrics.jsonl has it; empty on the ranks that log nothing."""
        return b"".join([*self._finished, *([_line(self._record)] if self._record else [])]).decode()

    def load_state_dict(self, text: str) -> None:
        """Go on after the lines that state_dict() gave; what metrics.jsonl holds beyond them is dropped."""
        records = [json.loads(line) for line in text.splitlines()]
        self.history, self._finished, self._record = {}, [_line(record) for record in records[:-1]], {}
        for record in records:
            for name in record.keys() - {"step", "time"}:
                steps, numbers = self.history.setdefault(name, ([], []))
                steps.append(record["step"])
                numbers.append(math.nan if record[name] is None else float(record[name]))
        if records:
            self._record, self.last_step = records[-1], records[-1]["step"]
        self._on_disk, self._offset = 0, 0
        problem = self._write()
        if problem:
            raise UserError(f"{self._output_dir}/metrics.jsonl cannot be written ({problem})")

    def _write(self) -> str | None:
        """Bring to the disk what is not there yet; returns the reason when that fails."""
        if self._file is None or not self._record:
            return None
        finished = b"".join(self._finished[self._on_disk :])
        try:
            self._file.seek(self._offset)
            rest = memoryview(finished + _line(self._record))
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file.truncate()
        except OSError as error:
            return error.strerror or str(error)
        self._on_disk, self._offset = len(self._finished), self._offset + len(finished)
        return None

    def _open_writer(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Events of this and later steps, from a run that was resumed before them, are no longer true.
            self._writer = SummaryWriter(log_dir=self._writer_dir, purge_step=step)
        return self._writer

    def close(self) -> None:
        """Close the files and draw the curves; a second call does nothing.

        Raises UserError if the disk does not take them, or has not taken all lines of the log.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._file is None or self._output_dir is None:
            return
        problem = self._write()
        self._file.close()
        self._file = None
        if problem:
            raise UserError(f"{self._output_dir}/metrics.jsonl lacks its last lines ({problem}): make room on the disk")
        try:
            for name, curve in self.curves.items():
                drawn = [value for metric in curve.lines for value in self.history.get(metric, ([], []))[1]]
                if any(map(math.isfinite, drawn)):
                    draw_curves(self._output_dir / "curves" / f"{name}.png", curve, self.history)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"the curves in {self._output_dir} could not be drawn ({reason})") from error


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _need(package: str, purpose: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{purpose} needs the package {package}, which is not installed: pip install {package}")

"""Checkpoints of a running training: written in between, found again, refused where going on would give another model.

A checkpoint holds what the rest of the run depends on: of every engine the trained weights, the optimizer, the schedule
and the loss scale; the random states of each rank; the log; and whatever else is handed over with a state_dict. Which
records come next follows from the number of optimizer steps. One file is written once (``shared.pt``), one by each
rank (``rank-0.pt``); several machines need a file system that all of them see. The files hold tensors and numbers,
nothing that could run.
"""

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime.checkpoint_files import (
    FOLDER,
    abandon,
    begin,
    checkpoint_folder,
    checkpoints,
    complete,
    forget_old,
    half_written,
    read_manifest,
    set_aside,
    writing_folder,
)
from alpaca_rlhf.runtime.outputs import hold_output_dir
from alpaca_rlhf.runtime.random_state import random_states, set_random_states
from alpaca_rlhf.runtime.run import Run


class Stateful(Protocol):
    """Something small that is equal on all ranks."""

    def state_dict(self) -> Any:
        """Plain data and tensors."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""


class TrainedModel(Protocol):
    """An engine: see engines.base.Engine."""

    def shared_state(self) -> dict[str, Any]:
        """What is equal on all ranks."""

    def rank_state(self) -> dict[str, Any]:
        """What is this rank's own."""

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on from there."""


class Checkpoints:
    """The checkpoints of one run; every method must be called on all ranks.

    In this order: construct (finds and checks, before any work), :meth:`identify` (the data and models are the same),
    :meth:`restore` (when the engines exist), :meth:`after_step` in the loop.
    """

    def __init__(
        self,
        run: Run,
        settings: Mapping[str, Any],
        flag: Callable[[str], str],
        *,
        output_dir: str | None,
        every: int,
        keep: int,
        resume: str | None,
    ) -> None:
        """Look for the checkpoint to go on from.

        settings: all that the trained weights depend on, by field; flag: field → the option that sets it, for
        sentences. output_dir: None: neither looked for nor written. every: optimizer steps between two checkpoints,
        0: none but when SIGTERM stops the run. keep: how many; 0: all. resume: None, "auto" (output_dir) or a
        directory.

        Raises UserError: another run that is writing into output_dir, a directory that does not exist, no complete
        checkpoint among those there, one made with other settings, on another device or by another number of processes,
        or checkpoints of an earlier run where a new one would start.
        """
        self.output_dir, self.run, self.every, self.keep = Path(output_dir) if output_dir else None, run, every, keep
        own = {"engine.dtype": str(run.dtype).removeprefix("torch."), "the device": run.device.type}
        self.settings, self.flag = {**settings, **own}, flag
        self.start = 0  # optimizer steps that the checkpoint found has behind it
        self.stopped = False
        self._sources: dict[str, str] = {}
        self._asked_to_stop = False
        self._from: Path | None = None
        self._manifest: dict[str, Any] = {}
        outcomes = run.gather(self._outcome(resume) if run.is_main else None)
        self._from, self._manifest, problem = outcomes[0]
        if problem:
            raise UserError(problem)
        self.start = self._newest = self._manifest.get("step", 0)

    @property
    def resuming(self) -> bool:
        """Whether a checkpoint was found."""
        return self._from is not None

    @property
    def in_place(self) -> bool:
        """Whether it is one of this output directory, so that the log there is its log."""
        folders = checkpoints(self.output_dir) if self.output_dir is not None else []
        return self._from is not None and self._from.resolve() in {folder.resolve() for folder in folders}

    def identify(self, sources: dict[str, Callable[[], str]]) -> None:
        """Tell what else decides the result: words for it → a function that gives a digest, called now, once.

        Later the files may be others than those that were read. Raises UserError if the checkpoint was made from
        something else.
        """
        problem = None
        if self.run.is_main and self.output_dir is not None:
            self._sources = {words: digest() for words, digest in sources.items()}
        if self._from is not None and self.run.is_main:
            saved = self._manifest["sources"]
            changed = [words for words, digest in self._sources.items() if digest != saved.get(words)]
            if changed or saved.keys() - sources.keys():
                names = " and ".join(changed or sorted(saved.keys() - sources.keys()))
                problem = f"{self._from} was made with another content of {names}: give that, or start without --resume"
        self._raise(problem)

    def restore(self, models: dict[str, TrainedModel], states: dict[str, Stateful], total: int) -> int:
        """Bring everything to where the checkpoint was made; returns the optimizer steps done, of ``total`` (0: anew).

        From here on SIGTERM asks the run to stop after its present step, if there is a place for a checkpoint.
        """
        self._models, self._states, self.total = models, states, total
        if self._from is not None:
            shared = _load(self._from / "shared.pt")
            own = _load(self._from / f"rank-{self.run.rank}.pt")
            for name, model in models.items():
                model.load_state(shared["models"][name], own["models"][name])
            for name, state in states.items():
                state.load_state_dict(shared["states"][name])
            set_random_states(own["random"], self.run.device)
            rest = f"{total - self.start} to go" if self.start < total else "all are done, nothing is left to train"
            self.run.print(f"resuming after optimizer step {self.start} of {total} ({rest}) from {self._from}")
        if self.output_dir is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask_to_stop)
        return self.start

    def after_step(self, step: int) -> bool:
        """Write the checkpoint due after ``step`` optimizer steps of the run; True: it was asked to stop.

        One that cannot be written (a full disk) is told and tried again the next time; the ones before it stay.

        Raises UserError if it was to be the last one.
        """
        flag = torch.tensor(int(self._asked_to_stop), dtype=torch.int32)
        asked, at_end = bool(self.run.max(flag)), step == self.total
        stop = asked and not at_end
        due = self.every > 0 and (step % self.every == 0 or at_end)
        if not (asked or due):
            return False
        assert self.output_dir is not None
        problem = self._save(step)  # after the last step too, should the time not suffice for the output
        kept = checkpoints(self.output_dir) if self.run.is_main else []
        last = f"the newest complete one is {kept[0]}" if kept else "there is no other"
        if problem and stop:
            raise UserError(f"SIGTERM stopped the run, and its checkpoint of step {step} failed: {problem}; {last}")
        if problem:
            self.run.print(f"warning: the checkpoint of step {step} could not be written ({problem}); {last}; going on")
        if stop:
            self.stopped = True
            self.run.print(
                f"stopped by SIGTERM after optimizer step {step} of {self.total}; all of it is in "
                f"{checkpoint_folder(self.output_dir, step)}: go on with the same command and --resume, "
                "without a folder behind it"
            )
        return stop

    def _outcome(self, resume: str | None) -> tuple[Path | None, dict[str, Any], str | None]:
        """(checkpoint or None, its manifest, problem or None), with notices on the way."""
        problem = hold_output_dir(self.output_dir, self.run.print)
        if problem:
            return None, {}, problem
        own = checkpoints(self.output_dir) if self.output_dir is not None else []
        if resume is None:
            return None, {}, _unexpected(own)
        directory = self.output_dir if resume == "auto" else Path(resume)
        assert directory is not None
        if not directory.is_dir():
            return None, {}, f"--resume {resume}: there is no such directory"
        for leftover in half_written(directory):
            self.run.print(f"{leftover} was never finished and is left out")
        found = checkpoints(directory)
        if own and not {path.resolve() for path in found} & {path.resolve() for path in own}:
            return None, {}, _unexpected(own)
        for folder in found:
            manifest = read_manifest(folder)
            if isinstance(manifest, dict):
                return folder, manifest, self._differs(folder, manifest)
            self.run.print(f"the checkpoint {folder} {manifest}; looking for the one before")
        if found:
            return None, {}, f"--resume: none of the checkpoints in {directory} is complete; start without --resume"
        if any((directory / name / "training_arguments.json").exists() for name in ("", "actor")):
            return None, {}, (
                f"--resume: {directory} holds a finished model and no checkpoint, so there is nothing to go on with; "
                "start without --resume to train it anew"
            )  # fmt: skip
        self.run.print(f"--resume: there is no checkpoint in {directory} yet, the run starts anew")
        return None, {}, None

    def _differs(self, folder: Path, manifest: dict[str, Any]) -> str | None:
        processes, saved = manifest["world_size"], manifest["settings"]
        if processes != self.run.world_size:
            return (
                f"{folder} was made by {processes} process(es) and {self.run.world_size} were started: start as many "
                f"(--num_gpus {processes})"
            )
        for field in [*self.settings, *saved]:
            before, now = saved.get(field), self.settings.get(field)
            if before != now:
                return (
                    f"{folder} was made with {self.flag(field)} {_shown(before)} and now it is {_shown(now)}, which "
                    "gives another model: give the same, or start without --resume"
                )
        return None

    def _save(self, step: int) -> str | None:
        """Write one checkpoint; returns why it could not be written."""
        assert self.output_dir is not None
        folder, main = checkpoint_folder(self.output_dir, step), self.run.is_main

        def seal() -> None:
            record = {"step": step, "world_size": self.run.world_size, "settings": self.settings}
            record["sources"] = self._sources
            # Newer than the last one written is what is damaged, or of the run as it went before it was resumed.
            for aside in set_aside(self.output_dir, newer_than=self._newest):
                self.run.print(f"{aside} keeps a checkpoint that is damaged, or that this run went back behind")
            complete(folder, record)
            self._newest = step

        nothing = lambda: None  # noqa: E731
        actions = (lambda: begin(folder)) if main else nothing, lambda: self._write(folder), seal if main else nothing
        for action in actions:
            problem = self._together(action)
            if problem:
                if main:
                    abandon(folder)
                return problem
        if main:
            forget_old(self.output_dir, self.keep)
        return None

    def _write(self, folder: Path) -> None:
        writing, models = writing_folder(folder), self._models
        if self.run.is_main:
            states = {name: state.state_dict() for name, state in self._states.items()}
            _store({"models": {name: model.shared_state() for name, model in models.items()}, "states": states},
                   writing / "shared.pt")  # fmt: skip
        own = {name: model.rank_state() for name, model in models.items()}
        _store({"models": own, "random": random_states(self.run.device)}, writing / f"rank-{self.run.rank}.pt")

    def _together(self, action: Callable[[], object]) -> str | None:
        """Do something on every rank; returns the first rank's reason why it failed, on all of them."""
        problem = None
        try:
            action()
        except OSError as error:
            problem = error.strerror or str(error)
        return next((text for text in self.run.gather(problem) if text), None)

    def _raise(self, problem: str | None) -> None:
        text = self.run.gather(problem)[0]
        if text:
            raise UserError(text)

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        self._asked_to_stop = True


def _store(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch's writer hides what the file said, such as a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _unexpected(own: list[Path]) -> str | None:
    if not own:
        return None
    return (
        f"{own[0].parent} holds checkpoints of an earlier run: go on with it (--resume), choose another --output_dir, "
        f"or remove the folder {FOLDER} first"
    )


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "not given" if value is None else str(value)

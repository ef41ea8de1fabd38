"""Output directories: checked before work starts, replaced only by a complete new output, never by half of one."""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from alpaca_rlhf.arguments.errors import UserError

_WRITING = ".writing"  # an output on its way; worthless if found later
_COMPLETE = ".complete"  # a whole output that only has to be moved into its place
_LOCK = ".lock"
_held: dict[Path, IO[bytes]] = {}  # what this process keeps other runs out of
_MANIFEST = ".output_files.json"  # the names the last output put here; everything else in the folder is the user's
_SECRET_NAME = re.compile(r"(^|_)(api_?key|access_?key|auth_?token|hf_?token|password|secret)s?$", re.IGNORECASE)


def prepare_output_dir(path: str | Path | None) -> None:
    """Make the directory if need be and prove, by writing into it, that an output can be put there; None: no output.

    Called before any work. An output that an earlier process had completed but not moved into place is put in place
    now. Raises UserError with the path and the system's reason.
    """
    if path is None:
        return
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as probe:
            probe.write(b"probe")
            probe.flush()
        _move_into_place(directory)
    except FileExistsError as error:
        raise UserError(f"the output directory {directory} is a file: choose another one") from error
    except OSError as error:
        raise UserError(
            f"the output directory {directory} cannot be written ({error.strerror}): choose another one"
        ) from error


def hold_output_dir(directory: Path | None, notice: Callable[[str], None]) -> str | None:
    """Keep other processes' runs out of a directory until :func:`release_output_dirs` or the end of this process; None:
    no directory. Called by one process of a run. Returns what to tell the user where another run is at work there.

    Two runs would take each other's checkpoints and logs for their own. A file system without locks is told of.
    """
    if directory is None or directory.resolve() in _held:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return f"another run is writing into {directory}: wait for its end, or choose another --output_dir"
    except OSError as error:
        notice(f"warning: {directory} cannot be locked ({error.strerror}); start no second run that writes into it")
    _held[directory.resolve()] = file
    return None


def release_output_dirs() -> None:
    """Let go of every directory that :func:`hold_output_dir` keeps."""
    while _held:
        _held.popitem()[1].close()


def write_output(directory: Path, write: Callable[[Path], None]) -> None:
    """Replace the output in a directory by what write(folder) writes, entirely or not at all.

    write gets an empty folder inside the directory (so the same file system, and no rights needed on the parent).
    While it writes, and if it raises, the old output stays as it was and nothing new is left behind. When it returns,
    one rename makes the new output the valid one; only then its files take their places, those of the previous output
    that have no successor go, and files that no output wrote stay. A process that dies between leaves the rest to
    the next prepare_output_dir. To be called by one process.

    Raises UserError where the disk does not take it.
    """
    prepare_output_dir(directory)
    writing = directory / _WRITING
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    try:
        write(writing)
        _share(writing)
        names = sorted(entry.name for entry in writing.iterdir())
        (writing / _MANIFEST).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
        writing.rename(directory / _COMPLETE)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise UserError(
            f"the output in {directory} could not be written ({reason}); what was there is unchanged: make room, then "
            "go on from the newest checkpoint with --resume, or train again"
        ) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    _move_into_place(directory)


def save_arguments(directory: Path, arguments: dict[str, Any]) -> Path:
    """Write the effective settings of a run, and the time as ``finished`` (UTC, ISO 8601), to training_arguments.json,
    atomically, and return its path.

    arguments: nested and JSON-able. A name that looks like a credential is an error of the program: secrets come from
    the environment and are never part of the settings.
    """
    secrets = _secret_names(arguments)
    assert not secrets, f"credentials among the settings to be saved: {secrets}"
    target = Path(directory) / "training_arguments.json"
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        record = {**arguments, "finished": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        partial.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _move_into_place(directory: Path) -> None:
    """Finish a replacement that has been decided. Every step may be repeated, and by several ranks at once."""
    complete, previous = directory / _COMPLETE, directory / _MANIFEST
    decided = complete / _MANIFEST
    with suppress(FileNotFoundError):  # nothing to do, or another rank is ahead
        new_names = set(json.loads(decided.read_text(encoding="utf-8")))
        if previous.exists():
            for name in set(json.loads(previous.read_text(encoding="utf-8"))) - new_names:
                _remove(directory / name)
        for name in sorted(new_names):
            _replace(complete / name, directory / name)
        _replace(decided, previous)
    with suppress(FileNotFoundError):
        complete.rmdir()


def _share(folder: Path) -> None:
    """Give files the mode that the user's umask asks for: some libraries make theirs readable to the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _replace(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        if source.exists() and (target.is_dir() or source.is_dir()):  # rename(2) replaces no full directory
            _remove(target)
        os.replace(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _secret_names(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [str(name) for name in value if _SECRET_NAME.search(str(name))]
        return own + [name for inner in value.values() for name in _secret_names(inner)]
    if isinstance(value, list | tuple):
        return [name for inner in value for name in _secret_names(inner)]
    return []

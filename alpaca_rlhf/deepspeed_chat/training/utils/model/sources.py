"""Where a model comes from: a directory, an adapter's directory or a hub name, and what is wrong with it."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from alpaca_rlhf.arguments.errors import UserError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model_path(path: str) -> None:
    """Refuse what is neither a directory nor can be a hub name, before anything asks the network.

    Raises:
        UserError: an empty path, a file, or something that is spelt like a path and does not exist.
    """
    if not path:
        raise UserError("The path of a model is empty; give a directory or a hub name.")
    place = Path(path)
    if place.is_dir():
        return
    if place.exists():
        raise UserError(f"The model {path} is a file; give the directory that holds config.json and the weights.")
    in_local_directory = len(place.parts) > 1 and Path(place.parts[0]).is_dir()
    if path.startswith((".", "~", "/")) or in_local_directory or not HUB_NAME.fullmatch(path):
        raise UserError(f"The model directory {path} does not exist; check the path.")


def actor_directory(path: str) -> str:
    """``path``, or the ``actor`` in it where it is the whole output of step 3."""
    actor = Path(path) / "actor"
    whole = actor.is_dir() and not any((Path(path) / name).is_file() for name in ("config.json", "adapter_config.json"))
    return str(actor if whole else Path(path)) if Path(path).is_dir() else path


def adapter_base(path: str) -> str | None:
    """The base model that the adapter-only directory ``path`` names; None where it is no such directory.

    Raises:
        UserError: the adapter names no base model, or one that does not exist.
    """
    directory = Path(path)
    file = directory / "adapter_config.json"
    if not file.is_file() or (directory / "config.json").is_file():
        return None
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise UserError(f"The adapter {path} does not name its base model; give the merged model's directory.")
    if (directory / base).is_dir():
        base = str(directory / base)
    try:
        check_model_path(base)
    except UserError as error:
        raise UserError(f"The adapter {path} belongs to the base model {base}, which does not exist.") from error
    return base


def load_config(path: str) -> PreTrainedConfig:
    """The configuration of the model at ``path`` (of an adapter's base model), without loading weights.

    Raises:
        UserError: nothing there, no config.json, an architecture that transformers does not know.
    """
    check_model_path(path)
    source = adapter_base(path) or path
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UserError(f"The directory {source} holds no model (no config.json).")
    try:
        with quiet():
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"The model {source} cannot be loaded: {first_line(error)}") from error


def weights_digest(directory: str | Path) -> str:
    """SHA-256 over the names and bytes of a directory's weight files."""
    digest = hashlib.sha256()
    for path in sorted([*Path(directory).glob("*.safetensors"), *Path(directory).glob("pytorch_model*.bin")]):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def model_digest(path: str) -> str:
    """SHA-256 of what a run starts from: the weights and the configuration of a directory (of an adapter and its base),
    wherever it lies; of a hub name, the name."""
    if not Path(path).is_dir():
        return hashlib.sha256(path.encode()).hexdigest()
    base = adapter_base(path)
    digest = hashlib.sha256((weights_digest(path) + (model_digest(base) if base else "")).encode())
    for name in ("config.json", "adapter_config.json"):
        if (Path(path) / name).is_file():
            digest.update((Path(path) / name).read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers while it loads: what it would warn about is checked here, and raised as an error."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for one sentence to the user."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

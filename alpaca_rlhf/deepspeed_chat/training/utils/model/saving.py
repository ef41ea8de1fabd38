"""Saving a model so that it is complete, and reading it back to be sure."""

import copy
import json
import os
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import quiet


def save_model(
    directory: Path,
    model: PreTrainedModel,
    state_dict: dict[str, Tensor],
    encoder_tokenizer: PreTrainedTokenizerBase,
    max_shard_size: str = "5GB",
) -> None:
    """Write weights (safetensors, sharded when large), configuration, generation configuration and tokenizer.

    Args:
        directory: created if need be.
        model: gives class and configurations; its own weights are not read, so they may be sharded or have adapters.
        state_dict: the complete weights under the model's plain names (merged, gathered). Tied weights are written
            once.
        encoder_tokenizer: saved as it is, with the chat template that is set on it.

    Raises:
        RuntimeError: ``state_dict`` is not complete, see :func:`check_complete`.
        OSError, SafetensorError: the disk does not take it.
    """
    skeleton = check_complete(model, state_dict)
    floating = next(tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point())
    skeleton.to(floating)  # the dtype that the saved configuration names
    if model.can_generate():
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    tied = skeleton.all_tied_weights_keys
    weights = {name: tensor.contiguous() for name, tensor in state_dict.items() if name not in tied}
    with quiet():
        skeleton.save_pretrained(directory, state_dict=weights, max_shard_size=max_shard_size)
        _check_room(directory, encoder_tokenizer)
        encoder_tokenizer.save_pretrained(directory)


def _check_room(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reserve and free the space of a tokenizer: its library raises nothing more special than Exception on a full disk.

    Raises OSError.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        with tempfile.TemporaryFile(dir=directory) as probe:
            vocabulary = tokenizer.backend_tokenizer.to_str(pretty=True)
            beside = str(tokenizer.chat_template) + str(tokenizer.init_kwargs)  # files that are written before it
            os.posix_fallocate(probe.fileno(), 0, len((vocabulary + 2 * beside).encode()) + (1 << 14))


def check_complete(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> PreTrainedModel:
    """Check that ``state_dict`` holds every weight of the model's class and configuration, whole, and nothing else.

    Returns:
        an empty model (on the meta device) of that class and configuration.

    Raises:
        RuntimeError: an empty tensor, a missing or unexpected name, a wrong shape, or two tied weights that differ.
    """
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config))
    expected = skeleton.state_dict()
    tied = skeleton.all_tied_weights_keys
    problems = [f"{name} is empty" for name, tensor in state_dict.items() if tensor.numel() == 0]
    problems += [f"{name} is missing" for name in expected if name not in state_dict and name not in tied]
    problems += [f"{name} is unexpected" for name in state_dict if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensor.shape)} instead of {tuple(expected[name].shape)}"
        for name, tensor in state_dict.items()
        if tensor.numel() and name in expected and tensor.shape != expected[name].shape
    ]
    problems += [
        f"{name} differs from {source}, which it is tied to"
        for name, source in tied.items()
        if name in state_dict and source in state_dict and not torch.equal(state_dict[name], state_dict[source])
    ]
    if problems:
        raise RuntimeError(f"The weights to save are not complete: {'; '.join(problems[:10])} ({len(problems)} in all)")
    return skeleton


def verify_saved(directory: Path, state_dict: dict[str, Tensor]) -> None:
    """Read the weight files back and compare them with what was to be saved.

    Every tensor must be there with the same type, shape and bytes; a tied one may be there under its other name.

    Raises:
        RuntimeError: a tensor is missing, empty or different.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    place = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            place.update({name: file for name in opened.keys()})
    renamed = {} if place.keys() <= state_dict.keys() else _as_loaded(directory)
    for name, tensor in state_dict.items():
        if name in place:
            with safe_open(place[name], framework="pt") as opened:
                saved = opened.get_tensor(name)
        elif name in renamed:
            saved = renamed[name]
        elif _tied_twin(directory, name, tensor, state_dict, place):
            continue
        else:
            raise RuntimeError(f"{name} is missing from the saved files of {directory}")
        if saved.numel() == 0 or not _same_bytes(saved, tensor):
            raise RuntimeError(f"{name} in the saved files of {directory} is not what was to be saved")


def _tied_twin(
    directory: Path, name: str, tensor: Tensor, state_dict: dict[str, Tensor], place: dict[str, Path]
) -> bool:
    """Whether an unsaved tensor is the second name of a saved one in a model that ties its embeddings."""
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings", True) or tensor.dim() != 2 or len(tensor) != config["vocab_size"]:
        return False
    same_shape = [other for other in place if other != name and state_dict[other].shape == tensor.shape]
    return any(_same_bytes(state_dict[other], tensor) for other in same_shape)


def _as_loaded(directory: Path) -> dict[str, Tensor]:
    """The weights as transformers loads them, for architectures whose files use other names than their modules."""
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    with quiet():
        model = getattr(transformers, config["architectures"][0]).from_pretrained(directory, dtype="auto")
    return model.state_dict()


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*flat)

"""The states of the random generators of one process, for a checkpoint."""

import random
from typing import Any

import numpy
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators (of the CPU and of ``device``), as tensors and numbers."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on with what :func:`random_states` gave on the same kind of device."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["device"], device)

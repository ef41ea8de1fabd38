"""LoRA (arXiv 2106.09685): peft's layers in place, chosen by whole name parts, merged in float32."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from alpaca_rlhf.arguments.errors import UserError

ADAPTER = "default"
LORA_PARTS = {"lora_A", "lora_B"}


class LoraReport(NamedTuple):
    """What was adapted."""

    modules: list[str]
    """Full names of the adapted layers."""
    trainable: int
    """Parameters (numbers) in the adapters."""
    total: int
    """Parameters of the whole model, adapters included."""


def linear_layers(model: PreTrainedModel, module_names: Sequence[str]) -> list[str]:
    """Full names of the linear layers of the decoder (``nn.Linear``, GPT-2's ``Conv1D``) that ``module_names`` means.

    A name matches a layer when its dotted parts stand next to each other in the layer's name: ``q_proj`` and
    ``layers.0`` match, ``proj`` does not match ``q_proj``. Blanks around a name and empty names do not count. No name
    at all: every linear layer. The output layer (or score head) is never one of them.

    Raises:
        UserError: a name matches nothing; the message lists the linear layers that exist.
    """
    heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in heads and not is_adapter(name)
    ]
    wanted = [name.strip() for name in module_names if name.strip()]
    if not wanted:
        return layers
    chosen: set[str] = set()
    for name in wanted:
        matches = [layer for layer in layers if _contains(layer, name)]
        if not matches:
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
            raise UserError(
                f'The LoRA module name "{name}" matches no linear layer of the model (whole parts of a name count); '
                f"its linear layers are: {known}; the first one is {layers[0] if layers else 'none'}."
            )
        chosen.update(matches)
    return [layer for layer in layers if layer in chosen]


def check_lora_module_names(config: PreTrainedConfig, module_names: Sequence[str]) -> list[str]:
    """:func:`linear_layers` of a model that is not loaded: from its configuration, without memory for weights."""
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    auto_class = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    with torch.device("meta"):
        return linear_layers(auto_class.from_config(config, trust_remote_code=False), module_names)


def convert_linear_layer_to_lora(
    model: PreTrainedModel,
    module_names: Sequence[str],
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    seed: int,
) -> LoraReport:
    """Put LoRA adapters beside the chosen linear layers, in place: ``y = W x + (alpha / rank) B A dropout(x)``.

    The adapters are float32, whatever the model is. ``A`` is drawn from ``seed`` alone (Kaiming uniform, as peft
    does), ``B`` is 0, so the model computes the same as before. Which base weights are trainable does not change.

    Args:
        model: the transformers model itself, not a wrapper.
        module_names: see :func:`linear_layers`.

    Raises:
        UserError: a name matches no layer.
    """
    assert rank > 0, f"a LoRA adapter needs a rank of at least 1, not {rank}"
    modules = linear_layers(model, module_names)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    transposed = all(isinstance(model.get_submodule(name), Conv1D) for name in modules)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules, fan_in_fan_out=transposed
    )
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name in modules:
        layer = model.get_submodule(name)
        a, b = layer.lora_A[ADAPTER].float().weight, layer.lora_B[ADAPTER].float().weight
        with torch.no_grad():
            a.copy_(nn.init.kaiming_uniform_(torch.empty(a.shape), a=math.sqrt(5), generator=generator))
            b.zero_()
    for name, parameter in model.named_parameters():
        # Injecting freezes the base; whether it is trained is a choice of its own.
        parameter.requires_grad_(is_adapter(name) or flags[name.replace(".base_layer.", ".")])
    adapters = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    return LoraReport(modules, adapters, sum(parameter.numel() for parameter in model.parameters()))


def only_optimize_lora_parameters(model: nn.Module, also: Sequence[nn.Parameter] = ()) -> None:
    """Freeze everything but the adapters and the parameters in ``also`` (a reward model's head)."""
    kept = {id(parameter) for parameter in also}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or id(parameter) in kept)
    for parameter in also:
        parameter.requires_grad_(True)


def is_adapter(name: str) -> bool:
    """Whether a parameter or module of this name belongs to an adapter."""
    return not LORA_PARTS.isdisjoint(name.split("."))


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without its adapters; afterwards each is as it was. May be nested."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers, "the model has no adapters to disable"
    before = [layer.disable_adapters for layer in layers]
    try:
        for layer in layers:
            # Not enable_adapters(False): that also changes requires_grad, which an optimizer may rely on.
            layer._disable_adapters = True
        yield
    finally:
        for layer, flag in zip(layers, before, strict=True):
            layer._disable_adapters = flag


def convert_lora_to_linear_layer(model: PreTrainedModel) -> None:
    """Merge the adapters into the weights and put the plain layers back, in place."""
    names = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for name in names:
        layer = model.get_submodule(name)
        base = layer.base_layer
        with torch.no_grad():
            a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            base.weight.copy_(_merged(layer, base.weight, a, b))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, base)
    if names:
        del model.peft_config


def merged_state_dict(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights from a complete state dict with adapters: ``W + scale B A``; the live model stays as it is.

    Args:
        model: the model that the names belong to; its weights are not read, so they may be sharded.
        state_dict: complete (gathered). Tensors without an adapter are handed on, not copied.
    """
    plain = {}
    for name, tensor in state_dict.items():
        if is_adapter(name):
            continue
        if name.endswith(".base_layer.weight"):
            prefix = name.removesuffix(".base_layer.weight")
            a = state_dict[f"{prefix}.lora_A.{ADAPTER}.weight"]
            b = state_dict[f"{prefix}.lora_B.{ADAPTER}.weight"]
            tensor = _merged(model.get_submodule(prefix), tensor, a, b)
        plain[name.replace(".base_layer.", ".")] = tensor
    return plain


def save_adapter(model: PreTrainedModel, state_dict: dict[str, Tensor], directory: Path, base_path: str) -> None:
    """Write the adapters in the format that ``PeftModel.from_pretrained(base model, directory)`` loads.

    Args:
        model: with adapters; gives rank, scale and layer names.
        state_dict: complete (gathered), with adapters.
        directory: created if need be; gets ``adapter_config.json`` and ``adapter_model.safetensors``.
        base_path: the model that the training started from. A reward model's head is saved along.

    Raises:
        RuntimeError: an adapter tensor is missing or empty.
    """
    settings = model.peft_config[ADAPTER]
    modules = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    names = [f"{module}.{part}.{ADAPTER}.weight" for module in modules for part in sorted(LORA_PARTS)]
    scored = isinstance(getattr(model, "score", None), nn.Linear)
    names += [name for name in state_dict if scored and name.split(".")[0] == "score"]
    broken = [name for name in names if name not in state_dict or state_dict[name].numel() == 0]
    if broken:
        raise RuntimeError(f"adapter tensors are missing or empty: {broken[:5]} ({len(broken)} of {len(names)})")
    config = LoraConfig(
        r=settings.r, lora_alpha=settings.lora_alpha, lora_dropout=settings.lora_dropout, target_modules=modules,
        fan_in_fan_out=settings.fan_in_fan_out,
        task_type=TaskType.SEQ_CLS if scored else TaskType.CAUSAL_LM,  # SEQ_CLS: peft also loads the saved "score"
        base_model_name_or_path=str(base_path), inference_mode=True,
    )  # fmt: skip
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": state_dict[name].detach().cpu().contiguous().clone()
        for name in names
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    save_file(tensors, Path(directory) / "adapter_model.safetensors", metadata={"format": "pt"})


def _merged(layer: LoraLayer, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``weight + scale b a`` computed in float32, in the type of ``weight``; Conv1D holds its weight transposed."""
    delta = layer.scaling[ADAPTER] * (b.detach().float() @ a.detach().float()).to(weight.device)
    return (weight.detach().float() + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)


def _contains(layer: str, name: str) -> bool:
    """Whether the parts of ``name`` stand next to each other in ``layer``."""
    parts, wanted = layer.split("."), [part for part in name.split(".") if part]
    return bool(wanted) and any(parts[i : i + len(wanted)] == wanted for i in range(len(parts)))

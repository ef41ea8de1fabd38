"""Make a loaded model ready to train: adapters, what is frozen, recomputation of activations."""

from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedModel

from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import enable_gradient_checkpointing
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import (
    convert_linear_layer_to_lora,
    only_optimize_lora_parameters,
)


def adapt(
    model: PreTrainedModel,
    *,
    lora_dim: int,
    lora_module_names: Sequence[str],
    lora_alpha: float,
    lora_dropout: float,
    only_optimize_lora: bool,
    gradient_checkpointing: bool,
    seed: int,
    notice: Callable[[str], None],
    keep_trainable: Sequence[nn.Parameter] = (),
) -> None:
    """Put LoRA of rank ``lora_dim`` (0: none) on the named layers, freeze the rest if asked, and say what trains.

    ``keep_trainable``: parameters that stay trainable with ``only_optimize_lora`` (a reward head; L-04).
    """
    if lora_dim:
        report = convert_linear_layer_to_lora(
            model, lora_module_names, rank=lora_dim, alpha=lora_alpha, dropout=lora_dropout, seed=seed
        )
        if only_optimize_lora:
            only_optimize_lora_parameters(model, also=keep_trainable)
        kinds = sorted({name.rsplit(".", 1)[-1] for name in report.modules})
        scale, count = lora_alpha / lora_dim, len(report.modules)
        notice(f"LoRA: rank {lora_dim}, scale {scale:g}, on {count} layers ({', '.join(kinds)})")
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    trainable = {id(p): p.numel() for p in [*model.parameters(), *keep_trainable] if p.requires_grad}
    total = {id(p): p.numel() for p in [*model.parameters(), *keep_trainable]}
    everything, some = sum(total.values()), sum(trainable.values())
    notice(f"parameters: {everything:,}, of which {some:,} ({some / everything:.2%}) train")

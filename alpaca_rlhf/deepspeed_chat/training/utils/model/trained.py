"""What a step leaves behind of a trained model: merged weights, tokenizer, and the adapter if it is to be kept."""

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.saving import save_model, verify_saved
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import merged_state_dict, save_adapter


def save_trained(
    folder: Path,
    module: CausalLM | RewardModel,
    state_dict: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    adapter_base: str | None = None,
) -> None:
    """Write a complete model directory and read it back.

    Args:
        state_dict: complete, under the names of ``module``, adapters included.
        chat_template: how the model was trained; saved with the tokenizer.
        adapter_base: keep the adapter by itself in ``folder/adapter``, on this base model; None: no.

    Raises:
        RuntimeError: incomplete weights, or files that do not read back as they were written.
    """
    state = module.export_state(state_dict)
    merged = merged_state_dict(module.model, state)
    tokenizer.chat_template = chat_template
    save_model(folder, module.model, merged, tokenizer)
    verify_saved(folder, merged)
    if adapter_base is not None:
        save_adapter(module.model, state, folder / "adapter", adapter_base)

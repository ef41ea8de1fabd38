"""Refuse, from configurations alone and before any weights are read, what cannot work."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import check_causal_lm, check_positions
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import check_reward_model
from alpaca_rlhf.deepspeed_chat.training.utils.model.tokenizers import load_tokenizer, tokenizers_agree
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import check_lora_module_names


def check_model(
    path: str, kind: str, *, needed_positions: int, parts: str, lora_module_names: Sequence[str] | None
) -> None:
    """Check that ``path`` is a "causal_lm" or a "reward_model", long enough, with the layers LoRA is to adapt.

    Args:
        needed_positions: tokens of the longest sequence; ``parts`` says how they come about.
        lora_module_names: None: no LoRA.

    Raises:
        UserError: which of these it is not, and what to do.
    """
    config = check_causal_lm(path) if kind == "causal_lm" else check_reward_model(path)
    check_positions(config, f"the model {path}", needed_positions, parts)
    if lora_module_names is not None:
        check_lora_module_names(config, lora_module_names)


def note_other_templates(chat_template: str, notice: Callable[[str], None], *paths: str) -> None:
    """Say so when a model was trained on another chat template than the one that prompts are rendered with now."""
    for path in paths:
        own = load_tokenizer(path, notice=lambda _: None).chat_template
        if own is not None and own != chat_template:
            notice(f"warning: {path} was trained with another chat template than the prompts get now; see --template")


def check_same_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, *paths: str) -> None:
    """Check that the models at ``paths`` were made with this tokenizer; their ids mean something else otherwise (T-09).

    Raises:
        UserError: naming both.
    """
    for path in paths:
        other = load_tokenizer(path, notice=lambda _: None)
        if not tokenizers_agree(tokenizer, other):
            raise UserError(
                f"the tokenizer of {path} differs from that of {name} (vocabulary or special tokens): actor, critic "
                "and reward model must share one; train the reward model from the same base model"
            )

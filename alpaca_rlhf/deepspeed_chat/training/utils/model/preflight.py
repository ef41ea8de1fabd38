"""Refuse, from configurations alone and before any weights are read, what cannot work."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

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


def note_other_shares(
    paths: Sequence[str], split: Sequence[float], seed: int, notice: Callable[[str], None], *models: str
) -> None:
    """Say so when a model was trained on shares of the same data that were cut otherwise: some of this step's records
    may be among those it has seen (D-10).

    Args:
        paths, split, seed: this step's data sets, ``--data_split`` and ``--data_seed``.
        models: directories of earlier steps; what no step of this program has made says nothing.
    """
    mine = {os.path.realpath(path) for path in paths}
    for model in models:
        file = Path(model) / "training_arguments.json"
        made = json.loads(file.read_text(encoding="utf-8")).get("data") if file.is_file() else None
        if not isinstance(made, dict) or not {"paths", "sft_only_paths", "split", "seed"} <= made.keys():
            continue
        shared = [path for path in made["paths"] if os.path.realpath(path) in mine]
        whole = [path for path in made["sft_only_paths"] if os.path.realpath(path) in mine]
        cut_alike = _shares(made["split"]) == _shares(split) and made["seed"] == seed
        if whole or (shared and not cut_alike):
            how = f"--data_split {','.join(f'{part:g}' for part in made['split'])} --data_seed {made['seed']}"
            notice(
                f"warning: {model} was trained on {'all of ' + whole[0] if whole else f'{shared[0]} with {how}'}, so "
                "records of this step may be among those it has seen; give all steps the same --data_split and "
                "--data_seed"
            )


def _shares(split: Sequence[float]) -> list[float]:
    return [round(part / sum(split), 9) for part in split]


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

"""The special ids that tokenizer, configuration and generation configuration name, side by side.

Generation that never stops, or an end that is never trained, comes from their disagreement (faults T-01 and T-02).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.tokenizers import load_tokenizer, vocabulary_size
from alpaca_rlhf.doctor.page import Page, table
from alpaca_rlhf.doctor.weights import Model

NAMES = ("bos", "eos", "pad", "unk")
Ids = Mapping[str, "int | list[int] | None"]


def describe_special_ids(model: Model, page: Page) -> PreTrainedTokenizerBase | None:
    """Print the table and what disagrees; returns the tokenizer as the steps use it, None if it is unusable."""
    repairs: list[str] = []
    try:
        tokenizer = load_tokenizer(model.path, notice=repairs.append)
    except UserError as error:
        page.fact("tokenizer", "not usable, see below")
        page.problem(str(error))
        return None
    declared = _declared(model)
    generation = _generation_ids(model.folder, page)
    used = {name: getattr(tokenizer, f"{name}_token_id") for name in NAMES}
    config = {name: _of_config(model.config, name) for name in NAMES}
    rows = [["", "tokenizer", "config.json", "generation_config.json"]]
    for name in NAMES:
        token = getattr(tokenizer, f"{name}_token")
        cell = "none" if used[name] is None else f"{used[name]} {token!r}"
        if name in declared and declared[name] != token:
            cell = f"{declared[name]!r}, used: {cell}"
        files = (config, generation) if name != "unk" else ({}, {})  # no file has to name it
        rows.append([name.upper(), cell, *(_shown(ids, name) if ids or name != "unk" else "" for ids in files)])
    page.lines("special ids", table(rows))
    for repair in repairs:
        page.fact("", f"on loading: {repair}")
    problems, notes = compare_ids(used, config, generation, tokens={n: getattr(tokenizer, f"{n}_token") for n in NAMES},
                                  rows=max(model.rows, vocabulary_size(tokenizer)))  # fmt: skip
    if declared.get("pad") is not None and declared["pad"] in (tokenizer.eos_token, declared.get("eos")):
        notes = [note for note in notes if not note.startswith("PAD ")]
        notes.append(
            "PAD as stored is the end token: trainers that find padding by its id then never train the end; here "
            f"{tokenizer.pad_token!r} pads, masks come from lengths, and every step saves it so: nothing is to be done"
        )
    if vocabulary_size(tokenizer) > model.rows:
        notes.append(
            f"the tokenizer has ids up to {vocabulary_size(tokenizer) - 1}, the embeddings {model.rows} rows: every "
            "step lets them grow, the new rows start as the mean of the old ones"
        )
    for note in notes:
        page.fact("", note)
    if not problems:
        page.fact("", "BOS and EOS agree wherever they are named")
    for problem in problems:
        page.problem(f"{model.path}: {problem}")
    return tokenizer


def compare_ids(
    used: Ids, config: Ids, generation: Ids, *, tokens: Mapping[str, str | None], rows: int
) -> tuple[list[str], list[str]]:
    """What disagrees: (problems, notes), a sentence each.

    Args:
        used: ids of the tokenizer as the steps use it, by ``bos``, ``eos``, ``pad``, ``unk``.
        config, generation: what the two files say: an id, a list of ids, or None; generation is empty without a file.
        tokens: the tokenizer's texts of the ids.
        rows: ids from here on are no tokens.
    """
    problems, notes = [], []
    for file, ids in (("config.json", config), ("generation_config.json", generation)):
        for name in NAMES:
            told = _as_list(ids.get(name))
            if over := [one for one in told if not 0 <= one < rows]:
                problems.append(
                    f"{name}_token_id is {over[0]} in {file}, but ids end at {rows - 1}; correct it to the "
                    f"tokenizer's {used[name]}"
                )
                continue
            if not told or used[name] in told or name == "unk":
                continue
            own, other = f"{used[name]} ({tokens[name]!r})", f"{_shown(ids, name)} in {file}"
            where = f"{name.upper()} is {own} in the tokenizer but {other}"
            if name == "eos":
                problems.append(
                    f"{where}: programs that trust the file stop at another token, or never; every step trains and "
                    f"saves the tokenizer's, so correct whichever is wrong, eos_token in tokenizer_config.json or "
                    f"eos_token_id in {file}"
                )
            elif name == "bos" and used["bos"] is not None:
                problems.append(
                    f"{where}: the model may have learned to begin with that one, and every step puts the "
                    f"tokenizer's in front; correct whichever is wrong, bos_token in tokenizer_config.json or "
                    f"bos_token_id in {file}"
                )
            elif name == "bos":
                notes.append(f"{file} names a BOS ({_shown(ids, name)}), the tokenizer none: no step puts one in front")
            else:
                notes.append(f"{where}: harmless, masks come from lengths; every step saves the tokenizer's")
    return problems, notes


def _declared(model: Model) -> dict[str, str]:
    """Special tokens as tokenizer_config.json spells them; what it does not name is absent."""
    source = model.path if (Path(model.path) / "tokenizer_config.json").is_file() else str(model.folder)
    file = cached_file(
        source, "tokenizer_config.json",
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    content: dict[str, Any] = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    declared = {}
    for name in NAMES:
        value = content.get(f"{name}_token")
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            declared[name] = value
    return declared


def _of_config(config: PreTrainedConfig, name: str) -> int | list[int] | None:
    return getattr(config, f"{name}_token_id", None)


def _generation_ids(folder: Path, page: Page) -> dict[str, Any]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        page.problem(f"{file} is not valid JSON ({error}); correct it, or remove it")
        return {}
    return {name: content.get(f"{name}_token_id") for name in NAMES}


def _as_list(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _shown(ids: Ids, name: str) -> str:
    told = _as_list(ids.get(name))
    return ", ".join(map(str, told)) if told else ("none" if ids else "no file")

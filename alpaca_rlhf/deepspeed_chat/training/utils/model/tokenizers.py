"""Tokenizers: loading one, repairing its special tokens, comparing two."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import (
    adapter_base,
    check_model_path,
    first_line,
    quiet,
)

Notice = Callable[[str], None]

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer.model",
    "*.model",
    "*.tiktoken",
)
PAD_NAMES = ("<pad>", "[PAD]", "<PAD>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
RESERVED_NAME = re.compile(r"[<\[]\|?(reserved|unused|extra)[\w-]*\d+\|?[>\]]")


def load_tokenizer(path: str, *, notice: Notice) -> PreTrainedTokenizerBase:
    """Load a tokenizer and make its special tokens usable.

    Afterwards EOS is one id of the vocabulary and PAD is another one than BOS and EOS. Nothing else is changed: not
    the padding side, not what ``encode`` adds. Each repair is told through ``notice``.

    Args:
        path: a directory or a hub name. An adapter's directory without a tokenizer gives that of its base model.
        notice: is called with one sentence per repair.

    Raises:
        UserError: nothing is there, no tokenizer is in it, or it has no end-of-text token and none can be derived.
    """
    source = _tokenizer_source(path, notice)
    repairs = _repaired_tokens(source, notice)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **repairs)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"The tokenizer of {source} cannot be loaded: {first_line(error)}") from error
    _check_end_token(tokenizer, source, notice)
    _choose_pad(tokenizer, source, notice)
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of embedding rows that the tokenizer needs: its highest id plus one (ids may have gaps)."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizers_agree(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether ids of ``a`` mean the same in ``b``: equal vocabularies and equal BOS, EOS and PAD."""
    special = [(t.bos_token_id, t.eos_token_id, t.pad_token_id) for t in (a, b)]
    return special[0] == special[1] and a.get_vocab() == b.get_vocab()


def _tokenizer_source(path: str, notice: Notice) -> str:
    """``path``, or the base model of an adapter that came without a tokenizer."""
    check_model_path(path)
    directory = Path(path)
    if not directory.is_dir() or any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        return path
    base = adapter_base(path)
    if base is None:
        raise UserError(
            f"The directory {path} holds no tokenizer (no tokenizer.json, tokenizer.model or vocab file); "
            "copy the tokenizer's files of its base model into it."
        )
    notice(f"The adapter {path} has no tokenizer of its own: that of its base model {base} is used.")
    return _tokenizer_source(base, notice)


def _declared_tokens(source: str) -> dict[str, str]:
    """bos, eos and unk as ``tokenizer_config.json`` spells them; what is not declared is absent."""
    file = cached_file(
        source, "tokenizer_config.json",
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    if file is None:
        return {}
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    declared = {}
    for name in ("bos_token", "eos_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            declared[name] = value
    return declared


def _sentencepiece_tokens(source: str) -> dict[str, str] | None:
    """bos, eos and unk as the sentencepiece model itself names them; None without such a model."""
    file = cached_file(
        source, "tokenizer.model",
        _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    if file is None:
        return None
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=file)
    except (RuntimeError, OSError):  # LLaMA 3's file of this name is a tiktoken table
        return None
    ids = {"bos_token": pieces.bos_id(), "eos_token": pieces.eos_id(), "unk_token": pieces.unk_id()}
    return {name: pieces.id_to_piece(index) for name, index in ids.items() if index >= 0}


def _repaired_tokens(source: str, notice: Notice) -> dict[str, str]:
    """Special tokens to load the tokenizer with, where the declared ones cannot be meant.

    Early LLaMA conversions declare empty strings, or the unknown or the beginning token as the end; the sentencepiece
    model beside them knows better. This is decided before loading, because all three empty break the loading itself.
    """
    declared = _declared_tokens(source)
    suspicious = "" in declared.values() or (
        "eos_token" in declared and declared["eos_token"] in (declared.get("bos_token"), declared.get("unk_token"))
    )
    pieces = _sentencepiece_tokens(source) if suspicious else None
    if pieces is None:
        if "" in declared.values():
            names = ", ".join(name for name, text in declared.items() if not text)
            raise UserError(
                f"The tokenizer of {source} declares {names} as an empty string and has no sentencepiece model to "
                "repair it from; write the right tokens into its tokenizer_config.json."
            )
        return {}
    cannot_be = {
        "bos_token": {"", pieces.get("unk_token")},
        "eos_token": {"", pieces.get("unk_token"), pieces.get("bos_token")},
        "unk_token": {""},
    }
    repairs = {name: pieces[name] for name, text in declared.items() if text in cannot_be[name] and name in pieces}
    for name, text in repairs.items():
        notice(
            f"The tokenizer of {source} declares {name} {declared[name]!r}: repaired to {text!r}, as its model says."
        )
    return repairs


def _check_end_token(tokenizer: PreTrainedTokenizerBase, source: str, notice: Notice) -> None:
    """EOS must be one id of the vocabulary; a tokenizer that names none gets its sentencepiece model's."""
    if tokenizer.eos_token is None:
        pieces = _sentencepiece_tokens(source) or {}
        if "eos_token" in pieces:
            tokenizer.eos_token = pieces["eos_token"]
            notice(f"The tokenizer of {source} names no eos_token: {pieces['eos_token']!r} is used, as its model says.")
    end = tokenizer.eos_token
    if not end or tokenizer.get_vocab().get(end) != tokenizer.eos_token_id:
        raise UserError(
            f"The tokenizer of {source} has no usable end-of-text token (eos_token is {end!r}, id "
            f"{tokenizer.eos_token_id}); name one of its tokens as eos_token in its tokenizer_config.json."
        )


def _choose_pad(tokenizer: PreTrainedTokenizerBase, source: str, notice: Notice) -> None:
    """Give the tokenizer a PAD that is neither BOS nor EOS: the unknown token, a reserved one, or a new one."""
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    vocabulary = tokenizer.get_vocab()
    pad = tokenizer.pad_token
    if pad and vocabulary.get(pad) == tokenizer.pad_token_id and tokenizer.pad_token_id not in taken:
        return
    was = "no padding token" if not pad else f"{pad!r} as padding, which is also its end or beginning"
    unknown = tokenizer.unk_token
    reserved = [text for text in PAD_NAMES if text in vocabulary]
    reserved += sorted((text for text in vocabulary if RESERVED_NAME.fullmatch(text)), key=vocabulary.get)
    reserved = [text for text in reserved if vocabulary[text] not in taken]
    if unknown and unknown in vocabulary and vocabulary[unknown] not in taken:
        chosen, how = unknown, "its unknown token"
    elif reserved:
        chosen, how = reserved[0], "a token of its vocabulary"
    else:
        chosen, how = "<pad>", "a new token"
    tokenizer.add_special_tokens({"pad_token": chosen})
    notice(f"The tokenizer of {source} has {was}: {chosen!r} (id {tokenizer.pad_token_id}, {how}) is used for padding.")

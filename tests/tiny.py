"""Tiny models, tokenizers and records, all made in memory from a config: no download, seconds to run.

``TINY-ROPE`` of the fault list is :func:`tiny_llama`, ``TINY-ABS`` is :func:`tiny_gpt2` (learned absolute positions),
``TOK`` is :func:`word_tokenizer`, ``TOK-SP`` is :func:`sentencepiece_tokenizer`.
"""

import json
import os
from pathlib import Path

import sentencepiece
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)

WORDS = (
    "Human : Assistant name a colour blue seven red green one two three the cat dog eats sleeps runs big small "
    "and what is why do like apples pears water good bad yes no please thanks story of sun moon sky tree "
    ". , ? ! ] [ { } 1 2 3"
).split()

PAIRS = [
    {"prompt": "Human: name a colour Assistant:", "chosen": " blue", "rejected": " seven"},
    {"prompt": "Human: what is the sky Assistant:", "chosen": " the sky is blue", "rejected": " no"},
    {"prompt": "Human: do dog and cat like water Assistant:", "chosen": " yes", "rejected": " story of the sun"},
    {"prompt": "Human: name a small tree Assistant:", "chosen": " green pears", "rejected": " bad"},
    {"prompt": "Human: why is the sun big Assistant:", "chosen": " the sun is big", "rejected": " a cat eats"},
    {"prompt": "Human: story of a dog please Assistant:", "chosen": " a dog runs and eats", "rejected": " dog"},
    {"prompt": "Human: what do cat like Assistant:", "chosen": " apples", "rejected": " two"},
    {"prompt": "Human: one two Assistant:", "chosen": " three", "rejected": " seven"},
]


def word_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of about 60 words; ids 0..3 are <pad>, <s>, </s>, <unk>."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="</s>" if pad_is_eos else "<pad>",
    )  # fmt: skip


def sentencepiece_tokenizer(directory: Path) -> LlamaTokenizer:
    """A LLaMA tokenizer on a sentencepiece model of a few lines; ``]{`` is one piece, ids 0..2 unk, bos, eos."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [" ".join(WORDS[(7 * i + j * j) % len(WORDS)] for j in range(9)) + " ]{ x" for i in range(60)]
    text = directory / "corpus.txt"
    text.write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(directory / "tokenizer"), vocab_size=400, hard_vocab_limit=False,
        model_type="bpe", unk_id=0, bos_id=1, eos_id=2, pad_id=-1, byte_fallback=True, minloglevel=2,
        user_defined_symbols=["]{"], normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    os.remove(text)
    return LlamaTokenizer.from_pretrained(directory)


def tiny_llama(vocabulary: int = 64, seed: int = 0, positions: int = 128, **config) -> LlamaForCausalLM:
    """Two layers, hidden 16, rotary positions, float32, no dropout."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.2, **config,
    )).eval()  # fmt: skip


def tiny_gpt2(vocabulary: int = 64, seed: int = 0, positions: int = 128, dropout: float = 0.0) -> GPT2LMHeadModel:
    """Two layers, hidden 16, learned absolute positions, tied embeddings."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_positions=positions, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.2,
    )).eval()  # fmt: skip


def save_model(directory: Path, model=None, tokenizer=None) -> Path:
    """Save a model and a tokenizer the way transformers does, as a person's own model directory would look."""
    tokenizer = tokenizer or word_tokenizer()
    model = model or tiny_llama(len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path

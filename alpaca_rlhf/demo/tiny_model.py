"""Write the demo's default model: ``python -m alpaca_rlhf.demo.tiny_model DIR [--seed N]``. No download.

A LLaMA of about two million parameters made from a config, not trained yet, and a sentencepiece tokenizer trained on
the demo's own text. AutoModelForCausalLM and AutoTokenizer load the directory offline.
"""

import argparse
import io
import json
import tempfile
from pathlib import Path

from alpaca_rlhf.demo.world import make_files

SEED = 1
VOCABULARY = 2048  # 4 special pieces, 256 bytes, the rest: eight of ten words of the demo are one piece
POSITIONS = 512
UNK_ID, BOS_ID, EOS_ID, PAD_ID = range(4)


def demo_text() -> list[str]:
    """Every text that the demo trains on, prompts and answers, in the order of the files."""
    texts: list[str] = []
    files = make_files()
    for name in ("training_data.txt.train", "preferences/train.jsonl"):
        for row in map(json.loads, files[name].decode().splitlines()):
            texts += [text.strip() for text in row.values()]
    return texts


def train_tokenizer(directory: Path) -> None:
    """Train the tokenizer and write ``tokenizer.model`` plus transformers' own files into ``directory``.

    Bytes stand in for unknown characters, the newline among them, so that decoding gives any text back; a digit is one
    piece. (A newline must be no user-defined symbol: transformers takes those for special tokens and hides them.)
    """
    import sentencepiece
    from transformers import LlamaTokenizer

    model = io.BytesIO()
    lines = (line for text in demo_text() for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, model_type="bpe", vocab_size=VOCABULARY,
        unk_id=UNK_ID, bos_id=BOS_ID, eos_id=EOS_ID, pad_id=PAD_ID, byte_fallback=True, character_coverage=1.0,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
        minloglevel=2,
    )  # fmt: skip
    # transformers prefers files of its own that an earlier run may have left in the directory: read from an empty one
    with tempfile.TemporaryDirectory() as fresh:
        (Path(fresh) / "tokenizer.model").write_bytes(model.getvalue())
        tokenizer = LlamaTokenizer.from_pretrained(
            fresh,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            model_max_length=POSITIONS,
        )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer.save_pretrained(directory)


def write_model(directory: Path, seed: int = SEED) -> int:
    """Write a freshly initialised model into ``directory`` and return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=POSITIONS, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def write_tiny_model(directory: Path, seed: int = SEED) -> int:
    """Write model and tokenizer into ``directory`` (made if missing) and return the number of parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(directory)
    return write_model(directory, seed)


def main(argv: list[str] | None = None) -> None:
    """Command line: write the model directory and print its size."""
    parser = argparse.ArgumentParser(
        "python -m alpaca_rlhf.demo.tiny_model", description="Write the demo's tiny LLaMA."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the initial weights (default %(default)s)")
    arguments = parser.parse_args(argv)
    count = write_tiny_model(arguments.directory, arguments.seed)
    print(
        f"{arguments.directory}: LLaMA, not trained, {count:,} parameters, {VOCABULARY:,} tokens, {POSITIONS} positions"
    )


if __name__ == "__main__":
    main()

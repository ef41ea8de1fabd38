"""A task for step 3 that is small enough to enumerate: a tiny LLaMA that step 1 trained, and a random reward table.

Seven tokens can be sampled: five letters, the unknown token (which is the padding too: a token like any other to the
sampler) and EOS. At most four are said, so a prompt has 1 + 6 + 36 + 216 + 1296 = 1555 answers. The model's embeddings
have 16 rows: those without a token must have probability 0.
"""

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main as step1
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning import main as step2
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import (
    RewardFunction,
    load_reward_function,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.saving import save_model
from benchmarks.enumeration import AnswerTree

LETTERS = "abcde"
PROMPTS = ("a", "b c", "e a d")
MOST_TOKENS = 4  # of an answer
COPIES = 64  # of each prompt in a rollout
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}"

TABLE = '''"""A random reward table: a number between -1 and 1 for each answer to each prompt."""

import random


def score(prompts, answers):
    """One number for each answer."""
    return [random.Random(f"{seed}/{{prompt}}/{{answer}}").uniform(-1, 1) for prompt, answer in zip(prompts, answers)]
'''


class Task(NamedTuple):
    """Where the parts of the task lie."""

    folder: Path
    reference: Path  # step 1's output
    prompts: Path
    cache: Path

    def table(self, seed: int) -> str:
        """``--reward_fn`` for the reward table of this seed."""
        file = self.folder / f"table_{seed}.py"
        file.write_text(TABLE.format(seed=seed), encoding="utf-8")
        return f"{file}:score"

    def tree(self) -> AnswerTree:
        """All answers that can be sampled."""
        tokenizer = load_tokenizer(str(self.reference), notice=lambda _: None)
        prompts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in PROMPTS]
        return AnswerTree(prompts, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, MOST_TOKENS)


def make_task(folder: Path, seed: int = 5) -> Task:
    """Write texts and prompts, and train the reference on the texts with step 1. ``seed``: of weights and texts."""
    task = Task(folder, folder / "reference", folder / "prompts", folder / "cache")
    _save_base(folder / "base", seed)
    texts = folder / "texts.jsonl"
    _write_jsonl(texts, _texts(random.Random(seed)))
    for part, copies in (("train", COPIES), ("test", 1)):  # with a test part nothing is held out of the training part
        _write_jsonl(task.prompts / f"{part}.jsonl", [{"prompt": prompt} for prompt in PROMPTS for _ in range(copies)])
    with (folder / "output.txt").open("w", encoding="utf-8") as file, quiet(file):
        step1.main([
            "--data_path", str(texts), "--data_split", "1,0,0", "--data_output_path", str(task.cache),
            "--model_name_or_path", str(folder / "base"), "--output_dir", str(task.reference),
            "--learning_rate", "1e-2", "--per_device_train_batch_size", "64", "--num_train_epochs", "4",
            "--max_seq_len", "12",
        ])  # fmt: skip
    return task


def make_critic(task: Task, start: str, seed: int) -> Path:
    """A model for the critic to start from: "zero" or "normal", the reference with such a head; "reward_model", step
    2's work on pairs that the table of ``seed`` ranks."""
    folder = task.folder / f"critic_{start}_{seed}"
    if start == "reward_model":
        pairs = task.folder / f"pairs_{seed}.jsonl"
        _write_jsonl(pairs, _pairs(random.Random(seed), load_reward_function(task.table(seed))))
        with (task.folder / f"output_{seed}.txt").open("w", encoding="utf-8") as file, quiet(file):
            step2.main([
                "--data_path", str(pairs), "--data_split", "0,1,0", "--data_output_path", str(task.cache),
                "--model_name_or_path", str(task.reference), "--output_dir", str(folder), "--learning_rate", "3e-3",
                "--per_device_train_batch_size", "32", "--num_train_epochs", "4", "--max_seq_len", "12",
            ])  # fmt: skip
        return folder
    tokenizer = load_tokenizer(str(task.reference), notice=lambda _: None)
    module = RewardModel.from_causal_lm(str(task.reference), tokenizer, seed=seed, notice=lambda _: None)
    if start == "zero":
        torch.nn.init.zeros_(module.model.score.weight)
    save_model(folder, module.model, module.export_state(module.state_dict()), tokenizer)
    return folder


@contextlib.contextmanager
def quiet(file: TextIO) -> Iterator[None]:
    """What a step prints goes into ``file``."""
    with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def _texts(rng: random.Random, per_prompt: int = 700) -> list[dict[str, str]]:
    """Six answers to each prompt, equally often: what the reference learns to say nearly always."""
    rows = []
    for prompt in PROMPTS:
        answers = [_answer(rng) for _ in range(6)]
        drawn = rng.choices(answers, k=per_prompt)
        rows += [{"prompt": prompt, "response": answer} for answer in drawn]
    return rows


def _pairs(rng: random.Random, score: RewardFunction, per_prompt: int = 700) -> list[dict[str, str]]:
    """Pairs of random answers, the one with the higher score chosen."""
    rows = []
    for prompt in PROMPTS * per_prompt:
        first, second = _answer(rng), _answer(rng)
        if first != second:
            rejected, chosen = sorted((first, second), key=lambda answer: score([prompt], [answer])[0])
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def _answer(rng: random.Random) -> str:
    """One to five letters; five are cut at the limit, as an answer of four can be."""
    return " ".join(rng.choices(LETTERS, k=rng.choices([1, 2, 3, 4, 5], [2, 3, 4, 3, 2])[0]))


def _save_base(folder: Path, seed: int) -> None:
    """An untrained model with two layers of 32 units, and its tokenizer."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", unk_token="<unk>", pad_token="<unk>", chat_template=TEMPLATE
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        initializer_range=0.1,
    ))  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

"""Reward models: padding sides through the whole path from text to loss, layouts of files, what the report tells."""

import json
import os

import pytest
import torch

from alpaca_rlhf.algorithms.metrics import Averages
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning.pairs import PairScores, batch_loss
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_pairs
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import PairOutput, RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from tests.deepspeed_chat.data.data_samples import only
from tests.tiny import PAIRS, save_model, tiny_gpt2, tiny_llama, word_tokenizer


def new(folder, make=tiny_llama):
    save_model(folder, make(64))
    model = RewardModel.from_causal_lm(str(folder), word_tokenizer(), seed=7, notice=str)
    with torch.no_grad():
        model.model.score.weight.mul_(20)
    return model


def encoded(padding_side):
    tokenizer = word_tokenizer()
    tokenizer.padding_side = padding_side
    encoder = TextEncoder(tokenizer)
    records = []
    for row, pair in enumerate(PAIRS):
        question = (Turn("user", pair["prompt"].removeprefix("Human: ").removesuffix(" Assistant:")),)
        records.append(Conversation(f"f:{row}", question, pair["chosen"].strip(), pair["rejected"].strip()))
    return [{**only(record, 2, encoder, 64).item, "row": row} for row, record in enumerate(records)]


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("loss", ["end", "per_token"])
def test_R01_the_loss_of_pairs_does_not_know_the_padding_side(tmp_path, make, loss):
    model, losses = new(tmp_path, make), []

    def loss_of(items):
        batch = collate_pairs(items, len(items), 0)
        names = ("input_ids", "attention_mask", "divergence", "margin", "row_mask")
        return model(*(batch[name] for name in names), loss).loss_sum

    for side in ("left", "right"):
        losses.append(loss_of(encoded(side)))
    losses.append(sum(loss_of([item]) for item in encoded("right")))  # hardly any padding
    assert all(value.isfinite() for value in losses) and losses[0] > 1
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=0)
    torch.testing.assert_close(losses[0], losses[2], atol=1e-5, rtol=1e-5)


def scores(chosen, rejected, chosen_length=None, rejected_length=None):
    columns = [chosen, rejected, chosen_length or chosen, rejected_length or rejected]
    return PairScores(*(torch.tensor(column, dtype=torch.float64) for column in columns))


def test_R08_a_tie_is_not_correct_and_is_reported():
    metrics = scores([1.0, 2.0, 3.0, 0.0], [1.0, 1.0, 3.0, 5.0]).metrics()
    assert metrics["eval_accuracy"] == 0.25 and metrics["eval_ties"] == 2 and metrics["eval_count"] == 4


def test_R09_the_report_shows_a_reward_for_length():
    """Eight pairs in which the longer answer always wins."""
    short, long = list(range(3, 11)), list(range(12, 20))
    metrics = scores([0.1 * n + 0.01 for n in long], [0.1 * n for n in short], long, short).metrics()
    assert metrics["eval_accuracy"] == 1.0 and metrics["eval_length_correlation"] > 0.99
    assert metrics["eval_gap"] == pytest.approx(0.91)
    assert metrics["eval_chosen_mean"] - metrics["eval_rejected_mean"] == pytest.approx(metrics["eval_gap"])
    assert metrics["eval_chosen_std"] == pytest.approx(0.1 * (21 / 4) ** 0.5)  # of 8 numbers in a row: (64 - 1) / 12
    other = scores([1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [5, 5, 9, 9], [5, 5, 9, 9]).metrics()
    assert other["eval_length_correlation"] == pytest.approx(0)
    assert scores([], []).metrics() == {} and scores([], []).chosen_stats() is None


def test_R05_scores_whose_deviation_is_no_scale_for_others_are_told():
    """As of forty votes for lists: all chosen answers score alike, the others far below."""
    alike = scores([1.8, 1.9, 2.0, 1.9], [-2.0, -1.7, -1.9, -2.1]).scale_warning()
    assert "differ by 0.071 only" in alike and "54 such deviations below" in alike and "--reward_normalization" in alike
    assert scores([1.0, 3.0, -1.0], [0.0, 1.0, -2.0]).scale_warning() is None  # as in the demo
    assert scores([0.0, 0.0], [0.0, 0.0]).scale_warning() is None and scores([], []).scale_warning() is None
    bad = float("nan")
    assert scores([bad], [1.0]).scale_warning() is None and scores([1.0, 1.1], [bad, bad]).scale_warning() is None


@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin", "sharded_bin"])
def test_C05_a_reward_model_scores_the_same_from_every_layout_of_files(tmp_path, layout):
    model = new(tmp_path / "base")
    ids, mask = torch.randint(4, 57, (3, 8)), torch.ones(3, 8, dtype=torch.long)
    expected, folder = model(ids, mask).scores, tmp_path / "rm"
    save_trained(folder, model, model.state_dict(), word_tokenizer(), "")
    if layout == "sharded":
        (folder / "model.safetensors").unlink()
        model.model.save_pretrained(folder, max_shard_size="4KB")
    elif layout.endswith("bin"):
        (folder / "model.safetensors").unlink()
        items = list(model.model.state_dict().items())
        parts = [items] if layout == "bin" else [items[:6], items[6:]]
        names = ["pytorch_model.bin"] if layout == "bin" else [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        for name, part in zip(names, parts, strict=True):
            torch.save(dict(part), folder / name)
        if layout == "sharded_bin":
            where = {key: name for name, part in zip(names, parts, strict=True) for key, _ in part}
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert torch.equal(RewardModel.from_pretrained(str(folder), None, notice=str)(ids, mask).scores, expected)
    shards = sorted([*folder.glob("*-of-*.safetensors"), *folder.glob("pytorch_model-*.bin")])
    assert bool(shards) is layout.startswith("sharded")
    if shards:
        os.remove(shards[-1])
        with pytest.raises(UserError, match="cannot be loaded|do not fit"):
            RewardModel.from_pretrained(str(folder), None, notice=str)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("rows, added, expected", [(57, 0, 57), (64, 0, 64), (57, 2, 59), (64, 2, 64)])
def test_Z03_the_vocabulary_size_is_that_of_the_embeddings_before_anything_is_sharded(
    tmp_path, make, rows, added, expected
):
    tokenizer = word_tokenizer()
    tokenizer.add_tokens([f"new{n}" for n in range(added)])
    assert len(word_tokenizer()) == 57
    save_model(tmp_path / "base", make(rows), tokenizer)
    language = load_causal_lm(str(tmp_path / "base"), tokenizer, notice=str)
    reward = RewardModel.from_causal_lm(str(tmp_path / "base"), tokenizer, seed=1, notice=str)
    save_trained(tmp_path / "rm", reward, reward.state_dict(), tokenizer, "")
    again = RewardModel.from_pretrained(str(tmp_path / "rm"), tokenizer, notice=str)
    for model in (language, reward.model, again.model):
        embeddings = model.get_input_embeddings().weight
        assert model.config.vocab_size == embeddings.shape[0] == expected
        assert embeddings.device.type == "cpu" and embeddings.numel() == expected * 16


def test_M07_the_accuracy_of_a_step_is_of_its_real_pairs():
    """Two of three pairs are right; the fourth is a filler, and right too."""
    chosen, rejected = torch.tensor([1.0, 2.0, 0.0, 9.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    batch = {"row_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]), "input_ids": None, "attention_mask": None}
    averages = Averages()
    output = PairOutput(torch.tensor(1.5), chosen, rejected)
    assert batch_loss(lambda *_: output, "end", averages, {**batch, "divergence": None, "margin": None}) == 1.5
    figures = averages.result()
    assert figures["accuracy"] == pytest.approx(2 / 3) and figures["gap"] == pytest.approx((3 - 2) / 3)

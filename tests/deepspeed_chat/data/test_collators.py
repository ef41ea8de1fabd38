"""Padding sides, masks from lengths, fillers that count nothing."""

import pytest
import torch

from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF, collate_pairs, collate_sft

PAD = 0
EOS = 2


def sft_item(prompt: int, answer: int) -> dict:
    return {
        "input_ids": [1] + [5] * (prompt - 1) + [6] * answer + [EOS],
        "trained": [0] * prompt + [1] * (answer + 1),
        "record": "r",
        "row": 0,
    }


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_T02_each_answer_keeps_its_one_eos_whatever_the_pad_is(pad_id):
    items = [sft_item(3, 4), sft_item(2, 9)]
    batch = collate_sft(items, 2, pad_id)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["response_mask"].shape == (2, 12)
    for row, item in enumerate(items):
        length = len(item["input_ids"])
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (12 - length)
        trained = batch["input_ids"][row][batch["response_mask"][row] == 1].tolist()
        assert trained.count(EOS) == 1 and trained[-1] == EOS
        assert batch["response_mask"][row].sum() == sum(item["trained"])
        assert (batch["input_ids"][row, length:] == pad_id).all()


def test_fillers_are_input_but_train_nothing():
    items = [sft_item(3, 4), sft_item(2, 9)]
    batch = collate_sft(items, 1, PAD)
    assert batch["response_mask"][0].sum() == 5 and batch["response_mask"][1].sum() == 0
    assert batch["attention_mask"][1].sum() == 12
    assert collate_sft(items, 0, PAD)["response_mask"].sum() == 0


def pair(prompt, chosen, rejected, margin=0.0) -> dict:
    return {
        "chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected, "prompt_length": len(prompt),
        "margin": margin, "record": "r", "row": 0,
    }  # fmt: skip


def test_pairs_put_chosen_rows_before_rejected_rows():
    items = [pair([1, 5], [6, 7, 2], [8, 2], 1.0), pair([1, 5, 5], [6, 2], [6, 7, 7, 7, 2])]
    batch = collate_pairs(items, 2, PAD)
    assert batch["input_ids"].tolist() == [
        [1, 5, 6, 7, 2, 0, 0, 0], [1, 5, 5, 6, 2, 0, 0, 0], [1, 5, 8, 2, 0, 0, 0, 0], [1, 5, 5, 6, 7, 7, 7, 2],
    ]  # fmt: skip
    assert batch["attention_mask"].sum(1).tolist() == [5, 5, 4, 8]
    assert batch["divergence"].tolist() == [2, 4]
    assert batch["margin"].tolist() == [1.0, 0.0] and batch["margin"].dtype == torch.float32
    assert batch["row_mask"].tolist() == [1.0, 1.0]
    assert collate_pairs(items, 1, PAD)["row_mask"].tolist() == [1.0, 0.0]


def test_R08_a_side_that_is_the_others_prefix_diverges_at_its_end():
    assert collate_pairs([pair([1], [6], [6, 7])], 1, PAD)["divergence"].tolist() == [2]
    with pytest.raises(AssertionError, match="equal sequences"):
        collate_pairs([pair([1], [6, 2], [6, 2])], 1, PAD)


@pytest.mark.parametrize("pad_to", [None, 16])
def test_P04_the_last_column_of_a_prompt_batch_is_always_a_real_token(pad_to):
    prompts = [[1, 7, 3], [1, 8, 8, 8, 4], [1, 9, 9, 9, 9, 9, 9, 9, 5]]
    items = [{"prompt_ids": ids, "row": 10 + i, "record": "r"} for i, ids in enumerate(prompts)]
    batch = DataCollatorRLHF(PAD, pad_to)(items, 2)
    width = pad_to or 9
    assert batch["prompt_ids"].shape == batch["prompt_mask"].shape == (3, width)
    assert batch["prompt_ids"][:, -1].tolist() == [3, 4, 5]
    for row, ids in enumerate(prompts):
        assert batch["prompt_ids"][row].tolist() == [PAD] * (width - len(ids)) + ids
        assert batch["prompt_mask"][row].tolist() == [0] * (width - len(ids)) + [1] * len(ids)
    assert batch["row_mask"].tolist() == [1.0, 1.0, 0.0] and batch["row_ids"] == [10, 11, 12]


def test_a_prompt_over_the_fixed_width_is_an_internal_error():
    with pytest.raises(AssertionError):
        DataCollatorRLHF(PAD, 4)([{"prompt_ids": [1, 2, 3, 4, 5], "row": 0}], 1)
    with pytest.raises(AssertionError):
        DataCollatorRLHF(PAD)([], 0)

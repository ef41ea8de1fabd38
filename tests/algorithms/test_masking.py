"""Masks against naive loops; P-07/P-10's first EOS, P-01's positions, R-03's last token."""

import pytest
import torch

from alpaca_rlhf.algorithms.masking import (
    first_eos_mask,
    keep,
    last_token_index,
    masked_mean,
    masked_sum,
    moments,
    position_ids,
    whiten,
)

NAN, INF = float("nan"), float("inf")


def naive_eos_mask(rows, eos_ids):
    return [[0 if any(token in eos_ids for token in row[:t]) else 1 for t in range(len(row))] for row in rows]


def test_first_eos_mask_equals_the_loop_with_several_eos_ids():
    rows = torch.randint(0, 6, (40, 9), generator=torch.Generator().manual_seed(1))
    mask = first_eos_mask(rows, [2, 5])
    assert mask.tolist() == naive_eos_mask(rows.tolist(), {2, 5})
    assert mask.dtype == torch.int64


def test_first_eos_mask_counts_the_eos_itself():
    rows = torch.tensor([[7, 2, 2, 0], [7, 8, 9, 7], [2, 7, 2, 7], [7, 7, 7, 2]])
    assert first_eos_mask(rows, [2]).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]


def test_must_fail_a_mask_that_leaves_the_eos_out():
    rows = torch.tensor([[7, 2, 2, 0], [7, 8, 9, 7]])
    before_eos_only = ((rows == 2).long().cumsum(1) == 0).long()
    with pytest.raises(AssertionError):
        assert before_eos_only.tolist() == naive_eos_mask(rows.tolist(), {2})


def test_first_eos_mask_without_eos_ids_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        first_eos_mask(torch.zeros(1, 3), [])


def test_garbage_at_masked_positions_reaches_neither_sum_nor_gradient():
    x = torch.tensor([[1.0, NAN], [INF, 3.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    masked_mean(x, mask).backward()
    assert masked_sum(x, mask).item() == 4.0
    assert masked_sum(x, mask, dim=1).tolist() == [1.0, 3.0]
    assert masked_mean(x, mask, dim=0).tolist() == [1.0, 3.0]
    assert x.grad.tolist() == [[0.5, 0.0], [0.0, 0.5]]
    assert keep(x, mask).tolist() == [[1.0, 0.0], [0.0, 3.0]]


def test_must_fail_multiplying_with_the_mask():
    x, mask = torch.tensor([1.0, NAN]), torch.tensor([1, 0])
    with pytest.raises(AssertionError):
        torch.testing.assert_close((x * mask).sum(), masked_sum(x, mask))


def test_sums_are_float32_whatever_comes_in():
    # In bfloat16 256 + 1 is 256 again.
    x = torch.ones(1000, dtype=torch.bfloat16)
    assert masked_sum(x, torch.ones(1000)).item() == 1000.0
    assert masked_sum(x, torch.ones(1000)).dtype == torch.float32


def test_masked_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no counted position"):
        masked_mean(torch.ones(2, 2), torch.tensor([[1, 1], [0, 0]]), dim=1)


def test_P01_position_ids_do_not_depend_on_the_padding_side():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]


def test_R03_last_token_index_on_both_padding_sides():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]])
    assert last_token_index(mask).tolist() == [4, 2, 2]


def test_last_token_index_of_an_empty_row_is_refused():
    with pytest.raises(ValueError, match="no attended token"):
        last_token_index(torch.tensor([[1, 1], [0, 0]]))


def test_moments_add_up_over_batches():
    x, mask = torch.randn(6, 5), torch.randint(0, 2, (6, 5))
    x[mask == 0] = NAN
    whole = moments(x, mask)
    torch.testing.assert_close(moments(x[:2], mask[:2]) + moments(x[2:], mask[2:]), whole)
    kept = x[mask == 1].double()
    torch.testing.assert_close(whole, torch.stack([mask.sum().double(), kept.sum(), (kept**2).sum()]))
    assert whole.dtype == torch.float64


def whitened_example(center):
    x, mask = torch.randn(8, 7) * 3 + 5, torch.randint(0, 2, (8, 7))
    x[mask == 0] = INF
    return x[mask == 1], whiten(x, mask, center=center), mask


def test_whiten_gives_mean_0_and_variance_1_over_the_counted():
    _, result, mask = whitened_example(center=True)
    kept = result[mask == 1]
    torch.testing.assert_close(kept.mean(), torch.tensor(0.0))
    torch.testing.assert_close(kept.var(unbiased=False), torch.tensor(1.0))
    assert result[mask == 0].abs().sum() == 0


def test_whiten_without_centering_keeps_the_mean():
    x, result, mask = whitened_example(center=False)
    torch.testing.assert_close(result[mask == 1].mean(), x.mean())
    torch.testing.assert_close(result[mask == 1].var(unbiased=False), torch.tensor(1.0))


def test_must_fail_whitening_by_hand_with_the_padding_counted():
    x, mask = torch.tensor([[1.0, 2.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0, 0]])
    with pytest.raises(AssertionError):
        torch.testing.assert_close((x - x.mean()) / x.std(unbiased=False) * mask, whiten(x, mask))


def test_whiten_with_the_moments_of_all_ranks_equals_whitening_the_whole_batch():
    x, mask = torch.randn(8, 7), torch.randint(0, 2, (8, 7))
    everywhere = moments(x[:3], mask[:3]) + moments(x[3:], mask[3:])
    parts = [whiten(x[rows], mask[rows], moments=everywhere) for rows in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(torch.cat(parts), whiten(x, mask))


def test_whiten_of_a_constant_or_of_nothing_is_0():
    assert whiten(torch.full((2, 3), 7.0), torch.ones(2, 3)).abs().max() == 0
    assert whiten(torch.full((2, 3), NAN), torch.zeros(2, 3)).abs().max() == 0
    assert whiten(torch.tensor([4.0]), torch.ones(1)).item() == 0

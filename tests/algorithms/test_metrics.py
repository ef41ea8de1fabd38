"""Every number of the log with a known answer (faults.md section 10)."""

import math
import threading

import pytest
import torch

from alpaca_rlhf.algorithms.masking import moments
from alpaca_rlhf.algorithms.metrics import (
    Averages,
    distinct_n,
    distinct_token_shares,
    empty_rows,
    ended_rows,
    explained_variance,
    explained_variance_from_moments,
    padding_share,
    pearson,
    perplexity,
)

NAN = float("nan")


def on_two_ranks(*fill):
    """One Averages per rank, reduced together by threads whose sum is a real exchange; results and errors per rank."""
    barrier, parts, outcomes = threading.Barrier(len(fill), timeout=10), {}, {}

    def work(rank):
        def sum_over_ranks(tensor):
            parts[rank] = tensor
            barrier.wait()
            total = sum(parts[r] for r in range(len(fill)))
            barrier.wait()
            return total

        averages = Averages()
        fill[rank](averages)
        try:
            averages.reduce(sum_over_ranks)
            outcomes[rank] = averages.result()
        except ValueError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(fill))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(len(fill))]


def test_M01_each_metric_has_its_own_accumulator():
    averages = Averages()
    for _ in range(4):
        averages.add("actor_loss", torch.tensor(1.0), 1)
        averages.add("critic_loss", torch.tensor(3.0), 1)
    assert averages.result() == {"actor_loss": 1.0, "critic_loss": 3.0}


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_M02_one_division_at_the_end(batches):
    averages = Averages()
    for _ in range(batches):
        averages.add("score", torch.tensor([2.0, 2.0]).sum(), torch.tensor(2))
    assert averages.result() == {"score": 2.0}


def test_must_fail_M02_dividing_inside_the_loop():
    mean = 0.0
    for batch in range(5):
        mean = (mean + 2.0) / (batch + 1)
    with pytest.raises(AssertionError):
        assert mean == 2.0


def test_averages_weigh_by_count_keep_order_and_leave_out_what_has_no_count():
    averages = Averages()
    averages.add("z", 4.0, 1)
    averages.add("a", torch.tensor(1.0, requires_grad=True), 0)
    averages.add("z", 99.0, torch.tensor(99))
    assert averages.result() == {"z": 1.03}


def test_averages_sum_in_float64():
    averages = Averages()
    for _ in range(3):
        averages.add("x", torch.tensor(2.0**24), 0)
        averages.add("x", torch.tensor(1.0), 1)
    assert averages.result() == {"x": 2.0**24 + 1}


def test_M04_ranks_are_summed_before_the_division_whatever_the_order_of_names():
    def first(averages):
        averages.add("b", 4.0, 1)
        averages.add("a", torch.tensor(1.0), 1)

    def second(averages):
        averages.add("a", 3.0, 1)
        averages.add("b", torch.tensor(99.0), 99)

    one, two = on_two_ranks(first, second)
    assert one == two == {"a": 2.0, "b": 1.03}


def test_ranks_with_different_names_are_told_so_instead_of_waiting():
    outcomes = on_two_ranks(lambda a: a.add("loss", 1.0, 1), lambda a: (a.add("loss", 1.0, 1), a.add("extra", 1.0, 1)))
    assert all(isinstance(outcome, ValueError) for outcome in outcomes)
    assert "extra, loss" in str(outcomes[1])


def test_one_process_reduces_to_itself_and_an_empty_report_is_legal():
    averages = Averages()
    averages.reduce(torch.clone)
    assert averages.result() == {}
    averages.add("x", 3.0, 2)
    averages.reduce(torch.clone)
    assert averages.result() == {"x": 1.5}


def test_M03_perplexity_of_two_uneven_batches():
    # Batches of 1 and 99 tokens with mean losses 4 and 1.
    assert perplexity(4.0 * 1 + 1.0 * 99, 1 + 99) == pytest.approx(math.exp(1.03))
    assert perplexity(1e6, 1) == math.inf
    with pytest.raises(ValueError, match="at least one token"):
        perplexity(0.0, 0)


def test_must_fail_M03_a_mean_of_batch_means():
    with pytest.raises(AssertionError):
        assert math.exp((4.0 + 1.0) / 2) == pytest.approx(perplexity(4.0 * 1 + 1.0 * 99, 100))


def test_M07_padding_share_is_that_of_the_padding():
    assert padding_share(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])) == 0.25
    assert padding_share(torch.ones(2, 2)) == 0.0
    assert math.isnan(padding_share(torch.ones(0, 2)))


def test_explained_variance_by_hand():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, NAN]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((1, 4), 7.0), returns, mask) == pytest.approx(0.0)
    # Errors 0, 1, 0 have variance 2/9, the returns 6/9.
    assert explained_variance(torch.tensor([[1.0, 1.0, 3.0, 5.0]]), returns, mask) == pytest.approx(2 / 3)
    assert math.isnan(explained_variance(returns, torch.full((1, 4), 0.1), mask))
    assert math.isnan(explained_variance(returns, returns, torch.zeros(1, 4)))


def test_explained_variance_of_equal_returns_is_nan_and_not_what_rounding_left():
    count, total, total_sq = 3.0, 0.3 + 0.3 + 0.3, 0.3**2 + 0.3**2 + 0.3**2
    assert total_sq / count - (total / count) ** 2 > 0  # the plain formula sees a variance here
    error = torch.tensor([3.0, 0.0, 2.0], dtype=torch.float64)
    returns = torch.tensor([count, total, total_sq], dtype=torch.float64)
    assert math.isnan(explained_variance_from_moments(error, returns))


def test_must_fail_explained_variance_with_the_padding_counted_or_without_centering():
    values, returns = torch.tensor([[1.5, 2.5, 3.5, 9.0]]), torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    right = explained_variance(values, returns, torch.tensor([[1, 1, 1, 0]]))
    assert right == 1.0  # a constant offset is explained
    uncentered = 1 - float(((returns - values)[:, :3] ** 2).mean() / returns[:, :3].var(unbiased=False))
    for wrong in (explained_variance(values, returns, torch.ones(1, 4)), uncentered):
        with pytest.raises(AssertionError):
            assert wrong == pytest.approx(right)


def test_explained_variance_of_ranks_is_that_of_the_whole_batch():
    values, returns, mask = torch.randn(6, 4), torch.randn(6, 4), torch.randint(0, 2, (6, 4))
    rows = [slice(0, 2), slice(2, 6)]
    summed = [sum(moments(x[r], mask[r]) for r in rows) for x in (returns.double() - values.double(), returns)]
    assert explained_variance_from_moments(*summed) == pytest.approx(explained_variance(values, returns, mask))


def test_R09_pearson_by_hand():
    assert pearson([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert pearson(torch.tensor([1, 2, 3]), torch.tensor([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
    # Centred: (-1, 0, 1) and (-4/3, 5/3, -1/3): 1 / sqrt(2 * 42/9).
    assert pearson([1, 2, 3], [0, 3, 1]) == pytest.approx(1 / math.sqrt(2 * 42 / 9))
    for x, y in (([0.1] * 3, [1, 2, 3]), ([1, 2, 3], [5, 5, 5]), ([1], [2]), ([], [])):
        assert math.isnan(pearson(x, y))
    with pytest.raises(ValueError, match="different lengths"):
        pearson([1, 2], [1, 2, 3])


def test_must_fail_pearson_without_centering():
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0])
    with pytest.raises(AssertionError):
        assert float(x @ y / (x.norm() * y.norm())) == pytest.approx(pearson(x, y))


def test_distinct_n_by_hand():
    # Bigrams (1,2) (2,1) (1,2) and (1,2): 2 of 4 differ; (2,1) | (1,2) across the answers is none.
    assert distinct_n([[1, 2, 1, 2], [1, 2], [7], []], 2) == 0.5
    assert distinct_n([[1, 2, 1, 2], [1, 2], [7], []], 1) == pytest.approx(3 / 7)
    assert distinct_n([[5] * 10], 2) == pytest.approx(1 / 9)
    assert math.isnan(distinct_n([[1], []], 2))
    with pytest.raises(ValueError, match="at least one"):
        distinct_n([[1]], 0)


def test_P12_distinct_token_shares_equal_the_loop():
    responses, mask = torch.randint(0, 4, (30, 6)), (torch.arange(6) < torch.randint(0, 7, (30, 1))).long()
    expected = []
    for row, keep in zip(responses.tolist(), mask.tolist(), strict=True):
        ids = [token for token, counts in zip(row, keep, strict=True) if counts]
        expected.append(len(set(ids)) / len(ids) if ids else 0.0)
    torch.testing.assert_close(distinct_token_shares(responses, mask), torch.tensor(expected))


def test_P10_P11_ended_and_empty_rows():
    # Ended; cut; empty; a masked EOS behind the cut does not count; a filler.
    responses = torch.tensor([[5, 2, 0], [5, 6, 7], [9, 0, 0], [5, 6, 2], [2, 2, 2]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    assert ended_rows(responses, mask, [2, 9]).tolist() == [True, False, True, False, False]
    assert empty_rows(responses, mask, [2, 9]).tolist() == [False, False, True, False, False]

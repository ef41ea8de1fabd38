"""Several data sets in one epoch: all of each, shares by probability, a cap; and what the plan says about it."""

from collections import Counter

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.blending import blend, plan_blend


def used(plan) -> dict[int, int]:
    return dict(Counter(index for index, _ in plan))


def test_without_probabilities_every_record_once_in_order():
    assert plan_blend([2, 0, 1], None, seed=1) == [(0, 0), (0, 1), (2, 0)]


@pytest.mark.parametrize(
    ("sizes", "probs", "counts"),
    [
        ([100, 10], [0.5, 0.5], {0: 10, 1: 10}),
        ([100, 10], [1.0, 0.0], {0: 100}),
        ([90, 10], [0.9, 0.1], {0: 90, 1: 10}),  # as written, although 0.9 and 0.1 are no binary fractions
        ([90, 10], [9, 1], {0: 90, 1: 10}),
        ([100, 100, 100], [1, 1, 2], {0: 50, 1: 50, 2: 100}),
        ([5, 5, 5], [1, 1, 1], {0: 5, 1: 5, 2: 5}),
        ([7, 3], [0.6, 0.4], {0: 4, 1: 3}),  # 7 records: 4.2 and 2.8
        ([3, 7], [0.4, 0.6], {0: 3, 1: 4}),
    ],
)
def test_D07_probabilities_end_where_the_first_set_is_used_up(sizes, probs, counts):
    plan = plan_blend(sizes, probs, seed=3)
    assert used(plan) == counts
    assert len(set(plan)) == len(plan)
    assert all(0 <= row < sizes[index] for index, row in plan)


def test_counts_stay_within_one_record_of_the_shares():
    for sizes in ([13, 29, 7], [1, 50, 50], [17, 17, 5]):
        for probs in ([0.2, 0.5, 0.3], [1, 2, 4], [0.001, 0.4, 0.6]):
            plan = plan_blend(sizes, probs, seed=0)
            shares = [prob / sum(probs) for prob in probs]
            for index, share in enumerate(shares):
                count = used(plan).get(index, 0)
                assert abs(count - share * len(plan)) < 1
                assert count <= sizes[index]
            # one more record would break a share: the epoch is the longest possible
            assert any(share * (len(plan) + 1) > size for share, size in zip(shares, sizes, strict=True))


def test_draws_are_seeded_and_spread():
    first = plan_blend([1000, 10], [0.5, 0.5], seed=1)
    assert first == plan_blend([1000, 10], [0.5, 0.5], seed=1)
    assert first != plan_blend([1000, 10], [0.5, 0.5], seed=2)
    assert max(row for index, row in first if index == 0) > 100


def test_max_samples_keeps_the_proportions():
    assert used(plan_blend([60, 30], None, seed=1, max_samples=30)) == {0: 20, 1: 10}
    assert used(plan_blend([60, 30], [0.5, 0.5], seed=1, max_samples=30)) == {0: 15, 1: 15}
    assert len(plan_blend([60, 30], None, seed=1, max_samples=1000)) == 90


def test_D07_the_plan_in_words():
    records, lines = blend([list("abcdefgh"), list("xy")], ["big", "small"], [0.5, 0.5], seed=1)
    assert len(records) == 4
    assert records[2:] == ["x", "y"]
    assert lines == [
        "big: an epoch uses 2 of 8 records (50.0% of the epoch), leaves 6",
        "small: an epoch uses 2 of 2 records (50.0% of the epoch), leaves 0",
    ]


@pytest.mark.parametrize(
    ("sizes", "probs", "message"),
    [
        ([10, 10], [0.5], r"1 probabilities \(0\.5\) for 2 data sets"),
        ([10, 10], [1.5, -0.5], "none may be negative"),
        ([10, 10], [0.0, 0.0], "one must be above 0"),
        ([10, 10], [float("nan"), 1.0], "nan"),
        ([10, 0], [0.5, 0.5], "data set 2 has the probability 0.5 but holds no records"),
        ([0, 0], None, "hold no records"),
        ([10, 1], [0.999, 0.001], None),
    ],
)
def test_D07_impossible_mixtures(sizes, probs, message):
    if message is None:
        assert len(plan_blend(sizes, probs, seed=0)) == 10
        return
    with pytest.raises(UserError, match=message):
        plan_blend(sizes, probs, seed=0)


def test_max_samples_below_one_is_refused():
    with pytest.raises(UserError, match="max_samples is 0"):
        plan_blend([3], None, seed=0, max_samples=0)

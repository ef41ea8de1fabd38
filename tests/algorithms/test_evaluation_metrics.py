"""The evaluation's formulas against numbers worked out by hand, each with a twin that must fail."""

import math

import pytest

from alpaca_rlhf.algorithms.evaluation_metrics import (
    ControlledWinRate,
    ReliabilityBin,
    expected_calibration_error,
    length_controlled_win_rate,
    pair_confidence,
    preferences,
    reliability,
    repeated_share,
    wilson_interval,
)


def test_wilson_by_hand():
    # z² = 3.841459: (0.7 + 0.192073 ± 1.959964 sqrt(0.21/10 + 0.009604)) / 1.384146
    assert wilson_interval(7, 10) == pytest.approx((0.396773, 0.892214), abs=2e-5)
    # p = 0: upper end z² / (n + z²)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(3.841459 / 13.841459, abs=1e-6))
    assert wilson_interval(10, 10) == (pytest.approx(10 / 13.841459, abs=1e-6), 1.0)
    for successes, count in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="no share"):
            wilson_interval(successes, count)


def test_must_fail_the_plain_normal_interval():
    half = 1.959964 * math.sqrt(0.21 / 10)
    with pytest.raises(AssertionError):
        assert wilson_interval(7, 10) == pytest.approx((0.7 - half, 0.7 + half), abs=2e-5)


def test_preferences_count_a_tie_half():
    assert preferences([2.0, 1.0, 1.0], [1.0, 1.0, 3.0]) == [1.0, 0.5, 0.0]


def test_length_control_of_equal_lengths_adds_one_pair_half_won():
    # x = 0 everywhere: sigmoid(theta) = (7 + 0.5) / 11, se² = 1 / (11 p (1 - p)) = 0.419
    result = length_controlled_win_rate([1.0] * 7 + [0.0] * 3, [5.0] * 10)
    assert result.rate == pytest.approx(7.5 / 11) and result.length_effect == pytest.approx(0)
    theta, error = math.log(7.5 / 3.5), math.sqrt(1 / (11 * (7.5 / 11) * (3.5 / 11)))
    expected = [1 / (1 + math.exp(-(theta + sign * 1.959964 * error))) for sign in (-1, 1)]
    assert result.interval == pytest.approx(expected, abs=1e-6)


def long_and_short(many=1000):
    """Longer answers (three of four) win 9 of 10, shorter ones 3 of 10: 0.75 of all."""
    wins = [1.0] * 27 + [0.0] * 3 + [1.0] * 3 + [0.0] * 7
    return wins * many, ([20.0] * 30 + [-20.0] * 10) * many


def test_length_control_of_two_groups_by_hand():
    # log-odds ln 9 where x = +t and ln 3/7 where x = -t: theta is half their sum, (2.19722 - 0.84730) / 2 = 0.67496.
    # The prior and the added pair vanish in 40,000 pairs but for some 1e-4.
    wins, differences = long_and_short()
    result = length_controlled_win_rate(wins, differences)
    assert result.rate == pytest.approx(1 / (1 + math.exp(-0.67496)), abs=2e-4)
    t = math.tanh(1 / math.sqrt(0.75))  # std of the differences: 2 · 20 · sqrt(3/4 · 1/4)
    assert result.length_effect == pytest.approx((2.19722 + 0.84730) / 2 / t, abs=2e-3)
    assert result.interval[0] < result.rate < result.interval[1]


def test_must_fail_a_win_rate_that_ignores_the_length():
    wins, differences = long_and_short()
    with pytest.raises(AssertionError):
        assert sum(wins) / len(wins) == pytest.approx(length_controlled_win_rate(wins, differences).rate, abs=0.05)


def test_length_control_stays_finite_where_every_pair_is_won_or_length_decides():
    all_won = length_controlled_win_rate([1.0] * 50, [float(i) for i in range(50)])
    assert 0.9 < all_won.rate < 1 and all_won.interval[1] < 1
    decided = length_controlled_win_rate([1.0] * 20 + [0.0] * 20, [3.0] * 20 + [-3.0] * 20)
    assert decided.rate == pytest.approx(0.5) and decided.length_effect > 2
    with pytest.raises(ValueError, match="no pairs"):
        length_controlled_win_rate([], [])
    assert isinstance(decided, ControlledWinRate)


def test_repeated_share_by_hand():
    # 1 2 1 2 1 2: pairs 12 21 12 21 12, two different of five; 5 6 7: none twice; 9: no pair
    assert repeated_share([[1, 2, 1, 2, 1, 2], [5, 6, 7], [9]], n=2) == pytest.approx((0.6 + 0.0) / 2)
    assert repeated_share([[1, 2, 3, 1, 2, 3, 1]]) == pytest.approx(0.25)  # 1231 2312 3123 1231
    assert math.isnan(repeated_share([[1, 2]], n=4))


def test_must_fail_a_repetition_over_all_answers_together():
    joined = [[1, 2, 1, 2, 1, 2, 5, 6, 7]]
    with pytest.raises(AssertionError):
        assert repeated_share(joined, n=2) == pytest.approx(0.3)


def gaps():
    """Two pairs of confidence 0.6 (one right), two of 0.9 (both right): gap = ln p/(1-p)."""
    return [math.log(1.5), -math.log(1.5), math.log(9), math.log(9)]


def test_reliability_and_calibration_error_by_hand():
    confidences, correct = pair_confidence([*gaps(), 0.0])
    assert confidences == pytest.approx([0.6, 0.6, 0.9, 0.9, 0.5]) and correct == [1.0, 0.0, 1.0, 1.0, 0.5]
    curve = reliability(confidences, correct, bins=5)  # 0.5-0.6, …: 0.6 itself may round to either side
    assert sum(part.size for part in curve) == 5
    curve = reliability([0.55, 0.55, 0.95, 1.0], [1.0, 0.0, 1.0, 1.0], bins=5)
    assert curve == [ReliabilityBin(2, 0.55, 0.5), ReliabilityBin(2, pytest.approx(0.975), 1.0)]
    # the bins share 0.5 to 1, not 0 to 1: two of them meet at 0.75
    assert [part.size for part in reliability([0.7, 0.8, 0.9], [1.0] * 3, bins=2)] == [1, 2]
    # 2/4 · 0.05 + 2/4 · 0.025
    assert expected_calibration_error(curve) == pytest.approx(0.0375)
    assert math.isnan(expected_calibration_error([]))


def test_must_fail_a_calibration_error_that_does_not_weigh_by_count():
    curve = [ReliabilityBin(9, 0.9, 0.9), ReliabilityBin(1, 0.6, 0.0)]
    with pytest.raises(AssertionError):
        assert expected_calibration_error(curve) == pytest.approx((0.0 + 0.6) / 2)
    assert expected_calibration_error(curve) == pytest.approx(0.06)


def test_must_fail_confidence_without_the_absolute_value():
    plain = [1 / (1 + math.exp(-gap)) for gap in gaps()]
    with pytest.raises(AssertionError):
        assert pair_confidence(gaps())[0] == pytest.approx(plain)


def test_a_huge_gap_overflows_nowhere():
    assert pair_confidence([-1000.0, 1000.0]) == ([1.0, 1.0], [0.0, 1.0])

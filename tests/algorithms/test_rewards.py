"""Statistics of scores against the pooled ones (R-05), and where the score lands (P-07)."""

import json
import statistics

import pytest
import torch

from alpaca_rlhf.algorithms.masking import moments
from alpaca_rlhf.algorithms.rewards import MIN_STD, RewardStats, RunningRewardStats, last_action_mask, shape_rewards

NAN = float("nan")


def test_normalize_by_hand_in_float32():
    result = RewardStats(mean=2.0, std=4.0, count=9).normalize(torch.tensor([2.0, 10.0, -6.0], dtype=torch.bfloat16))
    assert result.tolist() == [0.0, 2.0, -2.0] and result.dtype == torch.float32


def test_R05_deviation_0_is_guarded():
    stats = RewardStats(mean=3.0, std=0.0, count=1)
    assert stats.normalize(torch.tensor([3.0])).item() == 0.0
    assert stats.normalize(torch.tensor([4.0])).item() == pytest.approx(1 / MIN_STD)


def test_R05_an_offset_of_the_scores_cancels():
    scores = torch.randn(50)

    def normalized(offset):
        running = RunningRewardStats()
        running.update(*moments(scores + offset, torch.ones(50)).tolist())
        return running.stats.normalize(scores + offset)

    # atol: float32 keeps scores near 50 to 4e-6.
    torch.testing.assert_close(normalized(50.0), normalized(0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numbers", [(NAN, 1.0, 2), (0.0, NAN, 2), (0.0, -1.0, 2), (0.0, 1.0, 0)])
def test_impossible_statistics_are_refused(numbers):
    with pytest.raises(ValueError, match="not the statistics"):
        RewardStats(*numbers)


def test_running_statistics_equal_the_pooled_ones_over_batches_and_ranks():
    generator = torch.Generator().manual_seed(0)
    running, seen = RunningRewardStats(), []
    for size in (1, 7, 3, 20):
        ranks = [torch.randn(size, generator=generator) * 3 + 40 for _ in range(2)]
        running.update(*sum(moments(scores, torch.ones(size)) for scores in ranks).tolist())
        seen += [number for scores in ranks for number in scores.double().tolist()]
        stats = running.stats
        assert stats.count == len(seen)
        torch.testing.assert_close(stats.mean, statistics.fmean(seen))
        torch.testing.assert_close(stats.std, statistics.pstdev(seen))


def test_must_fail_averaging_the_deviations_of_batches():
    batches = [torch.tensor([0.0, 1.0]), torch.tensor([10.0, 11.0])]
    running = RunningRewardStats()
    for scores in batches:
        running.update(*moments(scores, torch.ones(2)).tolist())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(sum(statistics.pstdev(scores.tolist()) for scores in batches) / 2, running.stats.std)


def test_running_statistics_keep_their_digits_over_many_batches_far_from_0():
    running = RunningRewardStats()
    for _ in range(1000):
        running.update(*moments(torch.tensor([9999.0, 10001.0]), torch.ones(2)).tolist())
    assert running.stats == RewardStats(mean=10000.0, std=1.0, count=2000)


def test_running_statistics_empty_batches_state_and_bad_moments():
    running = RunningRewardStats()
    with pytest.raises(ValueError, match="no score has been seen"):
        _ = running.stats
    running.update(0, 0.0, 0.0)
    running.update(2.0, 6.0, 20.0)
    assert running.stats == RewardStats(mean=3.0, std=1.0, count=2)
    copy = RunningRewardStats()
    copy.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert copy.stats == running.stats
    for wrong in ((1, NAN, 1.0), (1, 1.0, float("inf")), (-1, 1.0, 1.0), (1.5, 1.0, 1.0)):
        with pytest.raises(ValueError, match="not the moments"):
            running.update(*wrong)


# --- shaping ---

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_P07_the_score_lands_on_the_last_action_only():
    # a b EOS pad pad; a b c d e without EOS; an empty answer; a filler row.
    kl = torch.randn(4, 5)
    rewards = shape_rewards(torch.tensor([2.0, 3.0, -1.0, NAN]), kl, MASK, kl_coef=0.0)
    expected = [[0, 0, 2.0, 0, 0], [0, 0, 0, 0, 3.0], [-1.0, 0, 0, 0, 0], [0] * 5]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    assert last_action_mask(MASK).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0], [0] * 5]
    assert last_action_mask(torch.tensor([[0, 1, 0, 1, 0]])).tolist() == [[0, 0, 0, 1, 0]]


def test_rewards_equal_the_loop_and_ignore_the_padding():
    scores, kl, kl_coef = torch.randn(4), torch.randn(4, 5).masked_fill(MASK == 0, NAN), 0.3
    expected = torch.zeros(4, 5)
    for b in range(4):
        actions = [t for t in range(5) if MASK[b, t]]
        for t in actions:
            expected[b, t] = -kl_coef * kl[b, t] + (scores[b] if t == actions[-1] else 0.0)
    torch.testing.assert_close(shape_rewards(scores, kl, MASK, kl_coef), expected)


def test_the_rewards_of_an_answer_add_up_to_eq_2_of_1909_08593():
    scores, log_probs, ref_log_probs = torch.randn(4), torch.randn(4, 5), torch.randn(4, 5)
    rewards = shape_rewards(scores, log_probs - ref_log_probs, MASK, 0.1)
    whole = scores - 0.1 * ((log_probs * MASK).sum(1) - (ref_log_probs * MASK).sum(1))
    torch.testing.assert_close(rewards.sum(1)[:3], whole[:3])


def test_must_fail_the_score_in_the_last_column_or_the_penalty_as_a_bonus():
    scores, kl = torch.ones(4), torch.ones(4, 5)
    right = shape_rewards(scores, kl, MASK, 0.1)
    in_the_last_column = -0.1 * kl * MASK
    in_the_last_column[:, -1] += scores
    bonus, shifted = shape_rewards(scores, kl, MASK, -0.1), shape_rewards(scores, kl, MASK.roll(1, 1), 0.1)
    for wrong in (in_the_last_column, bonus, shifted):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, right)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="disagree"):
        shape_rewards(torch.zeros(4, 1), torch.zeros(4, 5), MASK, 0.1)
    with pytest.raises(ValueError, match="disagree"):
        shape_rewards(torch.zeros(4), torch.zeros(4, 1), MASK, 0.1)

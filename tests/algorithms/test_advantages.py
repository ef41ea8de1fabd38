"""GAE by hand (P-08), against the sum of eq. 16, and in its two limits."""

import pytest
import torch

from alpaca_rlhf.algorithms.advantages import gae

NAN = float("nan")


def p08(padding, garbage):
    values = torch.tensor([[0.5, 0.4, 0.3] + [garbage] * padding])
    rewards = torch.tensor([[0.0, 0.0, 1.0] + [garbage] * padding])
    mask = torch.tensor([[1, 1, 1] + [0] * padding])
    return rewards, values, mask


@pytest.mark.parametrize(("padding", "garbage"), [(0, 0.0), (2, 9.0), (10, 9.0), (2, NAN)])
def test_P08_numbers_by_hand_whatever_the_padding_holds(padding, garbage):
    # From the end: 1 - .3 = .7; .3 - .4 + .95 * .7 = .565; .4 - .5 + .95 * .565 = .43675.
    advantages, returns = gae(*p08(padding, garbage), gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.43675, 0.565, 0.7] + [0.0] * padding]))
    torch.testing.assert_close(returns, torch.tensor([[0.93675, 0.965, 1.0] + [0.0] * padding]))


def unmasked_gae(rewards, values, gamma, lam):
    """The ancestor's recursion over the whole width, padding included."""
    last, out = torch.zeros(rewards.shape[0]), []
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        out.append(last)
    return torch.stack(out[::-1], dim=1)


def test_must_fail_P08_the_recursion_of_the_ancestor():
    rewards, values, mask = p08(2, 9.0)
    with pytest.raises(AssertionError):
        wrong = unmasked_gae(rewards * mask, values, 1.0, 0.95) * mask
        torch.testing.assert_close(wrong, gae(rewards, values, mask, 1.0, 0.95)[0])


def random_case():
    lengths = torch.tensor([6, 1, 3, 0, 5])
    mask = (torch.arange(6) < lengths[:, None]).long()
    rewards, values = (torch.randn(5, 6).masked_fill(mask == 0, NAN) for _ in range(2))
    return rewards, values, mask


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_equals_the_sum_of_equation_16(gamma, lam):
    rewards, values, mask = random_case()
    expected = torch.zeros(5, 6)
    for b in range(5):
        length = int(mask[b].sum())
        deltas = [
            float(rewards[b, t]) + gamma * (float(values[b, t + 1]) if t + 1 < length else 0.0) - float(values[b, t])
            for t in range(length)
        ]
        for t in range(length):
            expected[b, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.where(mask == 1, expected + values, 0.0))


def test_lam_1_gives_the_discounted_return_and_lam_0_the_one_step_target():
    rewards, values, mask = random_case()
    _, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    rewards_to_go = sum(0.9**t * float(rewards[0, t]) for t in range(6))
    torch.testing.assert_close(returns[0, 0].item(), rewards_to_go, rtol=1e-6, atol=1e-6)  # float64 loop
    _, returns = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    torch.testing.assert_close(returns[0, 0], rewards[0, 0] + 0.9 * values[0, 1])


def test_must_fail_values_shifted_by_one():
    rewards, values, mask = random_case()
    with pytest.raises(AssertionError):
        wrong, _ = gae(rewards, values.nan_to_num().roll(1, 1), mask, 1.0, 0.95)
        torch.testing.assert_close(wrong, gae(rewards, values, mask, 1.0, 0.95)[0])


def test_no_gradient_and_float32():
    values = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2), 1.0, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad
    assert advantages.dtype == returns.dtype == torch.float32


def test_answers_of_no_width_are_legal():
    empty = torch.zeros(3, 0)
    advantages, returns = gae(empty, empty, empty, 1.0, 0.95)
    assert advantages.shape == returns.shape == (3, 0)


def test_bad_arguments_are_refused():
    x = torch.zeros(2, 3)
    for gamma, lam in ((1.1, 0.9), (0.9, -0.1), (NAN, 0.9)):
        with pytest.raises(ValueError, match="between 0 and 1"):
            gae(x, x, x, gamma, lam)
    with pytest.raises(ValueError, match="must all be"):
        gae(x, x[:, :1], x, 1.0, 0.95)

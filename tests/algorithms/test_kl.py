"""KL estimators by hand and in expectation (P-06), and the controllers (P-17)."""

import math

import pytest
import torch

from alpaca_rlhf.algorithms.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, kl_estimate

POLICY, REFERENCE = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])


@pytest.mark.parametrize(
    ("estimator", "by_hand"),
    [
        ("k1", [0.5, -1.0]),
        ("abs", [0.5, 1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2.0]),
    ],
)
def test_P06_estimators_by_hand(estimator, by_hand):
    torch.testing.assert_close(kl_estimate(POLICY, REFERENCE, estimator), torch.tensor([by_hand]))


def test_P06_means_of_the_fault_list():
    torch.testing.assert_close(kl_estimate(POLICY, REFERENCE, "k1").mean(), torch.tensor(-0.25))
    assert round(kl_estimate(POLICY, REFERENCE, "k3").mean().item(), 3) == 0.412


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_P06_equal_policies_have_exactly_no_kl(estimator):
    log_probs = torch.randn(4, 5) * 10
    assert kl_estimate(log_probs, log_probs.clone(), estimator).abs().max() == 0


def exact_expectation(policy, reference, estimator):
    """Every token weighed by its probability: what an infinite sample gives."""
    return (policy.exp() * kl_estimate(policy, reference, estimator)).sum()


def test_k1_and_k3_are_unbiased():
    policy, reference = torch.randn(2, 50).log_softmax(-1)
    true_kl = sum(p * math.log(p / q) for p, q in zip(policy.exp().tolist(), reference.exp().tolist(), strict=True))
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(exact_expectation(policy, reference, estimator), torch.tensor(true_kl))


def test_must_fail_the_biased_forms_and_the_other_direction():
    policy, reference = torch.randn(2, 50).log_softmax(-1)
    true_kl = exact_expectation(policy, reference, "k1")
    wrongs = [exact_expectation(policy, reference, e) for e in ("abs", "k2")]
    wrongs.append((policy.exp() * kl_estimate(reference, policy, "k3")).sum())
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, true_kl)


def test_k3_is_never_negative_not_even_by_rounding():
    close = torch.linspace(-1e-3, 1e-3, 20001)
    assert kl_estimate(close, torch.zeros(20001), "k3").min() >= 0


def test_must_fail_k3_with_a_plain_exponential():
    close = torch.linspace(-1e-3, 1e-3, 20001)
    with pytest.raises(AssertionError):
        assert (close.neg().exp() - 1 + close).min() >= 0


def test_estimates_are_float32_and_bad_arguments_are_refused():
    assert kl_estimate(POLICY.bfloat16(), REFERENCE.bfloat16(), "k1").dtype == torch.float32
    with pytest.raises(ValueError, match="k1, abs, k2, k3"):
        kl_estimate(POLICY, REFERENCE, "k4")
    with pytest.raises(ValueError, match="differ"):
        kl_estimate(POLICY, REFERENCE[:, :1], "k1")


def test_P17_twice_the_target_raises_and_no_kl_lowers_the_coefficient_by_the_clipped_error():
    controller = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    controller.update(12.0, answers=100)
    assert controller.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    controller.update(0.0, answers=100)
    assert controller.kl_coef == pytest.approx(0.1 * 1.02 * 0.98)


def test_P17_inside_the_clip_the_error_is_proportional_and_on_target_nothing_moves():
    controller = AdaptiveKLController(0.1, target=6.0, horizon=1000)
    controller.update(6.6, answers=500)
    assert controller.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    before = controller.kl_coef
    controller.update(6.0, answers=500)
    assert controller.kl_coef == before


def test_P17_a_penalty_of_0_stays_0():
    controller = AdaptiveKLController(0.0, target=6.0, horizon=1000)
    controller.update(12.0, answers=100)
    assert controller.kl_coef == 0.0


def test_must_fail_P17_feeding_the_kl_per_token():
    per_answer, per_token = (AdaptiveKLController(0.1, target=6.0, horizon=1000) for _ in range(2))
    per_answer.update(12.0, answers=100)
    per_token.update(12.0 / 40, answers=100)
    with pytest.raises(AssertionError):
        assert per_token.kl_coef == pytest.approx(per_answer.kl_coef)


def test_one_update_with_many_answers_is_close_to_many_with_few():
    once, often = (AdaptiveKLController(0.1, target=6.0, horizon=10000) for _ in range(2))
    once.update(6.6, answers=64)
    for _ in range(4):
        often.update(6.6, answers=16)
    assert once.kl_coef == pytest.approx(often.kl_coef, rel=1e-6)


def test_fixed_controller_stays_and_state_travels():
    fixed = FixedKLController(0.05)
    fixed.update(99.0, answers=10)
    assert fixed.kl_coef == 0.05 and fixed.state_dict() == {"kl_coef": 0.05}
    source, copy = AdaptiveKLController(0.1, 6.0, 1000), AdaptiveKLController(0.7, 6.0, 1000)
    source.update(12.0, answers=100)
    copy.load_state_dict(source.state_dict())
    fixed.load_state_dict(source.state_dict())
    assert copy.kl_coef == fixed.kl_coef == source.kl_coef


@pytest.mark.parametrize(
    "call",
    [
        lambda: FixedKLController(-0.1),
        lambda: AdaptiveKLController(float("nan"), 6.0, 1000),
        lambda: AdaptiveKLController(0.1, 0.0, 1000),
        lambda: AdaptiveKLController(0.1, 6.0, 0),
        lambda: AdaptiveKLController(0.1, 6.0, 1000).update(float("nan"), 10),
        lambda: AdaptiveKLController(0.1, 6.0, 10).update(0.0, 50),
    ],
)
def test_bad_numbers_are_refused(call):
    with pytest.raises(ValueError):
        call()

"""The losses against loops over single tokens, hand-derived numbers, and the accumulation invariance."""

import math

import pytest
import torch

from alpaca_rlhf.algorithms.losses import (
    pairwise_loss_sum,
    per_token_pairwise_loss_sum,
    policy_loss_sum,
    sft_loss_sum,
    value_loss_sum,
)

NAN, INF = float("nan"), float("inf")
LN2 = math.log(2)


def softplus(x):
    return math.log1p(math.exp(x))


def random_case(names, seed=0):
    """Random (5, 7) tensors, a prefix mask with an all-0 row, garbage off the mask, the first one with gradient."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([7, 1, 0, 3, 5])
    mask = (torch.arange(7) < lengths[:, None]).long()
    tensors = {name: torch.randn(5, 7, generator=generator).masked_fill(mask == 0, garbage)
               for name, garbage in zip(names, (NAN, INF, NAN, -INF), strict=False)}  # fmt: skip
    tensors[names[0]].requires_grad_()
    return tensors, mask


def counted(mask):
    return [(b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]


# --- step 1 ---


def test_S02_sft_loss_of_one_word_and_its_eos_by_hand():
    log_probs, mask = torch.tensor([[-3.0, -0.5, -1.25, -9.0]]), torch.tensor([[0, 1, 1, 0]])
    assert sft_loss_sum(log_probs, mask).item() == 1.75


def test_S01_padding_does_not_change_the_sft_loss_nor_get_a_gradient():
    tensors, mask = random_case(["log_probs"])
    loss = sft_loss_sum(tensors["log_probs"], mask)
    expected = -sum(tensors["log_probs"][b, t].item() for b, t in counted(mask))
    torch.testing.assert_close(loss.item(), expected, rtol=1e-6, atol=1e-6)  # a float64 sum against a float32 one
    loss.backward()
    torch.testing.assert_close(tensors["log_probs"].grad, -mask.float())


def test_must_fail_sft_mask_shifted_by_one_or_mean_of_means():
    log_probs = -torch.arange(8.0).reshape(2, 4)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]])
    right = sft_loss_sum(log_probs, mask) / mask.sum()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(sft_loss_sum(log_probs, mask.roll(1, 1)) / mask.sum(), right)
    with pytest.raises(AssertionError):
        per_row = torch.stack([sft_loss_sum(log_probs[b : b + 1], mask[b : b + 1]) / mask[b].sum() for b in range(2)])
        torch.testing.assert_close(per_row.mean(), right)


def test_S04_sums_do_not_depend_on_how_the_batch_is_cut():
    tensors, mask = random_case(["log_probs"])
    whole = sft_loss_sum(tensors["log_probs"], mask)
    for cut in (1, 2, 3):
        rows = [slice(start, start + cut) for start in range(0, 5, cut)]
        torch.testing.assert_close(sum(sft_loss_sum(tensors["log_probs"][r], mask[r]) for r in rows), whole)


# --- step 2 ---


def test_pairwise_loss_by_hand():
    # Equal scores: ln 2. Ahead by ln 3: -log(3/4). Behind by ln 3: -log(1/4).
    chosen, rejected = torch.tensor([1.0, math.log(3), 0.0]), torch.tensor([1.0, 0.0, math.log(3)])
    for row, expected in enumerate([LN2, math.log(4 / 3), math.log(4)]):
        only = torch.zeros(3).index_fill(0, torch.tensor(row), 1.0)
        torch.testing.assert_close(pairwise_loss_sum(chosen, rejected, 0.0, only), torch.tensor(expected))


def test_pairwise_loss_equals_the_loop_with_margins_and_ignores_filler_rows():
    chosen, rejected = torch.tensor([0.3, NAN, -1.0], requires_grad=True), torch.tensor([-0.2, INF, 2.0])
    margin, row_mask = torch.tensor([1.0, NAN, 0.5]), torch.tensor([1.0, 0.0, 1.0])
    loss = pairwise_loss_sum(chosen, rejected, margin, row_mask)
    torch.testing.assert_close(loss, torch.tensor(softplus(-(0.3 + 0.2 - 1.0)) + softplus(-(-1.0 - 2.0 - 0.5))))
    loss.backward()
    assert chosen.grad[1] == 0 and chosen.grad.isfinite().all() and (chosen.grad[[0, 2]] < 0).all()


def test_must_fail_pairwise_with_the_sides_or_the_margin_swapped():
    chosen, rejected, ones = torch.tensor([0.3, -1.0]), torch.tensor([-0.2, 2.0]), torch.ones(2)
    right = pairwise_loss_sum(chosen, rejected, 1.0, ones)
    for wrong in (pairwise_loss_sum(rejected, chosen, 1.0, ones), pairwise_loss_sum(chosen, rejected, -1.0, ones)):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, right)


def test_R02_a_gap_of_400_in_bfloat16_costs_400_with_a_finite_gradient():
    chosen = torch.tensor([-200.0], dtype=torch.bfloat16, requires_grad=True)
    loss = pairwise_loss_sum(chosen, torch.tensor([200.0], dtype=torch.bfloat16), 0.0, torch.ones(1))
    loss.backward()
    assert loss.item() == 400.0 and loss.dtype == torch.float32
    assert chosen.grad.item() == -1.0


PAIR = {
    # Common tokens 0 and 1, chosen ends at 3, rejected at 5: positions 2 and 3 are compared.
    "chosen_values": [9.0, 9.0, 1.0, 0.0, 7.0, 7.0],
    "rejected_values": [9.0, 9.0, 1.0, math.log(3), 5.0, 5.0],
    "chosen_mask": [1, 1, 1, 1, 0, 0],
    "rejected_mask": [1, 1, 1, 1, 1, 1],
}


def per_token(divergence=(2,), row_mask=(1.0,), **changes):
    rows = {name: torch.tensor([row]) for name, row in {**PAIR, **changes}.items()}
    return per_token_pairwise_loss_sum(**rows, divergence=torch.tensor(divergence), row_mask=torch.tensor(row_mask))


def test_per_token_loss_by_hand():
    # Gaps 0 and -ln 3 at the two compared positions: mean of ln 2 and ln 4 = 1.5 ln 2.
    torch.testing.assert_close(per_token(), torch.tensor(1.5 * LN2))


def test_R04_values_at_padding_change_nothing():
    changed_chosen, changed_rejected = [9.0, 9.0, 1.0, 0.0, NAN, INF], [0.0, NAN, 1.0, math.log(3), 6.0, NAN]
    changed = per_token(chosen_values=changed_chosen, rejected_values=changed_rejected)
    torch.testing.assert_close(changed, per_token())


def test_must_fail_R04_ranging_to_the_longer_end_like_the_ancestor():
    gap = torch.tensor(PAIR["chosen_values"]) - torch.tensor(PAIR["rejected_values"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(-torch.nn.functional.logsigmoid(gap[2:6]).mean(), per_token())


def test_must_fail_per_token_divergence_off_by_one():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(per_token(divergence=(1,)), per_token())


def test_R08_a_prefix_pair_compares_the_end_scores():
    # Nothing differs before the shorter end (position 4): chosen ends with 0.0 at 3, rejected with ln 3 at 5.
    values = PAIR["rejected_values"][:5] + [math.log(3)]
    torch.testing.assert_close(per_token(divergence=(4,), rejected_values=values), torch.tensor(2 * LN2))


def test_per_token_loss_equals_the_loop_over_pairs_and_has_no_gradient_off_the_compared_tokens():
    generator = torch.Generator().manual_seed(3)
    chosen_len, rejected_len, divergence = [6, 3, 5, 4], [4, 3, 2, 4], [2, 0, 2, 1]
    position = torch.arange(6)
    masks = [(position < torch.tensor(lengths)[:, None]).long() for lengths in (chosen_len, rejected_len)]
    chosen, rejected = (torch.randn(4, 6, generator=generator).masked_fill(mask == 0, NAN) for mask in masks)
    chosen.requires_grad_()
    row_mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    loss = per_token_pairwise_loss_sum(chosen, rejected, *masks, torch.tensor(divergence), row_mask)
    expected = 0.0
    for b in range(3):
        span = range(divergence[b], min(chosen_len[b], rejected_len[b]))
        ends = [(chosen_len[b] - 1, rejected_len[b] - 1)]
        pairs = [(t, t) for t in span] or ends
        expected += sum(softplus((rejected[b, j] - chosen[b, i]).item()) for i, j in pairs) / len(pairs)
    torch.testing.assert_close(loss.item(), expected, rtol=1e-6, atol=1e-6)  # float64 loop against float32
    loss.backward()
    touched = {(b, t) for b, t in chosen.grad.nonzero().tolist()}
    assert touched == {(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 4)}


def test_a_filler_pair_of_nan_leaks_into_neither_per_token_loss_nor_gradient():
    rows = {name: torch.tensor([row, row], dtype=torch.float32) for name, row in PAIR.items()}
    for name in ("chosen_values", "rejected_values"):
        rows[name][1] = NAN
        rows[name].requires_grad_()
    loss = per_token_pairwise_loss_sum(**rows, divergence=torch.tensor([2, 2]), row_mask=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(loss, per_token())
    loss.backward()
    for name in ("chosen_values", "rejected_values"):
        assert rows[name].grad[0].abs().sum() > 0 and rows[name].grad[1].abs().sum() == 0


# --- step 3 ---


def test_policy_loss_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5 with advantages 2, -2, 2, -2 and clip 0.2:
    # min(3, 2.4) = 2.4 clipped; min(-3, -2.4) = -3; min(1, 1.6) = 1; min(-1, -1.6) = -1.6 clipped.
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]])
    result = policy_loss_sum(ratio.log(), torch.zeros(1, 4), torch.tensor([[2.0, -2, 2, -2]]), torch.ones(1, 4), 0.2)
    torch.testing.assert_close(result.loss_sum, torch.tensor(-(2.4 - 3.0 + 1.0 - 1.6)))
    assert result.clip_count.item() == 2
    torch.testing.assert_close(result.ratio_deviation_sum, torch.tensor(2.0))
    k3 = 2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5))
    torch.testing.assert_close(result.approx_kl_sum, torch.tensor(k3))


def test_policy_loss_equals_the_loop_and_nothing_leaks_from_padding():
    tensors, mask = random_case(["log_probs", "old_log_probs", "advantages"])
    result = policy_loss_sum(**tensors, response_mask=mask, clip=0.2)
    loss = clipped = deviation = kl = 0.0
    for b, t in counted(mask):
        new, old, advantage = (float(tensors[name][b, t].detach()) for name in tensors)
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 0.8), 1.2)
        loss -= min(ratio * advantage, bounded * advantage)
        clipped += bounded * advantage < ratio * advantage
        deviation += abs(ratio - 1)
        kl += ratio - 1 - (new - old)
    actual = [number.item() for number in result]
    torch.testing.assert_close(actual, [loss, clipped, deviation, kl], rtol=1e-6, atol=1e-5)  # float64 loop
    result.loss_sum.backward()
    gradient = tensors["log_probs"].grad
    assert gradient.isfinite().all() and gradient[mask == 0].abs().sum() == 0 and gradient.abs().sum() > 0
    assert not any(number.requires_grad for number in result[1:])


def test_policy_gradient_at_ratio_1_is_minus_the_advantage():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[0.5, -1.5, 4.0]])
    result = policy_loss_sum(log_probs, log_probs.detach(), advantages, torch.ones(1, 3), 0.2)
    result.loss_sum.backward()
    torch.testing.assert_close(log_probs.grad, -advantages)
    assert [number.item() for number in result[1:]] == [0.0, 0.0, 0.0]


def test_must_fail_policy_loss_with_ratio_inverted_sign_flipped_or_mask_shifted():
    tensors, mask = random_case(["log_probs", "old_log_probs", "advantages"])
    clean = [tensor.detach().nan_to_num(0.0, 0.0, 0.0) for tensor in tensors.values()]
    new, old, advantages = clean
    right = policy_loss_sum(new, old, advantages, mask, 0.2).loss_sum
    wrongs = [(old, new, advantages, mask), (new, old, -advantages, mask), (new, old, advantages, mask.roll(1, 1))]
    for wrong in wrongs:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(policy_loss_sum(*wrong, 0.2).loss_sum, right)


def test_value_loss_by_hand():
    # old 0, clip 0.2. v 1 R 2: (1-2)^2 = 1 against (0.2-2)^2 = 3.24 -> clipped. v 1 R 0: 1 against 0.04 -> 1.
    # v 0.1 R 1: inside, 0.81 either way.
    values, returns = torch.tensor([[1.0, 1.0, 0.1]]), torch.tensor([[2.0, 0.0, 1.0]])
    loss, clip_count = value_loss_sum(values, torch.zeros(1, 3), returns, torch.ones(1, 3), 0.2)
    torch.testing.assert_close(loss, torch.tensor(0.5 * (3.24 + 1.0 + 0.81)))
    assert clip_count.item() == 1
    loss, clip_count = value_loss_sum(values, torch.zeros(1, 3), returns, torch.ones(1, 3), None)
    torch.testing.assert_close(loss, torch.tensor(0.5 * (1.0 + 1.0 + 0.81)))
    assert clip_count.item() == 0


def test_a_value_within_the_clip_is_not_counted_for_its_rounding():
    old_values = torch.linspace(-0.05, 0.05, 997)[None]
    values = torch.linspace(0.049, -0.048, 997)[None]  # moves of 0.1 at most: old + (new - old) is not new everywhere
    assert not torch.equal(old_values + (values - old_values), values)
    result = value_loss_sum(values, old_values, torch.ones(1, 997), torch.ones(1, 997), 0.2)
    assert result.clip_count.item() == 0


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_equals_the_loop_and_nothing_leaks_from_padding(clip):
    tensors, mask = random_case(["values", "old_values", "returns"])
    result = value_loss_sum(**tensors, response_mask=mask, clip=clip)
    loss = clipped = 0.0
    for b, t in counted(mask):
        new, old, target = (float(tensors[name][b, t].detach()) for name in tensors)
        errors = [(new - target) ** 2]
        if clip is not None:
            errors.append((old + min(max(new - old, -clip), clip) - target) ** 2)
        loss += 0.5 * max(errors)
        clipped += errors[-1] > errors[0]
    torch.testing.assert_close([n.item() for n in result], [loss, clipped], rtol=1e-6, atol=1e-5)  # float64 loop
    result.loss_sum.backward()
    gradient = tensors["values"].grad
    assert gradient.isfinite().all() and gradient[mask == 0].abs().sum() == 0 and gradient.abs().sum() > 0


def test_must_fail_value_loss_with_min_or_without_the_half():
    values, returns, ones = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]), torch.ones(1, 2)
    right = value_loss_sum(values, torch.zeros(1, 2), returns, ones, 0.2).loss_sum
    error, clipped = (values - returns) ** 2, (torch.full((1, 2), 0.2) - returns) ** 2
    for wrong in (0.5 * torch.minimum(error, clipped).sum(), torch.maximum(error, clipped).sum()):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(wrong, right)


def test_P23_bfloat16_inputs_give_float32_losses():
    x = torch.randn(2, 3).bfloat16()
    assert policy_loss_sum(x, x, x, torch.ones(2, 3), 0.2).loss_sum.dtype == torch.float32
    assert value_loss_sum(x, x, x, torch.ones(2, 3), 0.2).loss_sum.dtype == torch.float32
    assert sft_loss_sum(x, torch.ones(2, 3)).dtype == torch.float32


def test_P18_clip_0_allows_no_move_and_a_negative_clip_is_refused():
    x, zero, one = torch.tensor([[math.log(2)]]), torch.zeros(1, 1), torch.ones(1, 1)
    assert policy_loss_sum(x, zero, one, one, 0.0).loss_sum.item() == -1.0
    for function in (policy_loss_sum, value_loss_sum):
        with pytest.raises(ValueError, match="clip must not be negative"):
            function(x, zero, one, one, -0.1)


def test_shapes_that_would_broadcast_are_refused():
    x, column = torch.zeros(3, 3), torch.zeros(3, 1)
    for call in (
        lambda: sft_loss_sum(x, column),
        lambda: policy_loss_sum(x, x, column, x, 0.2),
        lambda: value_loss_sum(x, column, x, x, 0.2),
        lambda: pairwise_loss_sum(torch.zeros(3), torch.zeros(3), 0.0, column),
    ):
        with pytest.raises(ValueError, match="shapes must be equal"):
            call()

"""Chunked log-probs against log_softmax + gather, in value, gradient and memory."""

import math

import pytest
import torch

from alpaca_rlhf.algorithms.log_probs import selected_log_probs

N, H, V = 11, 6, 13


def naive(hidden, targets, weight, temperature=1.0, limit=None):
    logits = (hidden @ weight.T).float()
    if limit is not None:
        logits = torch.where(torch.arange(logits.shape[1]) < limit, logits, -math.inf)
    log_softmax = (logits / temperature).log_softmax(-1)
    entropy = [-sum(math.exp(p) * p for p in row if p != -math.inf) for row in log_softmax.tolist()]
    return log_softmax.gather(1, targets[:, None])[:, 0], torch.tensor(entropy)


@pytest.fixture
def case():
    hidden = torch.randn(N, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    return hidden, torch.randint(0, 10, (N,)), weight


class Recorder:
    """A projection that notes how many rows each call had."""

    def __init__(self, weight):
        self.weight, self.rows = weight, []

    def __call__(self, hidden):
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


@pytest.mark.parametrize("max_elements", [1, V * 4, V * N, 2**24])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("limit", [None, 10, 99])
def test_equals_log_softmax_and_gather_in_value_and_gradient(case, max_elements, temperature, limit):
    hidden, targets, weight = case
    expected, expected_entropy = naive(hidden, targets, weight, temperature, limit)
    log_probs, entropy = selected_log_probs(
        hidden, targets, lambda h: h @ weight.T, temperature=temperature, with_entropy=True,
        max_elements=max_elements, vocabulary_limit=limit,
    )  # fmt: skip
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    assert log_probs.dtype == entropy.dtype == torch.float32 and not entropy.requires_grad
    cotangent = torch.randn(N)
    ours = torch.autograd.grad(log_probs, (hidden, weight), cotangent)
    theirs = torch.autograd.grad(expected, (hidden, weight), cotangent)
    torch.testing.assert_close(ours, theirs)


def test_T10_ids_beyond_the_tokenizer_take_no_probability(case):
    hidden, _, weight = case
    every_id = torch.arange(10)
    rows = hidden[:1].expand(10, H)
    log_probs, _ = selected_log_probs(rows, every_id, lambda h: h @ weight.T, vocabulary_limit=10)
    torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0))


def test_must_fail_forgetting_temperature_or_limit(case):
    hidden, targets, weight = case
    for wrong in ({}, {"temperature": 0.5}, {"vocabulary_limit": 10}):
        log_probs, _ = selected_log_probs(hidden, targets, lambda h: h @ weight.T, **wrong)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(log_probs, naive(hidden, targets, weight, 0.5, 10)[0])


def test_must_fail_targets_shifted_by_one(case):
    hidden, targets, weight = case
    log_probs, _ = selected_log_probs(hidden, targets.roll(1), lambda h: h @ weight.T)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(log_probs, naive(hidden, targets, weight)[0])


def test_no_more_logits_than_allowed_and_one_piece_where_it_fits(case):
    hidden, targets, weight = case
    project = Recorder(weight)
    with torch.no_grad():
        selected_log_probs(hidden, targets, project, max_elements=4 * V + 1)
        assert project.rows == [1, 4, 4, 3]
        project.rows.clear()
        selected_log_probs(hidden, targets, project, max_elements=N * V)
        assert project.rows == [1, N]


def test_pieces_are_recomputed_in_the_backward_pass_and_keep_no_logits(case):
    hidden, targets, weight = case
    kept = []

    def keeps(max_elements):
        kept.clear()
        project = Recorder(weight)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            log_probs, _ = selected_log_probs(hidden, targets, project, max_elements=max_elements)
        forward_calls = len(project.rows)
        log_probs.sum().backward()
        return max(kept), len(project.rows) - forward_calls

    assert keeps(4 * V) == (4 * H, 3)  # of a piece of 4 rows its hidden states, not its 4 x V logits
    largest, recomputed = keeps(N * V)
    assert largest == N * V and recomputed == 0


def test_P23_half_precision_logits_are_normalised_in_float32():
    weight = torch.randn(V, H).bfloat16()
    hidden, targets = torch.randn(N, H).bfloat16(), torch.randint(0, V, (N,))
    log_probs, _ = selected_log_probs(hidden, targets, lambda h: h @ weight.T, max_elements=3 * V)
    torch.testing.assert_close(log_probs, naive(hidden, targets, weight)[0])
    assert log_probs.dtype == torch.float32


def test_entropy_of_known_distributions():
    flat, targets = torch.zeros(2, V), torch.tensor([0, 1])
    _, entropy = selected_log_probs(torch.zeros(2, H), targets, lambda h: flat[: len(h)], with_entropy=True)
    torch.testing.assert_close(entropy, torch.full((2,), math.log(V)))
    certain, first = torch.tensor([[0.0, -math.inf, -math.inf]]), torch.tensor([0])
    _, entropy = selected_log_probs(torch.zeros(1, H), first, lambda h: certain[: len(h)], with_entropy=True)
    assert entropy.tolist() == [0.0]


def test_no_token_at_all_still_gives_every_parameter_a_gradient(case):
    hidden, targets, weight = case
    log_probs, entropy = selected_log_probs(hidden[:0], targets[:0], lambda h: h @ weight.T, with_entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert weight.grad.abs().sum() == 0 and hidden.grad.abs().sum() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "positive"),
        ({"max_elements": 0}, "positive"),
        ({"vocabulary_limit": 0}, "positive"),
        ({"vocabulary_limit": 5}, "vocabulary of 5"),
        ({"targets": torch.full((N,), V)}, "vocabulary of 13"),
        ({"targets": torch.full((N,), -100)}, "vocabulary of 13"),
        ({"targets": torch.zeros(N + 1, dtype=torch.long)}, "disagree"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"hidden": torch.zeros(N, H), "targets": torch.full((N,), 9), "project": lambda h: h @ torch.ones(H, V)}
    with pytest.raises(ValueError, match=message):
        selected_log_probs(**{**arguments, **change})

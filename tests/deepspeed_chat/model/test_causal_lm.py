"""Log-probabilities against the log-softmax of the whole logits; alignment; padding."""

import pytest
import torch

from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from tests.tiny import tiny_gpt2, tiny_llama

MODELS = [tiny_gpt2, tiny_llama]


def naive(model, ids, mask, positions=None, temperature=1.0, limit=None):
    """(B, S-1): log-prob and entropy of token t at position t - 1, from the full logits."""
    logits = (
        model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float()[:, :, :limit] / temperature
    )
    table = logits.log_softmax(-1)
    log_probs = torch.empty(ids.shape[0], ids.shape[1] - 1)
    for row in range(ids.shape[0]):
        for t in range(1, ids.shape[1]):
            log_probs[row, t - 1] = table[row, t - 1, ids[row, t]]
    return log_probs, -(table.exp() * table).sum(-1)[:, :-1]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("start", [1, 4])
@pytest.mark.parametrize("limit", [None, 61])
def test_P09_log_probs_are_read_at_the_position_before(make, start, limit):
    model = make(64)
    ids, mask = torch.randint(4, 60, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    wanted = torch.randint(0, 2, (3, 9 - start))
    out = CausalLM(model, limit)(ids, mask, wanted, start=start, temperature=0.7, with_entropy=True)
    log_probs, entropy = naive(model, ids, mask, temperature=0.7, limit=limit)
    torch.testing.assert_close(out.log_probs, log_probs[:, start - 1 :] * wanted)
    torch.testing.assert_close(out.entropy, entropy[:, start - 1 :] * wanted)
    assert CausalLM(model)(ids, mask, wanted, start=start).entropy is None
    with pytest.raises(AssertionError):  # the twin: read at the token's own position
        torch.testing.assert_close(out.log_probs, torch.roll(log_probs, -1, 1)[:, start - 1 :] * wanted)


@pytest.mark.parametrize("make", MODELS)
def test_P01_padding_on_either_side_changes_nothing(make):
    model = CausalLM(make(64))
    lengths, answer = (4, 12), 5
    texts = [torch.randint(4, 60, (length + answer,)) for length in lengths]
    alone = [
        model(text[None], torch.ones(1, len(text)), torch.ones(1, answer), start=len(text) - answer).log_probs[0]
        for text in texts
    ]
    width = max(lengths) + answer
    for side in ("left", "right"):
        ids, mask, wanted = (torch.zeros(2, width, dtype=torch.long) for _ in range(3))
        for row, text in enumerate(texts):
            first = width - len(text) if side == "left" else 0
            ids[row, first : first + len(text)] = text
            mask[row, first : first + len(text)] = 1
            wanted[row, first + len(text) - answer : first + len(text)] = 1
        out = model(ids, mask, wanted[:, 1:]).log_probs
        for row in range(2):
            torch.testing.assert_close(out[row][wanted[row, 1:].bool()], alone[row], atol=1e-5, rtol=0)
            assert (out[row][~wanted[row, 1:].bool()] == 0).all()


def test_P01_the_twin_with_positions_from_the_column_fails():
    model = tiny_gpt2(64)
    text = torch.randint(4, 60, (1, 6))
    ids, mask = torch.nn.functional.pad(text, (5, 0)), torch.tensor([[0] * 5 + [1] * 6])
    alone = CausalLM(model)(text, torch.ones_like(text), torch.ones(1, 5)).log_probs
    columns, _ = naive(model, ids, mask, positions=torch.arange(11)[None])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(columns[:, -5:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_equal_the_naive_ones_and_come_from_wanted_positions_only(make):
    model = make(64)
    ids, mask = torch.randint(4, 60, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    wanted = torch.zeros(2, 7)
    wanted[0, :3] = 1
    CausalLM(model)(ids, mask, wanted).log_probs.sum().backward()
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    # Row 1 is not wanted: its tokens have no gradient.
    rows = model.get_input_embeddings().weight.grad
    only_row_1 = [token for token in ids[1].tolist() if token not in ids[0].tolist()]
    if make is tiny_llama:  # GPT-2's output layer shares this weight and gives every row a gradient
        assert only_row_1 and (rows[only_row_1] == 0).all()
    model.zero_grad()
    (naive(model, ids, mask)[0] * wanted).sum().backward()
    torch.testing.assert_close(ours, [parameter.grad for parameter in model.parameters()])


def test_nothing_wanted_gives_zero_gradients_not_none():
    model = CausalLM(tiny_llama(64))
    ids = torch.randint(4, 60, (2, 6))
    out = model(ids, torch.ones_like(ids), torch.zeros(2, 5), with_entropy=True)
    assert out.log_probs.shape == (2, 5) == out.entropy.shape
    out.log_probs.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad == 0).all(), name


def test_fully_masked_rows_of_padding_stay_finite():
    for make in MODELS:
        model = CausalLM(make(64))
        ids = torch.randint(4, 60, (2, 9))
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        out = model(ids, mask, mask[:, 1:])
        out.log_probs.sum().backward()
        assert out.log_probs.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_P23_bf16_weights_give_float32_log_probs_twice_the_same():
    model = CausalLM(tiny_llama(64).bfloat16())
    ids = torch.randint(4, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    first = model(ids, mask, mask[:, 1:], with_entropy=True)
    with torch.no_grad():
        second = model(ids, mask, mask[:, 1:], with_entropy=True)
    assert first.log_probs.dtype == torch.float32 == first.entropy.dtype
    assert torch.equal(first.log_probs, second.log_probs)
    reference = tiny_llama(64)
    exact = CausalLM(reference)(ids, mask, mask[:, 1:]).log_probs
    torch.testing.assert_close(first.log_probs, exact, atol=0.1, rtol=0.05)  # bf16 weights: 8 bits


def test_shapes_are_asserted():
    ids = torch.randint(4, 60, (2, 6))
    with pytest.raises(AssertionError, match="does not fit"):
        CausalLM(tiny_llama(64))(ids, torch.ones_like(ids), torch.ones(2, 6))

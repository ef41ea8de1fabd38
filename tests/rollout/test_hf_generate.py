"""Sampling: the right distribution, the right end, nothing from the model's own settings, nothing from the batch."""

import pytest
import torch

from alpaca_rlhf.rollout.base import SamplingSettings, row_uniforms
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout, draw, filtered
from tests.tiny import tiny_gpt2, tiny_llama

EOS, PAD = 2, 0


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(**{"max_new_tokens": 8, "eos_ids": (EOS,), "pad_id": PAD, **changes})


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def plain_greedy(model, prompt: list[int], length: int) -> list[int]:
    """The naive loop: one whole forward pass a token."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def test_draw_follows_the_distribution():
    logits = torch.tensor([[0.1, 2.0, -1.0, float("-inf"), 0.5]])
    uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = draw(logits.expand(4000, -1), uniforms, settings())
    share = torch.bincount(drawn, minlength=5) / 4000
    torch.testing.assert_close(share, logits[0].softmax(-1), atol=1e-3, rtol=0)  # 1/4000 a boundary


def test_draw_at_the_edges_is_possible():
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    assert draw(logits, torch.tensor([0.0, 1 - 1e-17], dtype=torch.float64), settings()).tolist() == [1, 2]


def test_filters_keep_what_they_say():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert torch.isfinite(filtered(logits, 2, 1.0))[0].tolist() == [True, True, False, False]
    assert torch.isfinite(filtered(logits, 0, 0.6))[0].tolist() == [True, True, False, False]
    assert torch.isfinite(filtered(logits, 0, 0.0))[0].tolist() == [True, False, False, False]
    assert torch.isfinite(filtered(logits, 0, 1.0)).all()


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_P03_P13_greedy_equals_a_plain_loop_alone_and_in_a_batch(make):
    model = make()
    prompts = [[5, 6, 7], list(range(5, 25)), [9], [11, 12], [30, 31, 32, 33]]
    rollout = HFGenerateRollout(model, settings(temperature=0.0))
    ids, mask = left_padded(prompts)
    batch = rollout.generate(ids, mask, torch.zeros(5, 8))
    for row, prompt in zip(batch.tolist(), prompts, strict=True):
        expected = plain_greedy(model, prompt, 8)
        assert row[: len(expected)] == expected
        assert all(token == PAD for token in row[len(expected) :])


def test_P19_the_models_own_settings_change_nothing():
    model = tiny_llama()
    ids, mask = left_padded([[5, 6, 7], [8, 9]])
    uniforms = row_uniforms(1, 0, [0, 1], 8)
    before = HFGenerateRollout(model, settings()).generate(ids, mask, uniforms)
    own = model.generation_config
    own.update(do_sample=True, temperature=0.6, top_p=0.9, repetition_penalty=1.3, min_new_tokens=8)
    after = HFGenerateRollout(model, settings()).generate(ids, mask, uniforms)
    assert torch.equal(before, after)
    assert model.generation_config is own


def test_P20_rows_differ_and_runs_repeat():
    first = row_uniforms(7, 0, [0, 1], 4)
    assert torch.equal(first, row_uniforms(7, 0, [0, 1], 4))
    assert torch.equal(first[1:], row_uniforms(7, 0, [1], 4))
    for other in (row_uniforms(8, 0, [0, 1], 4), row_uniforms(7, 1, [0, 1], 4), first.flip(0)):
        assert not (first == other).any()


def test_an_answer_does_not_depend_on_its_batch():
    model = tiny_llama()
    prompts = [[5, 6, 7], list(range(5, 17)), [9, 9]]
    uniforms = row_uniforms(3, 0, [0, 1, 2], 8)
    rollout = HFGenerateRollout(model, settings())
    together = rollout.generate(*left_padded(prompts), uniforms)
    for row, prompt in enumerate(prompts):
        alone = rollout.generate(*left_padded([prompt]), uniforms[row : row + 1])[0]
        width = min(alone.shape[0], together.shape[1])
        assert alone[:width].tolist() == together[row, :width].tolist()


def test_P05_generation_ends_at_eos_and_pads_after_it():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every logit is 0: the uniform number chooses the id
    ids, mask = left_padded([[5, 6], [7, 8]])
    uniforms = torch.full((2, 8), (EOS + 0.5) / 64, dtype=torch.float64)
    uniforms[0, :2] = 10.5 / 64
    responses = HFGenerateRollout(model, settings()).generate(ids, mask, uniforms)
    assert responses.tolist() == [[10, 10, EOS], [EOS, PAD, PAD]]


def test_T10_ids_without_a_token_are_never_drawn():
    model = tiny_llama(64)
    ids, mask = left_padded([[5, 6]] * 50)
    uniforms = row_uniforms(0, 0, range(50), 40)
    rollout = HFGenerateRollout(model, settings(vocabulary_limit=40, max_new_tokens=40))
    assert rollout.generate(ids, mask, uniforms).max() < 40
    assert HFGenerateRollout(model, settings(max_new_tokens=40)).generate(ids, mask, uniforms).max() >= 40

"""What a role reads where: the critic's values, the reward model's own copy of an answer, the end that is an action."""

from contextlib import contextmanager

import pytest
import torch

from alpaca_rlhf.algorithms.masking import first_eos_mask
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Actor, Critic, Reward, Sequences
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel, ValueOutput
from alpaca_rlhf.rollout.base import SamplingSettings
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout
from tests.tiny import save_model, tiny_gpt2, tiny_llama, word_tokenizer

EOS, PAD = 2, 0


class FakeEngine:
    """Calls a function as its module and notes which of its contexts are open."""

    def __init__(self, forward) -> None:
        self.forward, self.open = forward, []

    def __call__(self, *words, **more):
        return self.forward(*words, **more)

    @contextmanager
    def _inside(self, name):
        self.open.append(name)
        yield
        self.open.remove(name)

    def evaluation_mode(self):
        return self._inside("evaluation_mode")

    def gathered(self):
        return self._inside("gathered")


def sequences(ids, mask, prompt_length):
    ids, mask = torch.tensor(ids), torch.tensor(mask)
    return Sequences(ids, mask, mask[:, prompt_length:], prompt_length)


def test_P09_the_value_of_an_action_is_read_at_the_position_before_it():
    """A critic whose value is the position: prompt width 6, 4 answer tokens, values 5 6 7 8."""

    def position(ids, attention_mask):
        return ValueOutput(torch.zeros(len(ids)), torch.arange(ids.shape[1]).float().expand(ids.shape))

    critic = Critic(FakeEngine(position), None, clip=0.2)
    values = critic.score(sequences([[1] * 10] * 2, [[1] * 10] * 2, 6))
    assert values.tolist() == [[5, 6, 7, 8]] * 2


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("lm"), tiny_gpt2(57, positions=12))
    model = RewardModel.from_causal_lm(str(folder), word_tokenizer(), seed=1, notice=str)
    with torch.no_grad():
        model.model.score.weight.mul_(20)
    return model


def test_P10_an_unfinished_answer_is_scored_with_an_end_in_the_reward_models_own_copy(reward_model):
    rows = sequences(
        [[PAD, 1, 5, 6, 30, 31, 32], [1, 5, 5, 6, 30, EOS, PAD], [PAD, 1, 5, 6, EOS, PAD, PAD]],
        [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0]], 4,
    )  # fmt: skip
    before = [tensor.clone() for tensor in rows[:3]]
    scores = Reward(reward_model, eos_id=EOS, pad_id=PAD, positions=12).score(rows, torch.tensor([False, True, True]))
    assert all(torch.equal(old, new) for old, new in zip(before, rows[:3], strict=True))  # nothing sampled is touched
    texts = [[1, 5, 6, 30, 31, 32, EOS], [1, 5, 5, 6, 30, EOS], [1, 5, 6, EOS]]
    for text, score in zip(texts, scores, strict=True):
        alone = reward_model(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.long)).scores[0]
        torch.testing.assert_close(score, alone, atol=1e-5, rtol=1e-5)
    full = sequences([[1] + [5] * 11], [[1] * 12], 4)  # no position is left for an end
    score = Reward(reward_model, eos_id=EOS, pad_id=PAD, positions=12).score(full, torch.tensor([False]))
    torch.testing.assert_close(score, reward_model(full.ids, full.attention_mask).scores)


def test_T02_where_the_padding_is_the_eos_the_one_real_end_is_an_action(reward_model):
    model = tiny_llama(57)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # the uniform number alone chooses the id
    settings = SamplingSettings(max_new_tokens=8, eos_ids=(EOS,), pad_id=EOS)
    uniforms = torch.full((2, 8), 20.5 / 57, dtype=torch.float64)
    uniforms[0, 3] = uniforms[1, 7] = (EOS + 0.5) / 57
    prompts = torch.tensor([[1, 5, 6], [EOS, 1, 7]])  # the second one is padded, with the EOS
    prompt_mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    answers = HFGenerateRollout(model, settings).generate(prompts, prompt_mask, uniforms)
    assert answers.tolist() == [[20, 20, 20, EOS, EOS, EOS, EOS, EOS], [20] * 7 + [EOS]]
    mask = first_eos_mask(answers, [EOS])
    assert mask.sum(1).tolist() == [4, 8] and ((answers == EOS) & mask.bool()).sum(1).tolist() == [1, 1]
    ids, attention = torch.cat([prompts, answers], 1), torch.cat([prompt_mask, mask], 1)
    log_probs = CausalLM(model)(ids, attention, mask, start=3).log_probs
    assert log_probs[0, 3] < 0 and log_probs[1, 7] < 0 and not log_probs[0, 4:].any()
    assert reward_model.forward_value(ids, attention).values[0, 2 + 3] != 0  # read before the end, like any other


def test_Z02_answers_are_sampled_from_whole_weights_and_wait_for_no_other_rank(monkeypatch):
    model, engine, seen = tiny_llama(57), FakeEngine(None), []
    original = type(model).generate

    def generate(self, **more):
        seen.append((list(engine.open), more["synced_gpus"]))
        return original(self, **more)

    monkeypatch.setattr(type(model), "generate", generate)
    rollout = HFGenerateRollout(model, SamplingSettings(max_new_tokens=2, eos_ids=(EOS,), pad_id=PAD))
    actor = Actor(engine, CausalLM(model), rollout, temperature=1.0, clip=0.2)
    prompts = torch.tensor([[1, 5]])
    actor.sample(prompts, torch.ones_like(prompts), torch.rand(1, 2, dtype=torch.float64))
    assert seen == [(["evaluation_mode", "gathered"], False)] and engine.open == []

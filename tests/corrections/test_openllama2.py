"""What was wrong in OpenLLaMA2 (rows A-xx and C-xx of the feature inventory), held against what is done here.

Each ``old_…`` is that behaviour in a few lines, written from its description; the assertion is the property it breaks.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from alpaca_rlhf.algorithms.losses import policy_loss_sum
from alpaca_rlhf.algorithms.masking import first_eos_mask
from alpaca_rlhf.algorithms.metrics import ended_rows
from alpaca_rlhf.algorithms.rewards import RewardStats
from alpaca_rlhf.arguments.deepspeed_chat import parse_step3
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning.pairs import PairScores
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.minibatches import plan
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import split_rows
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import convert_linear_layer_to_lora
from alpaca_rlhf.engines.optimizers import rate_factor
from alpaca_rlhf.rollout.base import SamplingSettings, row_uniforms
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout
from tests.deepspeed_chat.data.data_samples import A, U, only, talk, words
from tests.tiny import save_model, sentencepiece_tokenizer, tiny_llama, word_tokenizer

EOS, PAD = 2, 0
PROMPT = torch.tensor([[1, 5, 6, 7]])


def test_C16_rollouts_are_sampled():
    """A misspelt key of the generation settings is ignored, so every rollout was greedy: nothing to learn from."""
    model = tiny_llama()
    misspelt = GenerationConfig(do_samples=True, max_new_tokens=6, eos_token_id=EOS, pad_token_id=PAD)
    old = {tuple(model.generate(PROMPT, generation_config=misspelt)[0].tolist()) for _ in range(8)}
    assert len(old) == 1
    rollout = HFGenerateRollout(model, SamplingSettings(max_new_tokens=6, eos_ids=(EOS,), pad_id=PAD))
    prompts, mask = PROMPT.expand(64, -1), torch.ones(64, 4, dtype=torch.long)
    answers = rollout.generate(prompts, mask, row_uniforms(1, 0, range(64), 6))
    assert len({tuple(row) for row in answers.tolist()}) > 32
    # and what is sampled is what is scored: the first tokens come as often as the policy says they should
    likely = model(PROMPT).logits[0, -1].softmax(-1).detach()
    assert abs(float((answers[:, 0] == likely.argmax()).double().mean()) - float(likely.max())) < 0.2


def test_C15_the_first_token_of_an_answer_is_trained():
    model = CausalLM(tiny_llama())
    ids = torch.tensor([[1, 5, 6, 7, 30, 31, EOS]])  # a prompt of 4, an answer of 3

    def gradient_to_first_token(log_probs):
        (gradient,) = torch.autograd.grad(log_probs.sum(), model.model.lm_head.weight)
        return gradient[30]

    logits = model.model(ids).logits.log_softmax(-1)
    old = logits[:, 4:-1].gather(2, ids[:, 5:, None])[..., 0]  # from the answer's first position on: one too late
    ours = model(ids, torch.ones_like(ids), torch.ones(1, 3), start=4).log_probs
    assert old.shape[1] == 2 and ours.shape[1] == 3
    torch.testing.assert_close(ours[:, 1:], old)
    torch.testing.assert_close(ours[0, 0], logits[0, 3, 30])
    assert (gradient_to_first_token(ours) - gradient_to_first_token(old)).norm() > 0.1


def test_C14_a_truncated_answer_keeps_its_last_token():
    model = CausalLM(tiny_llama())
    sampled = torch.tensor([[30, 31, 32]])  # the limit came before an end
    old = sampled.clone()
    old[:, -1] = EOS
    assert not ended_rows(sampled, first_eos_mask(sampled, [EOS]), [EOS]).any()
    assert ended_rows(old, first_eos_mask(old, [EOS]), [EOS]).all()  # a truncation that nobody can see any more

    def log_probs(answer):
        ids = torch.cat([PROMPT, answer], 1)
        return model(ids, torch.ones_like(ids), torch.ones(1, 3), start=4).log_probs[0]

    assert abs(log_probs(old)[-1] - log_probs(sampled)[-1]) > 0.1  # trained: a token that the policy did not choose


def test_C13_every_token_of_a_step_weighs_the_same():
    mask = torch.tensor([[1] + [0] * 14, [1] * 15])
    log_probs = torch.zeros(2, 15, requires_grad=True)
    old = ((log_probs * mask).sum(1) / mask.sum(1)).mean()  # each answer's mean, then the mean of those
    (weights,) = torch.autograd.grad(old, log_probs)
    assert float(weights[0, 0] / weights[1, 0]) == pytest.approx(15)
    advantages = torch.ones(2, 15)
    loss = policy_loss_sum(log_probs, log_probs.detach(), advantages, mask, 0.2).loss_sum / mask.sum()
    (weights,) = torch.autograd.grad(loss, log_probs)
    assert weights[mask == 1].unique().tolist() == [pytest.approx(-1 / 16)]


class OldRewardModel:
    """Scores through the buffers ``mean`` and ``std``; each evaluation ends by storing what it has just seen."""

    mean, std = 0.0, 1.0

    def evaluate(self, raw):
        seen = (raw - self.mean) / self.std
        self.mean, self.std = seen.mean(), seen.std(correction=0)


def test_C09_A51_statistics_are_of_the_raw_scores_however_often_they_are_measured():
    chosen, rejected = torch.randn(50).double() + 32, torch.randn(50).double() + 28
    both, old = torch.cat([chosen, rejected]), OldRewardModel()
    old.evaluate(both)
    once = old.mean
    old.evaluate(both)  # after a second epoch
    assert once > 29 and abs(old.mean) < 1e-9
    assert ((chosen - old.mean) / old.std).mean() > 25  # "normalised" rewards are the raw ones again
    pairs = PairScores(chosen, rejected, chosen, rejected)
    first, second = pairs.chosen_stats(), pairs.chosen_stats()
    assert first == second == RewardStats(float(chosen.mean()), float(chosen.std(correction=0)), 50)
    torch.testing.assert_close(first.normalize(chosen).mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    # With both sides pooled the deviation is the gap between them, and chosen answers do not differ any more.
    pooled = RewardStats(float(both.mean()), float(both.std(correction=0)), 100)
    assert pooled.normalize(chosen).std() < 0.6 < first.normalize(chosen).std()


def test_C24_A48_weights_that_do_not_fit_are_refused(tmp_path):
    wrong = {f"module.{name}": tensor for name, tensor in tiny_llama(57, seed=1).state_dict().items()}
    old = tiny_llama(57)
    before = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    old.load_state_dict(wrong, strict=False)  # says nothing, loads nothing
    assert all(torch.equal(before[name], tensor) for name, tensor in old.state_dict().items())
    save_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(wrong, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match="missing weights.*unexpected weights module"):
        load_causal_lm(str(tmp_path / "model"), word_tokenizer(), notice=str)


def test_C18_the_critics_adapters_are_merged_when_it_is_saved(tmp_path):
    save_model(tmp_path / "base", tiny_llama(57))
    model = RewardModel.from_causal_lm(str(tmp_path / "base"), word_tokenizer(), seed=1, notice=str)
    plain = RewardModel.from_causal_lm(str(tmp_path / "base"), word_tokenizer(), seed=1, notice=str)
    convert_linear_layer_to_lora(model.model, ["q_proj", "v_proj"], rank=4, alpha=16, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.3)
    ids, mask = torch.randint(4, 57, (4, 7)), torch.ones(4, 7, dtype=torch.long)
    tuned = model(ids, mask).scores
    untuned = plain(ids, mask).scores
    plain.load_state_dict(model.state_dict(), strict=False)  # the old way back: names do not match and are dropped
    torch.testing.assert_close(plain(ids, mask).scores, untuned)
    assert (tuned - untuned).abs().max() > 1e-3
    save_trained(tmp_path / "rm", model, model.state_dict(), word_tokenizer(), "")
    again = RewardModel.from_pretrained(str(tmp_path / "rm"), None, notice=str)
    torch.testing.assert_close(again(ids, mask).scores, tuned)


def test_C23_the_last_batch_is_trained_and_a_small_data_set_does_not_vanish():
    rows = [{"prompt_ids": [1, 2], "record": str(i)} for i in range(5)]
    for batch, old_steps in ((8, 0), (4, 1)):
        old = torch.utils.data.DataLoader(rows, batch_size=batch, drop_last=True)
        assert len(old) == old_steps
        loader = StepLoader(rows, lambda items, real: [item["record"] for item in items[:real]], micro_batch_size=batch,
                            micro_batches_per_step=1, rank=0, world_size=1, seed=0)  # fmt: skip
        seen = [record for step in loader.epoch(0) for micro in step for record in micro]
        assert sorted(seen) == list("01234") and loader.steps_per_epoch == old_steps + 1


@pytest.mark.parametrize("count", [20, 60, 1000])
def test_C22_nothing_that_is_evaluated_is_trained(count):
    old_trained, old_evaluated = set(range(count)), set(range(int(0.01 * count)))
    shared = old_trained & old_evaluated
    assert shared if count >= 100 else not old_evaluated  # below 100 records there were none, and a division by it
    for step in (1, 2, 3):
        trained, evaluated = split_rows(count, (2, 4, 4), step, 1234, hold_out=True)
        assert evaluated and not set(trained) & set(evaluated)


def test_C05_a_padding_token_that_is_added_gets_an_embedding(tmp_path):
    tokenizer = word_tokenizer()
    model = tiny_llama(len(tokenizer))
    save_model(tmp_path, model, tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    padded = torch.tensor([[tokenizer.pad_token_id, 1, 5]])
    with pytest.raises(IndexError):  # the old embeddings have no such row
        model(padded)
    grown = load_causal_lm(str(tmp_path), tokenizer, notice=str)
    assert grown(padded).logits.isfinite().all() and grown.config.vocab_size == len(tokenizer)


def test_C02_no_token_of_its_own_between_the_answer_and_its_end(tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    plain = tokenizer("yes", add_special_tokens=False)["input_ids"]
    old = tokenizer("yes ", add_special_tokens=False)["input_ids"]  # the answer, a blank, and then the EOS's id
    assert len(old) == len(plain) + 1  # a blank that the policy has to learn before it may end
    answer = TextEncoder(tokenizer).answer_ids([U("why")], "yes")
    assert answer[-1] == tokenizer.eos_token_id and len(answer) == len(plain) + 1


def test_C03_A60_a_long_prompt_still_ends_in_the_assistants_marker():
    encoder = TextEncoder(word_tokenizer())
    turns = (U(words(4)), A("yes"), U("why"))
    old = encoder.prompt_ids(turns)[:12]  # cut on the right
    marker = encoder.prompt_ids([U("why")])[-2:]
    assert old[-2:] != marker
    assert only(replace(talk(5), prompt=turns), 3, encoder, 12).item["prompt_ids"].tolist()[-2:] == marker


def test_A46_the_learning_rate_reaches_its_end_in_every_number_of_epochs():
    epochs, steps_per_epoch = 2, 10
    total = epochs * steps_per_epoch
    old = rate_factor("cosine", 0, total * epochs)  # the epochs are counted twice
    ours = rate_factor("cosine", 0, total)
    assert old(total - 1) > 0.5 and ours(total - 1) < 0.01


def test_A58_a_rollout_has_as_many_prompts_as_was_asked_for():
    """``rollout // world * micro`` for ``rollout // (world * micro)``: right for micro-batches of one alone."""
    for rollout, world, micro in itertools.product((8, 32), (1, 2), (1, 2, 4)):
        flags = "--actor_model_name_or_path a --critic_model_name_or_path c --per_device_train_batch_size".split()
        args = parse_step3([*flags, str(micro), "--generation_batches", str(rollout // (world * micro))])
        old = rollout // world * micro * world
        assert (old == rollout) is (micro == 1)
        assert args.rollout_size(world) == rollout and plan(args, 5 * rollout, world)[0] == 5

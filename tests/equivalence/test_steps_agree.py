"""One text has one log-prob, one score and one value: PPO's record of an answer equals what a naive loop over the saved
models says of it, and what steps 1 and 2 make of the same tokens. With dropout too: a record is made without it."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.algorithms.losses import sft_loss_sum
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_pairs, collate_sft
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import read_reward_stats
from tests.equivalence.comparison import assert_equal_tensors
from tests.equivalence.runs import Runs

EOS, LIMIT = 2, 8
# The critic's head is divided by the deviation of the scores, here about 0.1: its values carry ten times the rounding
# of the hidden states.
VALUES_TOLERANCE = 5e-6


@dataclass(frozen=True)
class Answer:
    """One row of a rollout as the tokens say it, whatever its masks say."""

    row: int
    prompt: list[int]
    response: list[int]  # up to and including the first EOS

    @property
    def judged(self) -> list[int]:
        """What a reward model sees: an unfinished answer gets an EOS."""
        return self.prompt + self.response + ([] if self.response[-1] == EOS else [EOS])


@dataclass(frozen=True)
class Recorded:
    """What PPO wrote down of its first rollout, before anything was trained, and of its second."""

    kind: str
    first: Experience
    second: Experience


@pytest.fixture(scope="module", params=["llama", "dropout"])
def recorded(runs: Runs, request) -> Recorded:
    caught: list[Experience] = []
    generate = DeepSpeedPPOTrainer.generate_experience

    def watched(self, batches):
        rollout = generate(self, batches)
        caught.append(rollout.experience)
        return rollout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedPPOTrainer, "generate_experience", watched)
        given = {"max_steps": 2, "no_whiten_advantages": True, "num_train_epochs": 2}
        runs.run(3, request.param, under="caught", **given)
    return Recorded(request.param, *caught)


def answers_of(experience: Experience) -> list[Answer]:
    return [answer(experience, row) for row in range(len(experience))]


def answer(experience: Experience, row: int) -> Answer:
    width = experience.prompt_length
    ids = experience.sequences[row].tolist()
    prompt = [token for token in ids[:width] if token != 0]  # the tokenizer's <pad> is no word
    response = ids[width:]
    if EOS in response:
        response = response[: response.index(EOS) + 1]
    return Answer(row, prompt, response)


@torch.no_grad()
def naive_log_probs(model, answer: Answer, vocabulary: int) -> Tensor:
    """One row, no padding, no mask, a whole log-softmax."""
    logits = model(torch.tensor([answer.prompt + answer.response])).logits[0, :, :vocabulary].log_softmax(-1)
    start = len(answer.prompt)
    return torch.stack([logits[start + t - 1, token] for t, token in enumerate(answer.response)])


def tokens_of(experience: Experience, field: str, answers: list[Answer]) -> Tensor:
    """The entries of a (B, R) field at the answers' tokens, one answer after the other."""
    return torch.cat([getattr(experience, field)[one.row, : len(one.response)] for one in answers])


def test_log_probs(runs: Runs, recorded: Recorded):
    kind, experience, answers = recorded.kind, recorded.first, answers_of(recorded.first)
    ended = [one.response[-1] == EOS for one in answers]
    assert any(ended) and not all(ended) and len({len(one.response) for one in answers}) > 3, "answers of one kind only"
    assert all(end or len(one.response) == LIMIT for one, end in zip(answers, ended, strict=True))
    assert experience.response_mask.sum(1).tolist() == [len(one.response) for one in answers]

    path = str(runs.world(kind) / "actor")
    tokenizer = load_tokenizer(path, notice=print)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    expected = torch.cat([naive_log_probs(model, one, len(tokenizer)) for one in answers])
    found = {name: tokens_of(experience, name, answers) for name in ("old_log_probs", "ref_log_probs")}
    assert_equal_tensors(f"{kind}, log-probs of PPO and of a loop", dict.fromkeys(found, expected), found)

    items = [
        {"input_ids": one.prompt + one.response, "trained": [0] * len(one.prompt) + [1] * len(one.response)}
        for one in answers
    ]
    batch = collate_sft(items, len(items), pad_id=0)
    mask = batch["response_mask"][:, 1:]
    module = CausalLM(load_causal_lm(path, tokenizer, notice=print), vocabulary_limit=len(tokenizer))
    with torch.no_grad():
        loss = sft_loss_sum(module(batch["input_ids"], batch["attention_mask"], mask).log_probs, mask) / mask.sum()
    assert_equal_tensors(f"{kind}, loss of step 1 on PPO's answers", {"loss": -expected.mean()}, {"loss": loss})


def test_scores_and_values(runs: Runs, recorded: Recorded):
    kind, experience, answers = recorded.kind, recorded.first, answers_of(recorded.first)
    path = str(runs.world(kind) / "critic")
    stats = read_reward_stats(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        scores = torch.stack([model(torch.tensor([one.judged])).logits[0, 0] for one in answers])
        values = [naive_values(model, one) for one in answers]
    assert_equal_tensors(f"{kind}, scores of PPO and of a loop", {"scores": scores}, {"scores": experience.scores})
    # Each action's value is read where the model has seen everything before the action and not the action itself.
    before = torch.cat([row[len(one.prompt) - 1 : -1] for row, one in zip(values, answers, strict=True)])
    expected = {"values": (before - stats.mean) / stats.std}
    found = {"values": tokens_of(experience, "values", answers)}
    assert_equal_tensors(f"{kind}, values of PPO and of a loop", expected, found, VALUES_TOLERANCE)

    pairs = [{"chosen_ids": one.judged, "rejected_ids": one.prompt + [EOS, 5], "margin": 0.0} for one in answers]
    batch = collate_pairs(pairs, len(pairs), pad_id=0)
    module = RewardModel.from_pretrained(path, load_tokenizer(path, notice=print), notice=print)
    with torch.no_grad():
        chosen = module(batch["input_ids"], batch["attention_mask"], batch["divergence"]).chosen_scores
    assert_equal_tensors(f"{kind}, scores of step 2 on PPO's answers", {"scores": scores}, {"scores": chosen})


def naive_values(model, one: Answer) -> Tensor:
    """The head on every hidden state of one row without padding."""
    hidden = model.base_model(torch.tensor([one.prompt + one.response])).last_hidden_state[0]
    return model.score(hidden)[:, 0]


def test_rewards_advantages_and_returns(runs: Runs, recorded: Recorded):
    """The whole of the shaping for one answer at a time, in float64: score at the last token, KL, lambda 0.95."""
    kind, experience, answers = recorded.kind, recorded.second, answers_of(recorded.second)
    moved = tokens_of(experience, "old_log_probs", answers) - tokens_of(experience, "ref_log_probs", answers)
    assert float(moved.abs().max()) > 0.1, "a KL to speak of"
    stats = read_reward_stats(str(runs.world(kind) / "critic"))
    expected: dict[str, list[Tensor]] = {"rewards": [], "advantages": [], "returns": []}
    for one in answers:
        take = partial(tokens_of, experience, answers=[one])
        kl = (take("old_log_probs").double() - take("ref_log_probs").double()) * 0.05
        score = (experience.scores[one.row].double() - stats.mean) / stats.std
        values, length = take("values").double().tolist(), len(one.response)
        rewards = [-float(kl[t]) + (float(score.clamp(-5, 5)) if t == length - 1 else 0.0) for t in range(length)]
        advantages = [
            sum(
                0.95 ** (k - t) * (rewards[k] + (values[k + 1] if k + 1 < length else 0.0) - values[k])
                for k in range(t, length)
            )
            for t in range(length)
        ]
        expected["rewards"].append(torch.tensor(rewards))
        expected["advantages"].append(torch.tensor(advantages))
        expected["returns"].append(torch.tensor([a + v for a, v in zip(advantages, values, strict=True)]))
    naive = {name: torch.cat(rows) for name, rows in expected.items()}
    found = {name: tokens_of(experience, name, answers) for name in naive}
    assert_equal_tensors(f"{kind}, rewards, advantages and returns of PPO and of a loop", naive, found)

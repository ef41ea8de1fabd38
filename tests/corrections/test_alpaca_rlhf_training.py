"""What alpaca-rlhf corrected in DeepSpeed-Chat's adapters, reward model and PPO, and what it left as it was.

As in test_alpaca_rlhf_text.py: ``old_…`` is the behaviour of then, written down from its description.
"""

import pytest
import torch
import torch.nn.functional as F

from alpaca_rlhf.algorithms.advantages import gae
from alpaca_rlhf.algorithms.kl import kl_estimate
from alpaca_rlhf.algorithms.losses import pairwise_loss_sum, policy_loss_sum
from alpaca_rlhf.algorithms.masking import first_eos_mask
from alpaca_rlhf.algorithms.rewards import RewardStats, shape_rewards
from alpaca_rlhf.arguments.deepspeed_chat import parse_step1
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning.pairs import PairScores
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import linear_layers
from tests.tiny import save_model, tiny_llama, word_tokenizer

EOS, PAD = 2, 0
SEED_MEAN, SEED_STD = -0.8677118420600891, 0.2210693359375  # of the author's one experiment, written into the code


def old_lora_layers(model, names: str) -> list[str]:
    """Any listed part that is found anywhere in a layer's name; the list is cut at commas and not stripped."""
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in layers if any(part in name for part in names.split(","))]


def test_B08_module_names_are_whole_parts_of_a_stripped_list():
    model = tiny_llama(64)

    def ours(names):
        flags = ["--model_name_or_path", "m", "--lora_dim", "8", "--lora_module_name", names]
        return linear_layers(model, parse_step1(flags).model.lora_module_names)

    assert len(ours("q_proj,k_proj")) == len(old_lora_layers(model, "q_proj,k_proj")) == 4
    assert len(old_lora_layers(model, "q_proj,k_proj,")) == 15 and len(ours("q_proj,k_proj,")) == 4
    assert len(old_lora_layers(model, "q_proj, k_proj")) == 2 and len(ours("q_proj, k_proj")) == 4
    assert len(old_lora_layers(model, "v")) == 2 and len(old_lora_layers(model, "decoder.layers.")) == 0
    for names in ("v", "decoder.layers."):  # a piece of a name; OPT's default on LLaMA, which adapted nothing
        with pytest.raises(UserError, match="matches no linear layer"):
            ours(names)


@pytest.mark.parametrize("gap", [-1e4, -200.0])
def test_B10_the_loss_of_a_pair_that_is_far_wrong_is_finite_and_teaches(gap):
    chosen = torch.tensor([gap], requires_grad=True)
    old = -torch.log(torch.sigmoid(chosen - 0.0))
    old.sum().backward()
    assert not old.isfinite().all() and not chosen.grad.isfinite().all()
    chosen.grad = None
    loss = pairwise_loss_sum(chosen, torch.zeros(1), 0.0, torch.ones(1))
    loss.backward()
    assert loss.item() == -gap and chosen.grad.item() == -1.0
    assert pairwise_loss_sum(-chosen.detach(), torch.zeros(1), 0.0, torch.ones(1)).item() == 0.0


def old_normalized(scores):
    return (scores - SEED_MEAN) / SEED_STD


def test_B14_scores_are_normalised_by_the_statistics_of_their_own_model():
    # The formula is the seed's, so its constants give its numbers.
    seed = RewardStats(SEED_MEAN, SEED_STD, 1)
    torch.testing.assert_close(
        seed.normalize(torch.tensor([SEED_MEAN, -0.6466425061225891])), torch.tensor([0.0, 1.0]), atol=1e-6, rtol=0
    )
    # Another reward model scores elsewhere: with the pasted constants every answer has the same reward, the clip's.
    chosen, rejected = torch.tensor([30.0, 31.0, 29.5, 32.0]).double(), torch.tensor([27.0, 28.0, 29.0, 26.5]).double()
    assert (old_normalized(chosen).clamp(-5, 5) == 5).all() and (old_normalized(rejected).clamp(-5, 5) == 5).all()
    stats = PairScores(chosen, rejected, chosen, rejected).chosen_stats()
    ours = stats.normalize(chosen)
    torch.testing.assert_close(ours.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.std(correction=0), torch.tensor(1.0))
    assert len(set(ours.clamp(-5, 5).tolist())) == 4 and (stats.normalize(rejected) < ours.min()).all()


def old_mask(responses, pad_id):
    """What is not padding counts: where generation is made to fill the limit, that is everything after the end too."""
    return (responses != pad_id).long()


def updates(responses, mask):
    """Loss of PPO's first update, with a critic and a policy whose numbers depend on the tokens they see."""
    seen = responses.float()
    log_probs, ref = -0.1 * seen, -0.1 * seen - 0.05 * seen.cos()
    rewards = shape_rewards(torch.tensor([1.0, 1.0]), kl_estimate(log_probs, ref, "k1"), mask, 0.1)
    advantages, returns = gae(rewards, 0.3 * seen.sin(), mask, 1.0, 0.95)
    return policy_loss_sum(log_probs, log_probs, advantages, mask, 0.2).loss_sum / mask.sum(), returns


def test_B15_nothing_after_the_first_eos_counts_and_no_row_goes():
    one = torch.tensor([[7, 8, EOS, 9, 9, 9], [EOS, 9, 9, 9, 9, 9]])
    other = torch.tensor([[7, 8, EOS, 5, EOS, 6], [EOS, 4, 4, 4, 4, 4]])  # the same answers, other tokens behind them
    ours = [updates(responses, first_eos_mask(responses, [EOS])) for responses in (one, other)]
    assert first_eos_mask(one, [EOS]).sum(1).tolist() == [3, 1]
    torch.testing.assert_close(ours[0][0], ours[1][0])
    torch.testing.assert_close(ours[0][1], ours[1][1])
    old = [updates(responses, old_mask(responses, PAD))[0] for responses in (one, other)]
    assert abs(old[0] - old[1]) > 0.01
    with_eos_as_pad = old_mask(one, EOS)  # the other old way: where the padding is the EOS, no end is ever trained
    assert with_eos_as_pad[:, :3].tolist() == [[1, 1, 0], [0, 1, 1]]
    old_kept = [row for row in first_eos_mask(one, [EOS]) if row.sum() > 1]  # answers of one token were thrown away
    assert len(old_kept) == 1 and len(ours[0][1]) == 2 and ours[0][1][1, 0] != 0


def test_B20_the_values_at_padding_are_not_compared(tmp_path):
    save_model(tmp_path, tiny_llama(64))
    model = RewardModel.from_causal_lm(str(tmp_path), word_tokenizer(), seed=1, notice=str)
    with torch.no_grad():
        model.model.score.weight.mul_(20)
    ids = torch.tensor([[1, 5, 9, EOS, PAD, PAD, PAD], [1, 5, 8, 8, 8, 8, EOS]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1] * 7])

    def losses():
        hidden = model.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        raw = (hidden @ model.model.score.weight.T)[..., 0]
        old = -F.logsigmoid(raw[0, 2:7] - raw[1, 2:7]).mean()  # up to the longer end
        return old, model(ids, mask, divergence=torch.tensor([2]), loss="per_token").loss_sum

    before = losses()
    with torch.no_grad():
        model.model.get_input_embeddings().weight[PAD] = torch.linspace(-5, 5, 16)
    after = losses()
    assert abs(after[0] - before[0]) > 0.01
    torch.testing.assert_close(after[1], before[1])


def test_B23_no_penalty_on_padding_flows_back_into_the_answer():
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]])
    values, scores = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.2, 0.2]]), torch.tensor([1.0])

    def old(kl):
        """The penalty is on every column; values are zeroed off the mask, the recursion runs over the whole width."""
        rewards = -0.02 * kl
        rewards[0, 2] += scores[0]
        following, advantages, kept = 0.0, [], values * mask
        for t in reversed(range(6)):
            delta = rewards[0, t] + (kept[0, t + 1] if t < 5 else 0.0) - kept[0, t]
            following = delta + 0.95 * following
            advantages.append(following)
        return torch.stack(advantages[::-1])[:3]

    def ours(kl):
        return gae(shape_rewards(scores, kl, mask, 0.02), values, mask, 1.0, 0.95)[0][0, :3]

    quiet, loud = torch.full((1, 6), 0.1), torch.tensor([[0.1, 0.1, 0.1, 30.0, 30.0, 30.0]])
    assert (old(quiet) - old(loud)).abs().min() > 0.5
    assert torch.equal(ours(quiet), ours(loud))


def test_B25_the_critic_starts_on_the_scale_of_the_rewards(tmp_path):
    save_model(tmp_path, tiny_llama(64))
    model = RewardModel.from_causal_lm(str(tmp_path), word_tokenizer(), seed=3, notice=str)
    with torch.no_grad():
        model.model.score.weight.mul_(30)
    ids, mask = torch.randint(4, 57, (8, 9)), torch.ones(8, 9, dtype=torch.long)
    raw = model(ids, mask).scores.detach()
    stats = RewardStats(float(raw.mean()) - 12.0, 0.25 * float(raw.std(correction=0)), 8)
    rewards = stats.normalize(raw)
    old_values = raw  # the critic is the reward model as it was saved, the reward is normalised
    model.fold_normalization(stats.mean, stats.std)
    values = model(ids, mask).scores.detach()
    torch.testing.assert_close(values, rewards)
    assert (old_values - rewards).abs().mean() > 4  # what its first updates would have to unlearn

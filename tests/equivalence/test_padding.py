"""More padding, on either side, changes no log-prob, score, value, loss or gradient, and no run.

GPT-2 has learned absolute positions and would notice a position counted over padding; LLaMA's are relative.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.algorithms.losses import sft_loss_sum
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3
from alpaca_rlhf.deepspeed_chat.training.utils.data import collators
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF
from alpaca_rlhf.deepspeed_chat.training.utils.model import causal_lm
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from tests.equivalence.comparison import assert_equal_runs, assert_equal_tensors
from tests.equivalence.runs import Runs

LENGTHS = (9, 4, 12, 6, 7, 10, 5, 11)  # as pairs: the first four are chosen, the others rejected
PROMPT = 3
SIDES = [(0, 5), (5, 0), (3, 4), (None, 0), (None, 5)]  # columns more on the left and right; None: all on the left


def rows() -> list[list[int]]:
    """Unequal sequences; each pair shares its prompt."""
    chance = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 50, (PROMPT,), generator=chance).tolist() for _ in range(4)] * 2
    return [
        prompt + torch.randint(4, 50, (length - PROMPT,), generator=chance).tolist()
        for prompt, length in zip(prompts, LENGTHS, strict=True)
    ]


def padded(left: int | None, right: int, value: list[list[int]] | None = None) -> Tensor:
    """The rows one below the other, padded by so many columns more than the longest needs; None: all on the left."""
    given, width = value or rows(), max(LENGTHS)
    spare = [width - len(row) for row in given]
    if left is None:
        return torch.tensor([[0] * (right + free) + row for row, free in zip(given, spare, strict=True)])
    return torch.tensor([[0] * left + row + [0] * (right + free) for row, free in zip(given, spare, strict=True)])


def batch(left: int | None, right: int) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, attention_mask and response_mask of the rows."""
    attended = padded(left, right, [[1] * length for length in LENGTHS])
    trained = padded(left, right, [[0] * PROMPT + [1] * (length - PROMPT) for length in LENGTHS])
    return padded(left, right), attended, trained


def gradients(module: torch.nn.Module, loss: Tensor) -> Tensor:
    module.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def policy(runs: Runs, kind: str, left: int | None, right: int) -> dict[str, Tensor]:
    """Log-probs and entropies of the rows' own tokens, the loss of step 1 and its gradient."""
    path = str(runs.world(kind) / "actor")
    module = causal_lm.CausalLM(load_causal_lm(path, load_tokenizer(path, notice=print), notice=print))
    ids, attended, trained = batch(left, right)
    mask = trained[:, 1:]
    scores = module(ids, attended, mask, with_entropy=True)
    real = mask.bool()
    loss = sft_loss_sum(scores.log_probs, mask) / real.sum()
    assert float(scores.log_probs[~real].abs().sum()) == 0
    found = {"log_probs": scores.log_probs[real], "entropy": scores.entropy[real], "loss": loss}
    return {name: tensor.detach() for name, tensor in found.items()} | {"gradient": gradients(module, loss)}


def reward(runs: Runs, kind: str, left: int | None, right: int, pair_loss: str) -> dict[str, Tensor]:
    """Scores of the rows, values of their own tokens, the loss of step 2 and its gradient."""
    path = str(runs.world(kind) / "critic")
    module = RewardModel.from_pretrained(path, load_tokenizer(path, notice=print), notice=print)
    ids, attended, _ = batch(left, right)
    values = module.forward_value(ids, attended)
    loss = module(ids, attended, torch.full((4,), PROMPT), loss=pair_loss).loss_sum / 4
    found = {"scores": values.scores, "values": values.values[attended.bool()], "loss": loss}
    return {name: tensor.detach() for name, tensor in found.items()} | {"gradient": gradients(module, loss)}


@pytest.mark.parametrize("left,right", SIDES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_policy(runs: Runs, kind, left, right):
    row = f"{kind}, policy, padding {'all' if left is None else left} left, {right} more right"
    assert_equal_tensors(row, policy(runs, kind, 0, 0), policy(runs, kind, left, right))


@pytest.mark.parametrize("left,right", SIDES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_reward_model(runs: Runs, kind, left, right):
    row = f"{kind}, reward model, padding {'all' if left is None else left} left, {right} more right"
    assert_equal_tensors(row, reward(runs, kind, 0, 0, "end"), reward(runs, kind, left, right, "end"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_reward_model_per_token(runs: Runs, kind):
    """This loss compares position by position: it is defined for padding on the right."""
    row = f"{kind}, reward model, loss per token, 5 more right"
    assert_equal_tensors(row, reward(runs, kind, 0, 0, "per_token"), reward(runs, kind, 0, 5, "per_token"))


def test_a_policy_that_counts_padding_is_seen(runs: Runs, monkeypatch):
    """The twin: positions of the columns instead of the tokens."""
    monkeypatch.setattr(causal_lm, "position_ids", lambda mask: torch.arange(mask.shape[1]).expand_as(mask))
    with pytest.raises(AssertionError, match="log_probs"):
        assert_equal_tensors("twin", policy(runs, "gpt2", 0, 0), policy(runs, "gpt2", 5, 0))
    assert_equal_tensors("LLaMA does not notice", policy(runs, "llama", 0, 0), policy(runs, "llama", 5, 0))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_run_of_wider_batches(runs: Runs, monkeypatch, step, kind, side):
    pad = collators._pad

    def wider(given, value, width=None, left=False):
        return pad(given, value, max(len(row) for row in given) + 5, left=side == "left")

    reference = runs.run(step, kind)
    monkeypatch.setattr(collators, "_pad", wider)
    row = f"step {step}, {kind}, all batches 5 columns wider, padded {side}"
    assert_equal_runs(row, reference, runs.run(step, kind, under=f"wider_{side}"))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_run_of_wider_prompts_and_answers(runs: Runs, monkeypatch, kind):
    """Every prompt as wide as the limit when it is sampled from; minibatches wider still, on both sides."""
    reference = runs.run(3, kind)
    monkeypatch.setattr(step3, "DataCollatorRLHF", lambda pad_id: DataCollatorRLHF(pad_id, pad_to=24))
    monkeypatch.setattr(Experience, "trim", wider_experience)
    row = f"step 3, {kind}, prompts padded to the limit, minibatches 3 + 4 columns wider"
    assert_equal_runs(row, reference, runs.run(3, kind, under="wider"))


def wider_experience(experience: Experience) -> Experience:
    """In place of ``trim``: 3 columns of padding more before the prompts, 4 more behind the answers."""
    fields = {name: getattr(experience, name) for name in ("sequences", "attention_mask")}
    names = ("response_mask", "old_log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns")
    wide = {name: F.pad(tensor, (3, 4)) for name, tensor in fields.items()}
    wide |= {name: F.pad(getattr(experience, name), (0, 4)) for name in names}
    return replace(experience, prompt_length=experience.prompt_length + 3, **wide)

"""Every answer of a very small policy: exact expectations, values and the KL-regularised optimum.

A policy over V tokens (the end among them) that may say at most R of them has finitely many answers. Their
log-probabilities come from the roles of step 3 themselves; everything after that is float64.

Shapes: Q prompts, N answers, R tokens of the longest answer, M nodes (an answer or the beginning of one).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.roles import Sequences

ROUNDING = 1e-4  # of sums of probabilities and figures that come from float32 log-probs


class AnswerTree:
    """All answers to a few prompts: those that end in EOS, and those that are cut at the limit."""

    def __init__(self, prompts: Sequence[Sequence[int]], tokens: int, eos_id: int, pad_id: int, limit: int) -> None:
        """``prompts``: their ids. ``tokens``: ids 0 … tokens − 1 are sampled. ``limit``: most tokens of an answer."""
        others = [token for token in range(tokens) if token != eos_id]
        ended = [(*word, eos_id) for length in range(limit) for word in product(others, repeat=length)]
        self.answers = [*ended, *product(others, repeat=limit)]
        beginnings = {answer[:length] for answer in self.answers for length in range(len(answer) + 1)}
        self.node = {beginning: number for number, beginning in enumerate(sorted(beginnings))}
        self.prompts = [tuple(prompt) for prompt in prompts]
        lengths = torch.tensor([len(answer) for answer in self.answers])
        self.mask = (torch.arange(limit) < lengths[:, None]).long()  # (N, R)
        self.ids = torch.tensor([[*answer, *[pad_id] * (limit - len(answer))] for answer in self.answers])
        # node before and after each action; off the mask both are the whole answer
        self.before, self.after = (
            torch.tensor([[self.node[answer[: t + shift]] for t in range(limit)] for answer in self.answers])
            for shift in (0, 1)
        )
        self.pad_id = pad_id

    def sequences(self) -> Sequences:
        """Every prompt with every answer, (Q · N, S), prompt after prompt, as a rollout would hold them."""
        width, count = max(map(len, self.prompts)), len(self.answers)
        padded = [[*[self.pad_id] * (width - len(prompt)), *prompt] for prompt in self.prompts]
        real = [[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in self.prompts]
        prompt_ids, prompt_mask = (torch.tensor(rows).repeat_interleave(count, 0) for rows in (padded, real))
        ids, mask = (part.repeat(len(self.prompts), 1) for part in (self.ids, self.mask))
        return Sequences(torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1), mask, width)

    def log_probs(self, score: Callable[[Sequences], Tensor]) -> Tensor:
        """(Q, N, R) float64 of every action, from a role's way of scoring ``Sequences``.

        Raises:
            AssertionError: the probabilities of all answers to a prompt do not add up to 1.
        """
        flat = score(self.sequences()).double()
        log_probs = flat.view(len(self.prompts), len(self.answers), -1) * self.mask
        total = log_probs.sum(-1).exp().sum(-1)
        assert bool((total - 1).abs().max() < ROUNDING), f"the answers to each prompt have the probabilities {total}"
        return log_probs

    def nodes(self, rows: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Of a rollout's rows: the prompt's number (B,), the node before and the node after each action (B, R).

        Off ``response_mask`` both nodes are the whole answer.
        """
        prompts, paths = [], []
        for ids, attended, counted in zip(rows.ids, rows.attention_mask, rows.response_mask, strict=True):
            prompt = ids[: rows.prompt_length][attended[: rows.prompt_length].bool()]
            answer = tuple(ids[rows.prompt_length :][counted.bool()].tolist())
            prompts.append(self.prompts.index(tuple(prompt.tolist())))
            paths.append([self.node[answer[:length]] for length in range(len(counted) + 1)])
        path = torch.tensor(paths)
        return torch.tensor(prompts), path[:, :-1], path[:, 1:]


@dataclass(frozen=True)
class Problem:
    """Maximise J(π) = E[score] − β KL(π ‖ reference), the mean over prompts that are equally likely."""

    tree: AnswerTree
    ref_log_probs: Tensor  # (Q, N, R)
    scores: Tensor  # (Q, N)
    beta: float

    def objective(self, log_probs: Tensor) -> float:
        """J of the policy with these log-probs (Q, N, R)."""
        return float(self.expected(log_probs).reward.mean())

    def optimum(self) -> float:
        """Largest J of any policy: β log Z with Z = Σ π_ref exp(score / β), the mean over prompts.

        It is reached by π* = π_ref exp(score / β) / Z alone (arXiv 1909.08593 section 2.2 names the objective;
        arXiv 2305.18290 eq. 4 the solution).
        """
        return float(self.beta * self._unnormalized().logsumexp(-1).mean())

    def optimal_log_probs(self) -> Tensor:
        """log π* (Q, N) of whole answers."""
        return self._unnormalized().log_softmax(-1)

    def expected(self, log_probs: Tensor) -> "Expected":
        """Exact means and variances of what step 3 samples, and the value of every state."""
        probability = log_probs.sum(-1).exp()  # (Q, N)
        mask = self.tree.mask
        kl = (log_probs - self.ref_log_probs) * mask
        to_go = self.scores[..., None] - self.beta * kl.flip(-1).cumsum(-1).flip(-1)  # (Q, N, R): return from t on

        def by_node(place: Tensor, returns: Tensor) -> Tensor:
            return _by_node(place, mask, probability, returns, len(self.tree.node))

        nodes = (self.tree.before, self.tree.after)
        means = [by_node(place, to_go) for place in nodes]
        variances = [by_node(place, to_go.square()) - mean.square() for place, mean in zip(nodes, means, strict=True)]
        moments = [_moments(probability, x) for x in (self.scores, kl.sum(-1), to_go[..., 0])]
        of_answers = [moment[part] for part in (0, 1) for moment in moments]
        return Expected(*of_answers, *means, *(variance.clamp(min=0) for variance in variances))  # rounding: -1e-17

    def _unnormalized(self) -> Tensor:
        return self.ref_log_probs.sum(-1) + self.scores / self.beta


@dataclass(frozen=True)
class Expected:
    """Means and variances (Q,) over the answers to each prompt; values (Q, M) by node."""

    score: Tensor
    kl: Tensor
    reward: Tensor  # score − β KL: its mean over the prompts is J
    score_variance: Tensor
    kl_variance: Tensor
    reward_variance: Tensor
    values: Tensor  # of the state at a node, before the next action
    action_values: Tensor  # of the action that leads to a node
    state_variances: Tensor  # of the return from that state on
    action_variances: Tensor  # of the return from that action on


def _by_node(nodes: Tensor, mask: Tensor, probability: Tensor, returns: Tensor, count: int) -> Tensor:
    """(Q, M): the mean of ``returns`` (Q, N, R) over the answers that pass each node, weighed by their probability."""
    real = mask.bool()
    weight = probability[..., None].expand_as(returns)[:, real]
    total = torch.zeros(len(returns), count, dtype=torch.float64)
    place = nodes[real].expand(len(returns), -1)
    mass = total.scatter_add(1, place, weight)
    return total.scatter_add(1, place, weight * returns[:, real]) / mass  # NaN where no action starts or ends


def _moments(probability: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    mean = (probability * x).sum(-1)
    return mean, (probability * (x - mean[:, None]).square()).sum(-1)

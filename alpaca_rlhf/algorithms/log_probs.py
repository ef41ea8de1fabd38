"""Log-probabilities of chosen tokens without ever holding a (B, S, V) tensor."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Project = Callable[[Tensor], Tensor]


def selected_log_probs(
    hidden: Tensor,
    targets: Tensor,
    project: Project,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    max_elements: int = 2**24,
    vocabulary_limit: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (nats) of each target under ``softmax(project(hidden) / temperature)``, in pieces.

    The naive version, which this equals in value and in gradient::

        logits = project(hidden).float()[:, :vocabulary_limit] / temperature      # (N, V)
        log_probs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)

    Only ``max_elements`` logits exist at once. When a gradient may be asked for and more than one piece is needed, a
    piece keeps no logits for the backward pass but computes them again there. With no token at all (N = 0) ``project``
    still runs once, so that its parameters get a zero gradient rather than none.

    Args:
        hidden: (N, H) hidden states at the positions that predict the targets.
        targets: (N,) int64 token ids.
        project: (n, H) → (n, V) logits, row by row independent. It is called once with one row (to learn V), once per
            piece, and once more per piece in a backward pass that computes again. The number of calls depends on N, so
            it must not communicate between ranks: gather a sharded weight before, not inside.
        temperature: what the logits are divided by; the policy is the tempered distribution.
        with_entropy: also return the entropy of the whole distribution, for logging, without a gradient.
        max_elements: upper bound of n x V of a piece; one row always goes through.
        vocabulary_limit: ids from here on are no tokens (embeddings padded beyond the tokenizer): they get
            probability 0, as if their logits were -inf. None: all of V.

    Returns:
        log_probs (N,) float32, and entropy (N,) float32 in nats or None.

    Raises:
        ValueError: a temperature or a bound that is not positive, shapes that disagree, a target that is no token.
    """
    if temperature <= 0 or max_elements <= 0 or (vocabulary_limit is not None and vocabulary_limit <= 0):
        raise ValueError(
            "temperature, max_elements and vocabulary_limit must be positive: "
            f"{temperature}, {max_elements}, {vocabulary_limit}"
        )
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden (N, H) and targets (N,) disagree: {tuple(hidden.shape)}, {tuple(targets.shape)}")
    with torch.no_grad():
        width = project(hidden[:1]).shape[-1]
    limit = width if vocabulary_limit is None else min(width, vocabulary_limit)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < limit:
        raise ValueError(f"targets {int(targets.min())}..{int(targets.max())} are not all in a vocabulary of {limit}")

    rows = max(1, max_elements // width)
    recompute = len(hidden) > rows and torch.is_grad_enabled()
    results = []
    for start in range(0, max(1, len(hidden)), rows):
        piece = slice(start, start + rows)
        arguments = (hidden[piece], targets[piece], project, temperature, with_entropy, limit)
        results.append(checkpoint(_piece, *arguments, use_reentrant=False) if recompute else _piece(*arguments))
    log_probs = torch.cat([result[0] for result in results])
    return log_probs, torch.cat([result[1] for result in results]) if with_entropy else None


def _piece(
    hidden: Tensor, targets: Tensor, project: Project, temperature: float, with_entropy: bool, limit: int
) -> tuple[Tensor, Tensor]:
    """The naive version on one piece: log_probs (n,), and entropy (n,), or (0,) when it is not asked for."""
    logits = project(hidden)[:, :limit].float()
    if temperature != 1.0:
        logits = logits / temperature
    # Cross-entropy fuses log-softmax and gather, which saves one (n, V) tensor and its backward pass.
    log_probs = -F.cross_entropy(logits, targets, reduction="none")
    if not with_entropy:
        return log_probs, log_probs.new_empty(0)
    with torch.no_grad():
        log_softmax = logits.log_softmax(dim=-1)
        # A logit of -inf has p = 0 and log p = -inf; 0 x -inf is 0 here.
        entropy = -torch.where(log_softmax.isneginf(), 0.0, log_softmax.exp() * log_softmax).sum(dim=-1)
    return log_probs, entropy

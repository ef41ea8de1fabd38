"""The reward model and the critic: a scalar for every token, the score at the last one."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from alpaca_rlhf.algorithms.losses import pairwise_loss_sum, per_token_pairwise_loss_sum
from alpaca_rlhf.algorithms.masking import keep, last_token_index
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import last_hidden_state
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import (
    adapter_base,
    check_projection,
    fit_to_tokenizer,
    load_causal_lm,
    load_complete,
    load_config,
    set_dropout,
)
from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import adapters_disabled, is_adapter

Notice = Callable[[str], None]


class FrozenHead(NamedTuple):
    """A head that is not part of a model."""

    weight: Tensor
    """(1, H) float32."""
    bias: Tensor | None
    """(1,) float32."""
    offset: float


class ValueOutput(NamedTuple):
    """What a reward model or critic says about sequences."""

    scores: Tensor
    """(B,) float32: the value at the last attended token."""
    values: Tensor
    """(B, S) float32; 0 at padding."""


class PairOutput(NamedTuple):
    """What a reward model says about pairs."""

    loss_sum: Tensor
    """() float32: the sum of the real pairs' losses."""
    chosen_scores: Tensor
    """(B,) float32."""
    rejected_scores: Tensor
    """(B,) float32."""


def check_reward_model(path: str) -> PreTrainedConfig:
    """Check from its configuration alone that ``path`` can be a reward model; returns the configuration.

    Raises:
        UserError: nothing there, a plain language model, an adapter only, or not exactly one label.
    """
    config = load_config(path)
    names = config.architectures or []
    if adapter_base(path) is not None:
        raise UserError(f"{path} holds an adapter only; give the merged reward model that step 2 saves.")
    if not any(name.endswith("ForSequenceClassification") for name in names):
        kind = names[0] if names else config.model_type
        raise UserError(
            f"{path} is not a reward model ({kind} has no score head: score.weight is missing); step 2 makes a reward "
            "model."
        )
    if config.num_labels != 1:
        raise UserError(f"{path} is a classifier with {config.num_labels} labels; a reward model has one.")
    if not isinstance(getattr(config, "score_offset", 0.0), int | float):
        raise UserError(f"score_offset in the config.json of {path} is {config.score_offset!r}, not a number.")
    return config


class RewardModel(nn.Module):
    """A decoder with a linear head that gives one value per token; the last one is the score of the text.

    ``.model`` is transformers' sequence classifier with one label, so what is saved loads with
    ``AutoModelForSequenceClassification`` and gives the same score. Only a model whose scores were shifted (see
    :meth:`fold_normalization`) differs there, by the constant
    ``config.score_offset``, which transformers does not know.

    The value at a token is ``head(hidden) + base_offset + offset`` in float32, whatever type the weights have.
    ``offset`` is a trainable parameter of shape (1,) (DeepSpeed cannot hold ()) that starts at 0; ``base_offset`` is a
    Python float, so engines that cast the parameters to half precision keep the shift exact.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)  # a loaded model is in evaluation mode: so is its wrapper
        self.base_offset = 0.0
        self.register_parameter("offset", None)
        offset = getattr(model.config, "score_offset", None)
        if offset is not None:
            self._set_offset(float(offset))

    @classmethod
    def from_causal_lm(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        notice: Notice,
        dtype: torch.dtype = torch.float32,
        dropout: float | None = None,
    ) -> "RewardModel":
        """A new reward model: the decoder of a causal language model and a fresh head.

        The head is drawn from a normal distribution with standard deviation 1 / (H + 1) (arXiv 2009.01325, appendix
        B.1), from ``seed`` alone. The other arguments and errors are those of ``load_causal_lm``.
        """
        causal = load_causal_lm(path, tokenizer, notice=notice, dtype=dtype, dropout=dropout)
        backbone, config = causal.base_model, causal.config
        config.num_labels = 1
        try:
            with torch.device("meta"):  # only the head is new; the decoder is moved over
                model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        except ValueError as error:
            raise UserError(f"transformers has no sequence classifier for {path} ({config.model_type}).") from error
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or type(model.base_model) is not type(backbone):
            raise UserError(f"The sequence classifier of {config.model_type} has no linear score head on its decoder.")
        setattr(model, model.base_model_prefix, backbone)
        model.score = nn.Linear(head.in_features, 1, bias=head.bias is not None, dtype=dtype, device="cpu")
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            weight = torch.empty(head.weight.shape).normal_(0.0, 1.0 / (head.in_features + 1), generator=generator)
            model.score.weight.copy_(weight)
            if model.score.bias is not None:
                model.score.bias.zero_()
        check_projection(model.eval(), model.score, path)
        return cls(model)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        notice: Notice,
        dtype: torch.dtype = torch.float32,
        dropout: float | None = None,
    ) -> "RewardModel":
        """A saved reward model with every weight from its files, or a failure: no head is ever made up.

        Args:
            path: a directory or a hub name of a sequence classifier with one label.
            tokenizer: the one whose ids it will be given; None when its configuration is to stay as it is.

        Raises:
            UserError: see :func:`check_reward_model`; missing, unexpected or misshaped weights; a head that is not a
                linear ``score`` on the decoder's last hidden state.
        """
        config = check_reward_model(path)
        if dropout is not None:
            set_dropout(config, dropout, path, notice)
        try:
            model = load_complete(AutoModelForSequenceClassification, path, config, dtype)
        except UserError as error:
            raise UserError(
                f"{error} Nothing but a complete reward model is one; step 2 makes a reward model."
            ) from error
        if tokenizer is not None:
            fit_to_tokenizer(model, tokenizer, path, notice)
        elif config.pad_token_id is None:
            raise UserError(f"The config.json of the reward model {path} names no pad_token_id.")
        check_projection(model, getattr(model, "score", None), path)
        return cls(model)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        divergence: Tensor | None = None,
        margin: Tensor | float = 0.0,
        row_mask: Tensor | None = None,
        loss: str = "end",
        head: FrozenHead | None = None,
    ) -> PairOutput | ValueOutput:
        """The pair loss; without ``divergence`` the same as :meth:`forward_value`, so that an engine can call both.

        Args:
            input_ids: (2B, S), B chosen sequences, then their B rejected ones.
            attention_mask: (2B, S), padded on either side ("per_token": on the right).
            divergence: (B,) first index at which the two sequences differ; used by "per_token".
            margin: (B,) or a number, by how much the chosen score should be higher; used by "end".
            row_mask: (B,), 1 = a real pair; None: all are.
            loss: "end" compares the two scores, "per_token" the values from the first difference on.
            head: see :meth:`forward_value`.
        """
        output = self.forward_value(input_ids, attention_mask, head)
        if divergence is None:
            return output
        chosen, rejected = output.scores.chunk(2)
        real = torch.ones_like(chosen) if row_mask is None else row_mask
        if loss == "end":
            loss_sum = pairwise_loss_sum(chosen, rejected, margin, real)
        elif loss == "per_token":
            loss_sum = per_token_pairwise_loss_sum(
                *output.values.chunk(2), *attention_mask.chunk(2), divergence=divergence, row_mask=real
            )
        else:
            raise ValueError(f'the pair loss is "end" or "per_token", not {loss!r}')
        return PairOutput(loss_sum, chosen, rejected)

    def forward_value(self, input_ids: Tensor, attention_mask: Tensor, head: FrozenHead | None = None) -> ValueOutput:
        """Values of every token, and the score of each sequence.

        Args:
            input_ids: (B, S), padded on either side.
            attention_mask: (B, S), 1 = a real token.
            head: computes the values instead of the model's own head and offset.
        """
        hidden = last_hidden_state(self.model, input_ids, attention_mask)
        if head is not None:
            return _values(hidden, attention_mask, *head)
        offset = self.base_offset if self.offset is None else self.base_offset + self.offset.float()
        return _values(hidden, attention_mask, self.model.score.weight, self.model.score.bias, offset)

    @torch.no_grad()
    def fold_normalization(self, mean: float, std: float) -> None:
        """Change head and offset so that the new score is ``(old score - mean) / std``. Before an engine holds it.

        The critic of PPO so starts on the scale of the normalised rewards. Creates the trainable ``offset``.
        """
        assert std > 0, f"scores cannot be normalised by a standard deviation of {std}"
        for parameter in self.model.score.parameters():
            parameter.div_(std)
        old = self.base_offset + (0.0 if self.offset is None else self.offset.item())
        self._set_offset((old - mean) / std)

    def head_parameters(self) -> list[nn.Parameter]:
        """Head and offset: trained also when the decoder is frozen."""
        return [*self.model.score.parameters(), *([] if self.offset is None else [self.offset])]

    def export_state(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of ``.model`` from that of this wrapper; and set ``config.score_offset``."""
        state = dict(state_dict)
        if self.offset is not None:
            self.model.config.score_offset = self.base_offset + state.pop("offset").item()
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}

    def frozen_head(self) -> "FrozenHead":
        """A copy of head and offset as they are now, for :class:`SharedRewardModel`; before they are normalised."""
        weight, bias = self.model.score.weight.detach(), self.model.score.bias
        offset = self.base_offset + (0.0 if self.offset is None else self.offset.item())
        return FrozenHead(weight.float().clone(), None if bias is None else bias.detach().float().clone(), offset)

    def _set_offset(self, value: float) -> None:
        self.base_offset = value
        self.offset = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=self.model.score.weight.device))


class SharedRewardModel(nn.Module):
    """A reward model that borrows a critic's decoder with the adapters off and has only a head of its own.

    Four roles then need two decoders. The critic is held outside of the module tree: its parameters are not ours.

    Args:
        forward: runs the critic: its engine (so that precision and sharding are the engine's), or the critic itself.
        critic: the module behind ``forward``, with adapters and an otherwise frozen decoder.
        head: :meth:`RewardModel.frozen_head` of the reward model that the critic started from.
    """

    def __init__(self, forward: Callable[..., ValueOutput], critic: RewardModel, head: FrozenHead) -> None:
        super().__init__()
        self._borrowed = (forward, critic)
        self.register_buffer("weight", head.weight, persistent=False)
        self.register_buffer("bias", head.bias, persistent=False)
        self.score_offset = head.offset

    @torch.no_grad()
    def forward_value(self, input_ids: Tensor, attention_mask: Tensor) -> ValueOutput:
        """As :meth:`RewardModel.forward_value`, without a gradient. The critic must be in evaluation mode."""
        forward, critic = self._borrowed
        assert not critic.training, "rewards are recorded in evaluation mode"
        assert not any(p.requires_grad for n, p in critic.model.base_model.named_parameters() if not is_adapter(n)), (
            "the critic's decoder is trained itself: a reward model cannot share it"
        )
        weight, bias = (None if x is None else x.to(input_ids.device) for x in (self.weight, self.bias))
        with adapters_disabled(critic.model):
            return forward(input_ids, attention_mask, head=FrozenHead(weight, bias, self.score_offset))

    forward = forward_value


def _values(
    hidden: Tensor, attention_mask: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor | float
) -> ValueOutput:
    """Head and offset in float32, also under autocast; padding counts as 0, whatever the decoder left there."""
    with _full_precision(hidden):
        kept = keep(hidden, attention_mask.unsqueeze(-1))
        values = F.linear(kept, weight.float(), None if bias is None else bias.float()).squeeze(-1) + offset
        values = keep(values, attention_mask)
    return ValueOutput(values.gather(1, last_token_index(attention_mask).unsqueeze(1)).squeeze(1), values)


def _full_precision(like: Tensor) -> contextlib.AbstractContextManager:
    return torch.autocast(device_type=like.device.type, enabled=False)

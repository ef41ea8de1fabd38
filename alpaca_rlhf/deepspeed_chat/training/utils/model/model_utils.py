"""Language models: loading one completely or not at all, fitting it to its tokenizer, checking its limits."""

import pickle
from collections.abc import Callable, Iterable

import torch
from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import (
    adapter_base,
    check_model_path,
    first_line,
    load_config,
    quiet,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.tokenizers import (
    load_tokenizer,
    tokenizers_agree,
    vocabulary_size,
)

__all__ = [
    "adapter_base", "check_causal_lm", "check_model_path", "check_positions", "check_projection",
    "enable_gradient_checkpointing", "fit_to_tokenizer", "load_causal_lm", "load_complete", "load_config",
    "load_tokenizer", "set_dropout", "tokenizers_agree", "vocabulary_size",
]  # fmt: skip

Notice = Callable[[str], None]

POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def check_causal_lm(path: str) -> PreTrainedConfig:
    """Check from its configuration alone that ``path`` can be a causal language model; returns the configuration.

    Raises:
        UserError: nothing there, a reward model, or a model with an encoder.
    """
    config = load_config(path)
    names = config.architectures or []
    if any(name.endswith("ForSequenceClassification") for name in names):
        raise UserError(
            f"{path} holds a reward model ({names[0]}), not a language model; give the base model or step 1's output."
        )
    if config.is_encoder_decoder:
        raise UserError(f"{path} is an encoder-decoder model ({config.model_type}); only decoders are supported.")
    return config


def load_causal_lm(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    notice: Notice,
    dtype: torch.dtype = torch.float32,
    dropout: float | None = None,
) -> PreTrainedModel:
    """Load a causal language model with every weight, in evaluation mode, on the CPU, fitted to its tokenizer.

    Args:
        path: a directory or a hub name; single or sharded weight files, safetensors or ``.bin``. The directory of a
            LoRA adapter is merged on its base model.
        tokenizer: as :func:`load_tokenizer` gives it. The embeddings grow to its length where they have fewer rows
            (the new rows are the mean of the old ones) and never shrink; BOS, EOS and PAD of the model's configuration
            and generation configuration become the tokenizer's.
        notice: is called with one sentence per change.
        dtype: of the weights; trainable models are held in float32.
        dropout: replaces every dropout probability of the configuration; None keeps them.

    Raises:
        UserError: see :func:`check_causal_lm`; a missing, unexpected or misshaped weight, a missing file, or an
            architecture whose logits are not simply its output layer on its last hidden states.
    """
    config = check_causal_lm(path)
    base = adapter_base(path)
    if dropout is not None:
        set_dropout(config, dropout, path, notice)
    model = load_complete(AutoModelForCausalLM, base or path, config, dtype)
    fit_to_tokenizer(model, tokenizer, path, notice)
    if base is not None:
        model = _merge_adapter(model, path, dtype)
        notice(f"{path} holds an adapter only: it is merged on its base model {base}.")
    _check_generation_config(model.generation_config, path, notice)
    check_projection(model, model.get_output_embeddings(), path)
    return model


def load_complete(auto_class: type, path: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """``auto_class.from_pretrained`` that gives a model with every weight from the files, and no other, or fails.

    Raises:
        UserError: names the missing, unexpected or misshaped keys, or the file that cannot be read.
    """
    try:
        with quiet():
            model, info = auto_class.from_pretrained(
                path, config=config, dtype=dtype, trust_remote_code=False, weights_only=True,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except (OSError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise UserError(f"The model {path} cannot be loaded: {first_line(error)}") from error
    problems = []
    for kind in ("missing", "unexpected", "mismatched"):
        keys = [key if isinstance(key, str) else key[0] for key in info[f"{kind}_keys"]]
        if keys:
            problems.append(f"{kind} weights {_some(keys)}")
    if problems:
        raise UserError(f"The weights of {path} do not fit {type(model).__name__}: {'; '.join(problems)}.")
    return model.eval()


def fit_to_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, notice: Notice) -> None:
    """Grow the embeddings to the tokenizer's length and set the tokenizer's BOS, EOS and PAD in the configurations.

    A list of end ids in the generation configuration stays when the tokenizer's EOS is in it.
    """
    rows, needed = model.get_input_embeddings().weight.shape[0], vocabulary_size(tokenizer)
    if needed > rows:
        _grow_embeddings(model, needed)
        notice(f"The embeddings of {name} grew from {rows} to {needed} rows, the length of its tokenizer.")
    configs = [model.config] + ([model.generation_config] if model.can_generate() else [])
    for config in configs:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            old, new = getattr(config, key), getattr(tokenizer, key)
            if old == new or (config is not model.config and isinstance(old, list) and new in old):
                continue
            setattr(config, key, new)
            if old is not None:
                notice(f"{key} in the {type(config).__name__} of {name} was {old}: now {new}, as in its tokenizer.")


def set_dropout(config: PreTrainedConfig, dropout: float, name: str, notice: Notice) -> None:
    """Set every dropout probability of ``config`` (``attention_dropout``, ``resid_pdrop``, …) to ``dropout``."""
    if not _set_dropout(config, dropout) and dropout > 0:
        notice(f"The architecture of {name} ({config.model_type}) has no dropout: the setting changes nothing.")


def _set_dropout(config: PreTrainedConfig, dropout: float) -> int:
    changed = 0
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            changed += _set_dropout(value, dropout)
        elif ("dropout" in key or key.endswith("pdrop")) and (value is None or type(value) in (int, float)):
            setattr(config, key, dropout)
            changed += 1
    return changed


def check_positions(model_or_config: nn.Module | PreTrainedConfig, name: str, needed: int, parts: str) -> None:
    """Check that a model has the positions that the texts will need.

    Args:
        model_or_config: a model, a wrapper around one in ``.model``, or a configuration.
        name: which model, for the message: "the actor".
        needed: tokens of the longest sequence.
        parts: how ``needed`` comes about, for the message: "256 prompt + 256 answer tokens".

    Raises:
        UserError: with the numbers, when the model's limit is lower. A model without a limit (ALiBi) passes.
    """
    config = model_or_config
    if not isinstance(config, PreTrainedConfig):
        config = (config if isinstance(config, PreTrainedModel) else config.model).config
    config = config.get_text_config()
    limits = [getattr(config, field, None) for field in POSITION_FIELDS]
    limit = next((limit for limit in limits if isinstance(limit, int)), None)
    if limit is not None and needed > limit:
        raise UserError(f"{name} has {limit} positions, but {parts} need {needed}; lower the length limits.")


def enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; embedding outputs require gradients, so adapters alone get theirs.

    Raises:
        UserError: the architecture cannot do it.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} does not support --gradient_checkpointing; leave the flag out.")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


@torch.no_grad()
def check_projection(model: PreTrainedModel, head: nn.Module | None, name: str) -> None:
    """Check on one token that the outputs are ``head(last hidden state)`` and nothing more.

    Log-probabilities and scores are computed here from the hidden states; an architecture that scales or caps its
    logits, or changes the hidden states before its head, would silently get other ones.

    Raises:
        UserError: the head is no linear layer, or its input or output is changed on the way.
    """
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"{name} ({type(model).__name__}) has no linear output layer; this architecture is not supported."
        )
    seen: list[Tensor] = []
    hooks = [
        model.base_model.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0])),
        head.register_forward_hook(lambda _module, inputs, output: seen.extend((inputs[0], output))),
    ]
    try:
        # Not the padding token: its embedding may be 0, and 0 is not changed by scaling.
        token = torch.full((1, 1), 0 if model.config.pad_token_id else 1, device=head.weight.device)
        logits = model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    hidden, head_input, head_output = seen
    same_input = torch.equal(hidden.flatten(), head_input.flatten())
    if not same_input or not torch.equal(head_output.float().flatten(), logits.float().flatten()):
        raise UserError(
            f"{name} ({type(model).__name__}) changes its logits outside its output layer (scaling or capping); "
            "this architecture is not supported."
        )


@torch.no_grad()
def _grow_embeddings(model: PreTrainedModel, rows: int) -> None:
    """New rows are the mean of the old ones: exact, where transformers draws around the mean from the global seed."""
    old = model.get_input_embeddings().weight.shape[0]
    state = torch.get_rng_state()
    model.resize_token_embeddings(rows, mean_resizing=False)
    torch.set_rng_state(state)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is None:
            continue
        layer.weight[old:] = layer.weight[:old].float().mean(dim=0).to(layer.weight.dtype)
        bias = getattr(layer, "bias", None)
        if bias is not None:
            bias[old:] = bias[:old].float().mean().to(bias.dtype)


def _merge_adapter(model: PreTrainedModel, path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The base model with the adapter of ``path`` merged into its weights; every adapter tensor must be there."""
    config = PeftConfig.from_pretrained(path)
    config.inference_mode = True
    adapted = get_peft_model(model, config)
    result = set_peft_model_state_dict(adapted, load_peft_weights(path, device="cpu"))
    missing = [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    if missing or result.unexpected_keys:
        raise UserError(
            f"The adapter {path} does not fit its base model: {_some([*missing, *result.unexpected_keys])}."
        )
    return adapted.merge_and_unload().to(dtype).eval().requires_grad_(True)  # peft froze the base


def _check_generation_config(config: GenerationConfig, name: str, notice: Notice) -> None:
    """A contradictory generation configuration cannot be saved: better known now than after the training."""
    try:
        config.validate(strict=True)
        return
    except ValueError:
        config.do_sample = True  # sampling settings without sampling, as LLaMA 2 was published
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise UserError(f"The generation_config.json of {name} is invalid: {first_line(error)}") from error
    notice(f"The generation configuration of {name} has sampling settings with sampling off: do_sample is set.")


def _some(keys: Iterable[str], shown: int = 5) -> str:
    """The first few of ``keys``, sorted, and how many more there are."""
    keys = sorted(keys)
    more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
    return ", ".join(keys[:shown]) + more

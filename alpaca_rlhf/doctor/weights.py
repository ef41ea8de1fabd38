"""What a model is, from its configuration and the headers of its weight files; no weight is read."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import POSITION_FIELDS, check_causal_lm
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import check_reward_model
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import FILE, read_reward_stats
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import adapter_base, first_line, load_config, quiet
from alpaca_rlhf.doctor.origin import STEPS
from alpaca_rlhf.doctor.page import Page, number


@dataclass(frozen=True)
class Model:
    """One model as far as it is known without its weights."""

    path: str
    folder: Path  # where its files (an adapter's base model's) lie on this machine
    config: PreTrainedConfig
    is_reward_model: bool
    skeleton: PreTrainedModel | None  # on the meta device; None where transformers cannot build it

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model can read; None without a limit."""
        config = self.config.get_text_config()
        limits = [getattr(config, field, None) for field in POSITION_FIELDS]
        return next((limit for limit in limits if isinstance(limit, int)), None)

    @property
    def rows(self) -> int:
        """Rows of the embeddings: ids from here on do not exist."""
        if self.skeleton is None:
            return self.config.get_text_config().vocab_size
        return self.skeleton.get_input_embeddings().weight.shape[0]


def describe_model(path: str, step: str | None, page: Page) -> Model:
    """Say what the model at ``path`` is; ``step`` is what its training_arguments.json calls its step.

    Raises:
        UserError: there is no model.
    """
    config = load_config(path)
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    try:
        if classifier:
            check_reward_model(path)
        else:
            check_causal_lm(path)
    except UserError as error:
        page.problem(str(error))
    _describe_adapter(path, page)
    source = adapter_base(path) or path
    folder = Path(source) if Path(source).is_dir() else Path(cached_file(source, "config.json")).parent
    model = Model(path, folder, config, classifier, _skeleton(config, classifier, page))
    headers = _headers(folder, page)
    text = config.get_text_config()
    limit = "no limit of positions" if model.positions is None else f"{model.positions:,} positions"
    kind = (config.architectures or [config.model_type])[0]
    parameters = "" if model.skeleton is None else f"{_parameters(model.skeleton):,} parameters, "
    page.fact("model", f"{kind}: {parameters}{text.num_hidden_layers} layers, hidden size {text.hidden_size}, {limit}, "
                       f"{model.rows:,} embedding rows")  # fmt: skip
    if headers is None:
        page.fact("weights", "no safetensors files here, so they were not looked at")
    else:
        _describe_weights(model, headers, own=step in STEPS, page=page)
    if classifier:
        _describe_reward_model(model, headers, step, page)
    return model


Header = tuple[tuple[int, ...], str]  # shape, type


def _describe_adapter(path: str, page: Page) -> None:
    base = adapter_base(path)
    if base is None:
        return
    adapter = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
    targets = adapter.get("target_modules")
    layers = f"{len(targets)} layers" if isinstance(targets, list) else f"the layers {targets}"
    kind, rank, alpha = (adapter.get(name) for name in ("peft_type", "r", "lora_alpha"))
    page.fact("adapter", f"{kind} of rank {rank}, alpha {alpha}, on {layers} of {base}")
    if not any((Path(path) / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        page.problem(f"{path} names an adapter but holds no adapter_model file; copy it again")


def _skeleton(config: PreTrainedConfig, classifier: bool, page: Page) -> PreTrainedModel | None:
    auto_class = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    try:
        with torch.device("meta"), quiet():
            return auto_class.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        page.problem(f"transformers cannot build the model that config.json describes: {first_line(error)}")
        return None


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _headers(folder: Path, page: Page) -> dict[str, Header] | None:
    """Name → shape and type of every tensor in the safetensors files; None where there are none."""
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        if missing := sorted(file.name for file in named.difference(files)):
            page.problem(f"the weights of {folder} are not complete: {', '.join(missing)} is missing; copy it again")
    headers: dict[str, Header] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    headers[name] = tuple(part.get_shape()), str(part.get_dtype())
        except (SafetensorError, OSError) as error:
            page.problem(f"{file} cannot be read ({first_line(error)}): it is cut or damaged; copy it again")
    return headers if files else None


def _describe_weights(model: Model, headers: dict[str, Header], own: bool, page: Page) -> None:
    """``own``: written by these programs, which save nothing that the module does not have."""
    types = ", ".join(sorted({kind for _, kind in headers.values()}))
    stored = sum(math.prod(shape) for shape, _ in headers.values())
    page.fact("weights", f"{len(headers)} tensors, {stored:,} numbers of type {types}")
    if model.skeleton is None:
        return
    expected = {name: tuple(tensor.shape) for name, tensor in model.skeleton.state_dict().items()}
    tied = model.skeleton.all_tied_weights_keys
    unexpected = [name for name in headers if name not in expected]
    if unexpected and not own:
        page.fact("", f"their names are not those of the module ({unexpected[0]} and others); transformers maps them "
                      "while loading, which only loading can check")  # fmt: skip
        return
    problems = {
        "is missing": [name for name in expected if name not in headers and name not in tied],
        "is unexpected": unexpected,
        "has another shape than config.json says": [
            name for name, (shape, _) in headers.items() if name in expected and expected[name] != shape
        ],
    }
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            page.problem(f"the weights of {model.path} do not fit its config.json: {names[0]}{more} {what}; a model "
                         "like this is refused by every step")  # fmt: skip


def _describe_reward_model(model: Model, headers: dict[str, Header] | None, step: str | None, page: Page) -> None:
    offset = getattr(model.config, "score_offset", None)
    heads = [name for name in headers or {} if name.startswith("score.")]
    shapes = ", ".join(f"{name} {' × '.join(map(str, headers[name][0]))}" for name in heads if headers)
    page.fact("head", shapes or "its score head was not seen")
    if offset is not None:
        sign = "-" if offset < 0 else "+"
        page.fact("", f"the score is the head's {sign} {number(abs(offset))}: score_offset in config.json, which "
                      "transformers does not add")  # fmt: skip
    if step == "ppo_critic":
        page.fact("reward stats", "none: in a critic a normalisation by saved statistics is folded into its head")
        return
    file = Path(model.path) / FILE
    if not file.is_file():
        page.fact("reward stats", f"none: step 3 needs {FILE} of step 2, or --reward_normalization running or off")
        return
    try:
        stats = read_reward_stats(model.path)
    except UserError as error:
        page.fact("reward stats", "not usable, see below")
        page.problem(str(error))
        return
    population = json.loads(file.read_text(encoding="utf-8")).get("population", "unnamed answers")
    page.fact("reward stats", f"mean {number(stats.mean)}, std {number(stats.std)} over {stats.count} {population}; "
                              "measured with these very weights (the digests agree)")  # fmt: skip

"""What fits in memory: an estimate of what each step holds, from the model's shape.

What is counted, in bytes: weights 4 a parameter (frozen ones are held in the compute type, w = 4 or 2, but embeddings
in 4); under bf16 or fp16 2 more for the copy that a product of trained weights takes; gradients 4 and AdamW's two
moments 8 a trained parameter. Activations of T tokens over L layers: T L (32 H + 2 w K + 4 w F), with hidden size H,
width of keys and values K and of the feed-forward layer F: what torch keeps for the backward pass of a LLaMA or GPT-2
block (measured; a test compares). Dropout on the attention keeps 12 bytes for each head and pair of positions besides.
With gradient checkpointing 4 T L H and one layer's activations stay. Logits of T tokens: 12 x min(T V, 2^24). Step 3
also samples: keys and values of the whole sequences, 2 w T L K, and 32 V for each row while it draws.

The peaks of seven real runs of a 135M LLaMA on a CPU were 0.88 to 1.28 times the estimate (the allocator keeps memory
that it does not use), so a setting is called fitting when 4/3 of its estimate is free.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from alpaca_rlhf.deepspeed_chat.training.utils.module.lora import linear_layers
from alpaca_rlhf.doctor.page import Page, table

GIB = 2**30
MARGIN = 4 / 3
LOGITS_AT_ONCE = 2**24  # algorithms.log_probs, max_elements
PROGRAM = {"cpu": 1.0 * GIB, "cuda": 0.7 * GIB}  # python with its libraries; a CUDA context with theirs


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that decide its memory."""

    parameters: int
    embeddings: int  # those of its embeddings among them
    adapters: int  # parameters that LoRA of the given rank on every linear layer would add
    layers: int
    hidden: int
    keys: int  # width of the keys (and of the values) of one token
    forward: int  # width of the feed-forward layer
    heads: int
    vocabulary: int
    attention_dropout: bool


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    program: float

    @property
    def total(self) -> float:
        """All of it at the moment when most is held."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.program


@dataclass(frozen=True)
class Setting:
    """What is trained, and on how much at a time."""

    step: int
    lora: bool  # adapters alone
    rows: int  # records of a micro-batch (step 2: pairs)
    length: int  # tokens of a row, prompt and answer together
    checkpointing: bool = False
    half: bool = False  # computes in bf16 or fp16
    device: str = "cpu"


def shape_of(model: PreTrainedModel, rank: int) -> Shape:
    """The shape of a model (its weights may be on the meta device)."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    forward = next((getattr(config, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")
                    if getattr(config, name, None)), 4 * config.hidden_size)  # fmt: skip
    dropouts = [getattr(config, name, 0) or 0 for name in ("attention_dropout", "attn_pdrop")]
    layers = [model.get_submodule(name) for name in linear_layers(model, ())]
    embeddings = {id(one): one.numel() for one in (
        module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)
    )}  # fmt: skip
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()), embeddings=sum(embeddings.values()),
        adapters=sum(rank * sum(layer.weight.shape) for layer in layers), layers=config.num_hidden_layers,
        hidden=config.hidden_size, keys=groups * head_width, forward=forward, heads=heads,
        vocabulary=config.vocab_size, attention_dropout=max(dropouts) > 0,
    )  # fmt: skip


def activations(shape: Shape, rows: int, length: int, *, checkpointing: bool, half: bool) -> float:
    """Bytes that the layers keep for the backward pass of ``rows`` sequences of ``length`` tokens."""
    tokens, width = rows * length, 2 if half else 4
    layer = tokens * (32 * shape.hidden + 2 * width * shape.keys + 4 * width * shape.forward)
    if shape.attention_dropout:
        layer += 12 * tokens * shape.heads * length
    return 4 * tokens * shape.layers * shape.hidden + layer if checkpointing else shape.layers * layer


def estimate(shape: Shape, setting: Setting) -> Estimate:
    """What a step holds at most, on one device without ZeRO. Step 3 is taken to have a critic of the actor's shape."""
    width = 2 if setting.half else 4
    trained = shape.adapters if setting.lora else shape.parameters
    frozen = 4 * shape.embeddings + width * (shape.parameters - shape.embeddings)
    weights = frozen + 4 * shape.adapters if setting.lora else 4 * shape.parameters
    cast = 2 * trained if setting.half else 0
    rows = setting.rows * (2 if setting.step == 2 else 1)
    tokens = rows * setting.length
    held = activations(shape, rows, setting.length, checkpointing=setting.checkpointing, half=setting.half) + cast
    if setting.step != 2:
        held += 12 * min(tokens * shape.vocabulary, LOGITS_AT_ONCE)
    if setting.step == 3:
        sampling = 2 * width * tokens * shape.layers * shape.keys + 32 * rows * shape.vocabulary
        held = max(held, sampling)  # one after the other
        weights = 2 * weights + (0 if setting.lora else 2 * frozen)  # reference and reward share them with LoRA alone
        trained *= 2
    return Estimate(weights, 4 * trained, 8 * trained, held, PROGRAM[setting.device])


def most_rows(shape: Shape, setting: Setting, available: float) -> int:
    """The largest micro-batch that fits into ``available`` bytes with the margin; 0 for none."""

    def fits(rows: int) -> bool:
        return estimate(shape, replace(setting, rows=rows)).total * MARGIN <= available

    if not fits(1):
        return 0
    most = 1
    while most < 2**20 and fits(2 * most):
        most *= 2
    for step in (most // 2**power for power in range(1, most.bit_length())):
        if fits(most + step):
            most += step
    return most


def device_memory() -> tuple[str, str, int, int]:
    """(kind, name, bytes in all, bytes free now) of the device that a step would use."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return "cuda", torch.cuda.get_device_name(), total, free
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    if (file := Path("/proc/meminfo")).is_file():
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", file.read_text())[1])  # type: ignore[index]
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return "cpu", "this machine's main memory", total, min(free, total)


def describe_memory(
    model: PreTrainedModel, *, steps: tuple[int, ...], rank: int, rows: int, length: int, sequence: int, half: bool,
    device: tuple[str, str, int, int], page: Page,
) -> None:  # fmt: skip
    """Print the estimates of the steps that begin with this model, and which settings fit.

    Args:
        rows: of a micro-batch. length: tokens of a row in steps 1 and 2; ``sequence``: prompt and answer in step 3.
        device: as :func:`device_memory` gives it.
    """
    kind, name, total, free = device
    shape = shape_of(model, rank)
    page.title("memory: an estimate of what each step holds, in GiB")
    page.fact("device", f"{name}: {total / GIB:.1f} GiB, {free / GIB:.1f} free now; computing in "
                        f"{'bf16' if half else 'fp32'}")  # fmt: skip
    page.fact("micro-batch", f"{rows} records of {length} tokens; in step 3 {rows} of {sequence} (prompt and answer)")
    lines = [["", "weights", "gradients", "AdamW", "activations", "total", "fits", "rows", "recomputed", "rows"]]
    advice = []
    for step, lora in [(step, lora) for step in steps for lora in (False, True)]:
        plain = Setting(step, lora, rows, sequence if step == 3 else length, half=half, device=kind)
        recomputing = replace(plain, checkpointing=True)
        held, less = estimate(shape, plain), estimate(shape, recomputing)
        most, most_less = (most_rows(shape, setting, free) for setting in (plain, recomputing))
        name = f"step {step}, {f'LoRA {rank}' if lora else 'all weights'}"
        parts = (held.weights, held.gradients, held.optimizer, held.activations, held.total)
        lines.append([
            name, *(_gib(part) for part in parts), _fits(held.total, free), _count(most),
            _gib(less.total), _count(most_less),
        ])  # fmt: skip
        if held.total > free:
            advice.append(_advice(name, most, most_less))
    for line in table(lines, right=True):
        page.say(line)
    page.fact("", "rows: the most records of a micro-batch that fit with a third to spare; recomputed: the total with "
                  "--gradient_checkpointing, then its rows")  # fmt: skip
    if advice:
        page.fact("what fits", *advice)
    page.fact("formula", _formula(shape, rank, half, kind))


def _formula(shape: Shape, rank: int, half: bool, kind: str) -> str:
    return (
        f"weights 4 B a parameter ({shape.parameters:,}; LoRA of rank {rank} on every linear layer adds "
        f"{shape.adapters:,}), frozen ones {2 if half else 4} B; gradients 4 B and AdamW 8 B a trained one; "
        f"activations T L (32 H + {4 if half else 8} K + {8 if half else 16} F) B for T tokens, L = {shape.layers}, "
        f"H = {shape.hidden}, K = {shape.keys}, F = {shape.forward}, and 12 B x min(T V, 2^24) of logits; the total "
        f"adds {PROGRAM[kind] / GIB:.1f} for the program. Step 3 has an actor and a critic of this shape and frozen "
        "copies of both, which LoRA alone (--only_optimize_lora) shares. All on one device, without ZeRO and offload"
    )


def _fits(total: float, free: float) -> str:
    return "no" if total > free else "barely" if total * MARGIN > free else "yes"


def _count(rows: int) -> str:
    return f"{rows:,}" if rows < 10_000 else "9999+"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 100 * GIB else f"{size / GIB:,.0f}"


def _advice(name: str, most: int, recomputing: int) -> str:
    """What makes a setting fit that does not."""
    if most:
        return f"{name}: at most {most} rows at a time, {recomputing} with --gradient_checkpointing; the rest of the " \
               "batch by --gradient_accumulation_steps"  # fmt: skip
    if recomputing:
        return f"{name}: only with --gradient_checkpointing, at most {recomputing} rows at a time"
    return f"{name}: not one row; shorter texts, LoRA alone, or --deepspeed with --offload or ZeRO on more devices"

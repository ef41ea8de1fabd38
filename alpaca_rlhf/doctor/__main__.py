"""Look at a model, and at data through its eyes, before a training or when something looks wrong.

    python -m alpaca_rlhf.doctor output/actor
    python -m alpaca_rlhf.doctor output/actor my_pairs.jsonl --step 2 --max_len 512

MODEL is any model directory or hub name: an output of a step (of step 3 also the folder around actor and critic), an
adapter, or anybody else's. No weights are loaded. Exit code 0: nothing that would make a training wrong; 1: something
would, listed at the end; 2: there is no such model or data.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.parts import default_cache_dir
from alpaca_rlhf.arguments.schema import RolloutArguments, Step1Arguments
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import BUILT_IN_TEMPLATES, TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import check_positions
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_same_tokenizer, note_other_templates
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import check_model_path
from alpaca_rlhf.doctor.memory import describe_memory, device_memory
from alpaca_rlhf.doctor.origin import STEPS, describe_origin, models_of, recorded
from alpaca_rlhf.doctor.page import Page
from alpaca_rlhf.doctor.special_ids import describe_special_ids
from alpaca_rlhf.doctor.texts import Limits, describe_data, describe_template
from alpaca_rlhf.doctor.weights import Model, describe_model
from alpaca_rlhf.runtime.run import choose_dtype, command


def _default(settings: type, name: str) -> int:
    value = next(field.default for field in fields(settings) if field.name == name)
    assert isinstance(value, int), (settings, name, value)
    return value


ROWS, LENGTH = _default(Step1Arguments, "per_device_train_batch_size"), _default(Step1Arguments, "max_seq_len")
PROMPT, ANSWER = _default(RolloutArguments, "max_prompt_len"), _default(RolloutArguments, "max_answer_len")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(prog="python -m alpaca_rlhf.doctor", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a model")
    parser.add_argument("data", metavar="DATA", nargs="?", help="file, folder or hub name of a data set")
    parser.add_argument("--step", type=int, choices=(1, 2, 3),
                        help="look at DATA as this step does (default: by columns)")  # fmt: skip
    parser.add_argument("--records", type=int, default=3, metavar="N", help="records to show (default 3)")
    parser.add_argument("--max_len", type=int, metavar="N",
                        help="most tokens: --max_seq_len, in step 3 --max_prompt_seq_len (default: as recorded with "
                             f"MODEL, else the steps' own, {LENGTH} and {PROMPT})")  # fmt: skip
    parser.add_argument("--max_answer_len", type=int, metavar="N",
                        help=f"step 3's --max_answer_seq_len (default: as recorded, else {ANSWER})")  # fmt: skip
    parser.add_argument("--max_samples", type=int, default=2000, metavar="N",
                        help="measure lengths on at most so many records (default 2000)")  # fmt: skip
    parser.add_argument("--template", default="auto", choices=("auto", *BUILT_IN_TEMPLATES),
                        help="chat template (default auto: the tokenizer's own)")  # fmt: skip
    parser.add_argument("--batch_size", type=int, metavar="N",
                        help=f"rows of a micro-batch, for the memory (default: as recorded, else {ROWS})")  # fmt: skip
    parser.add_argument("--lora_dim", type=int, default=8, metavar="N", help="rank of LoRA, for the memory (default 8)")
    parser.add_argument("--data_output_path", default=default_cache_dir(), metavar="DIR", help="cache folder")
    args = parser.parse_args(argv)
    for name in ("records", "max_len", "max_answer_len", "max_samples", "batch_size", "lora_dim"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Look, print, and return the exit code."""
    args = parse(argv)
    check_model_path(args.model)
    page = Page(print)
    seen: list[Seen] = []
    for path in models_of(args.model, page):
        seen.append(examine(path, args.template, seen, page))
    compare(seen, page)
    model, encoder, arguments = seen[0]
    limits = limits_of(args, model, arguments, page)
    if args.data is not None and encoder is None:
        page.fact("data", "not looked at: this model's tokenizer or template cannot be used, see below")
    elif args.data is not None and encoder is not None:
        describe_data(args.data, encoder, args.step, limits, page, cache_dir=args.data_output_path,
                      records=args.records, max_samples=args.max_samples)  # fmt: skip
    if model.skeleton is not None:
        kind, *_ = device = device_memory()
        supervised, ppo = limits(1), limits(3)
        names = ("per_device_train_batch_size", "ppo.per_device_mini_batch_size")
        rows = next((value for name in names if (value := recorded(arguments, name))), ROWS)
        describe_memory(
            model.skeleton, steps=(3,) if model.is_reward_model else (1, 2, 3), rank=args.lora_dim,
            rows=args.batch_size or rows, length=supervised.length, sequence=ppo.length + ppo.answer,
            half=choose_dtype("auto", torch.device(kind))[0] != torch.float32, device=device, page=page,
        )  # fmt: skip
    return page.close()


class Seen(NamedTuple):
    """One model that was looked at."""

    model: Model
    encoder: TextEncoder | None  # None: its tokenizer or its template cannot be used
    arguments: dict[str, Any]  # its training_arguments.json


def examine(path: str, template: str, before: Sequence[Seen], page: Page) -> Seen:
    """Print what the model at ``path`` is; ``before``: those of the same output that were printed already."""
    page.title(path)
    arguments = describe_origin(path, before[-1].arguments if before else {}, page)
    step = arguments.get("step")
    model = describe_model(path, step, page)
    tokenizer = describe_special_ids(model, page)
    if tokenizer is None:
        return Seen(model, None, arguments)
    known = before[-1].encoder if before else None
    shown = None if known is None else known.chat_template
    return Seen(model, describe_template(path, tokenizer, template, step in STEPS, shown, page), arguments)


def compare(models: Sequence[Seen], page: Page) -> None:
    """Actor and critic of one output must share a tokenizer, and should share a template."""
    (first, encoder, _), *others = models
    if encoder is None or not others:
        return
    page.title("together")
    paths = [other.model.path for other in others if other.encoder is not None]
    try:
        check_same_tokenizer(encoder.tokenizer, first.path, *paths)
        page.fact("tokenizers", "the same in all of them")
    except UserError as error:
        page.problem(str(error))
    note_other_templates(encoder.chat_template, page.problem, *paths)


def limits_of(
    args: argparse.Namespace, model: Model, arguments: dict[str, Any], page: Page
) -> Callable[[int], Limits]:
    """The limits of a step's texts: as given, else as recorded with the model, else the steps' defaults.

    Defaults that the model has no positions for give way, which is said; a limit that was asked for is a problem.
    """

    def limits(step: int) -> Limits:
        names = ("rollout.max_prompt_len", "rollout.max_answer_len") if step == 3 else ("max_seq_len",)
        known = [recorded(arguments, name) for name in names]
        flags = ("--max_prompt_seq_len", "--max_answer_seq_len") if step == 3 else ("--max_seq_len",)
        given = [args.max_len, args.max_answer_len][: len(names)]
        defaults = [PROMPT, ANSWER] if step == 3 else [LENGTH]
        chosen = [a or b or c for a, b, c in zip(given, known, defaults, strict=True)]
        origin = "as given" if any(given) else "as the model was trained" if any(known) else "the default"
        if model.positions is not None and sum(chosen) > model.positions and not any(given) and not any(known):
            chosen = [model.positions // len(chosen)] * len(chosen)
            words = " ".join(f"{flag} {value}" for flag, value in zip(flags, chosen, strict=True))
            origin = f"the default of {' + '.join(map(str, defaults))} is more than the model's positions: give {words}"
        return Limits(chosen[0], chosen[1] if step == 3 else 0, origin, model.positions)

    if args.max_len is not None or args.max_answer_len is not None:
        asked = limits(args.step or 1)
        total, parts = asked.length + asked.answer, f"{asked.length} + {asked.answer}" if asked.answer else "the texts"
        try:
            check_positions(model.config, f"the model {model.path}", total, f"{parts} tokens")
        except UserError as error:
            page.problem(str(error))
    return limits


if __name__ == "__main__":
    raise SystemExit(command(main)())

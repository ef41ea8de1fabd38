"""How a rollout is cut into optimizer steps, and how many there will be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.schema import Step3Arguments
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_sft
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader
from alpaca_rlhf.deepspeed_chat.training.utils.data.plain_text import load_plain_text
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder


@dataclass(frozen=True)
class ExperienceRows:
    """A rollout as a data set of its rows, so that the loader can shuffle it and cut it by length."""

    experience: Experience

    def __len__(self) -> int:
        return len(self.experience)

    def __getitem__(self, row: int) -> dict:
        mask = self.experience.attention_mask[row].bool()
        return {"ids": self.experience.sequences[row][mask].tolist()}


def minibatches(args: Step3Arguments, run: Any, experience: Experience, epoch: int) -> Iterator[list[Experience]]:
    """This rank's micro-batches of each optimizer step; every row once, in another order each ``epoch`` (P-16)."""
    loader = StepLoader(
        ExperienceRows(experience), partial(_rows, experience), micro_batch_size=args.ppo.per_device_mini_batch_size,
        micro_batches_per_step=args.schedule.gradient_accumulation_steps, rank=run.rank, world_size=run.world_size,
        seed=args.output.seed,
    )  # fmt: skip
    yield from loader.epoch(epoch)


def text_loader(args: Step3Arguments, run: Any, encoder: TextEncoder) -> StepLoader:
    """This rank's micro-batches of plain text for each optimizer step of the actor."""
    items = load_plain_text(
        args.unsupervised_dataset_name, args.unsupervised_dataset_config_name, encoder=encoder,
        block=args.rollout.max_prompt_len + args.rollout.max_answer_len, cache_dir=args.data.cache_dir,
    )  # fmt: skip
    return StepLoader(
        items, partial(collate_sft, pad_id=encoder.pad_id), micro_batch_size=args.ppo.per_device_mini_batch_size,
        micro_batches_per_step=args.schedule.gradient_accumulation_steps, rank=run.rank, world_size=run.world_size,
        seed=args.output.seed,
    )  # fmt: skip


def plan(args: Step3Arguments, prompts: int, world_size: int) -> tuple[int, int]:
    """Rollouts and optimizer steps of the run: every prompt in each epoch, the incomplete last ones included (P-22)."""
    size = args.rollout_size(world_size)
    if args.ppo.kl_target is not None and 0.2 * size >= args.ppo.kl_horizon:  # one update could take it below 0
        raise UserError(
            f"--kl_horizon {args.ppo.kl_horizon} is too short for rollouts of {size} answers; "
            f"give more than {size // 5}"
        )
    rows_per_step = args.ppo.per_device_mini_batch_size * args.schedule.gradient_accumulation_steps * world_size
    sizes = [min(size, prompts - start) for start in range(0, prompts, size)] * args.schedule.num_train_epochs
    sizes = sizes[: args.schedule.max_steps]
    return len(sizes), args.ppo.epochs * sum(-(-rows // rows_per_step) for rows in sizes)


def _rows(experience: Experience, items: Sequence[dict], real: int) -> Experience:
    """The rows of ``items``, trimmed; those from ``real`` on are fillers and count nowhere."""
    rows = experience.select(torch.tensor([item["row"] for item in items]))
    counts = torch.arange(len(items)) < real
    response_mask = rows.response_mask * counts[:, None]
    return replace(rows, response_mask=response_mask, row_mask=rows.row_mask * counts).trim()

"""What step 2 leaves behind: the reward model, the statistics of its scores, the settings."""

from pathlib import Path
from typing import Any

from alpaca_rlhf.algorithms.rewards import RewardStats
from alpaca_rlhf.arguments.schema import Step2Arguments
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import write_reward_stats
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.engines.base import Engine
from alpaca_rlhf.runtime.outputs import save_arguments, write_output
from alpaca_rlhf.runtime.run import Run


def export(args: Step2Arguments, run: Run, engine: Engine, model: RewardModel, tokenizer: Any, chat_template: str,
           report: dict, stats: RewardStats | None, population: str) -> None:  # fmt: skip
    """All of it or nothing; ``stats`` None: no score was finite."""
    state = engine.full_state_dict()

    def write(folder: Path) -> None:
        adapter_base = args.model.path if args.output.save_adapter else None
        save_trained(folder, model, state, tokenizer, chat_template, adapter_base)
        if stats is not None:
            write_reward_stats(folder, stats, population)
        save_arguments(folder, {"step": "reward_model", **args.to_dict(), "data_report": report})

    if run.is_main:
        write_output(Path(args.output.output_dir or ""), write)
    run.barrier()
    run.print(f"saved the reward model in {args.output.output_dir}")

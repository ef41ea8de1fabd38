"""Step 2: the reward model. From pairs of answers it learns a score that is higher for the one people chose.

    python alpaca_rlhf/deepspeed_chat/training/step2_reward_model_finetuning/main.py \\
        --data_path data/preferences --model_name_or_path output/actor --output_dir output/critic
    sh run.sh --num_gpus 2 alpaca_rlhf/deepspeed_chat/training/step2_reward_model_finetuning/main.py … --deepspeed

The loss compares the scores at the two ends by default (``--pair_loss per_token``: all positions from the first
difference on, as in the seed). The statistics of the chosen answers' scores are saved for step 3.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from alpaca_rlhf.algorithms.metrics import Averages
from alpaca_rlhf.arguments.deepspeed_chat import parse_step2
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.schema import Step2Arguments
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning.pairs import (
    PairScores,
    batch_loss,
    score_pairs,
    told,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_pairs
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import PromptDataset, create_prompt_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.inspection import show_records
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader, evaluation_batches
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model, note_other_shares
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import write_reward_stats
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.deepspeed_chat.training.utils.module.adapt import adapt
from alpaca_rlhf.engines.base import Engine, OptimizerSettings
from alpaca_rlhf.engines.create import create_engine
from alpaca_rlhf.engines.stepping import SkippedSteps, TrainingDiverged, optimizer_step, to_device
from alpaca_rlhf.runtime.checkpoint import prepare_output_dir, save_arguments, write_output
from alpaca_rlhf.runtime.run import Run, command, start_run
from alpaca_rlhf.runtime.tracking import MetricsLog

CURVES = {"eval_acc": ["eval_accuracy"], "train_loss": ["loss"], "train_reward": ["chosen_score", "rejected_score"],
          "train_reward_diff": ["gap"]}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Read the pairs, train, evaluate before and after, measure the score statistics, save."""
    args = parse_step2(argv)
    run = start_run(seed=args.output.seed, **args.engine.to_dict())
    prepare_output_dir(args.output.output_dir)
    check_model(args.model.path, "causal_lm", needed_positions=args.max_seq_len, parts="the tokens of --max_seq_len",
                lora_module_names=args.model.lora_module_names if args.model.lora_dim else None)  # fmt: skip

    # text → ids → batches
    note_other_shares(args.data.paths, args.data.split, args.data.seed, run.print, args.model.path)
    tokenizer = load_tokenizer(args.model.path, notice=run.print)
    encoder = TextEncoder(tokenizer, args.data.template)
    data = create_prompt_dataset(
        paths=args.data.paths, probs=args.data.probs, split=args.data.split, seed=args.data.seed, step=2, run=run,
        encoder=encoder, max_len=args.max_seq_len, max_samples=args.data.max_samples,
        workers=args.data.workers, cache_dir=args.data.cache_dir)  # fmt: skip
    run.print("\n".join([*encoder.notices, *data.lines]))
    if args.output.inspect:
        return show_records(data.train, encoder, 2, args.output.inspect, run.print)
    collate, accumulation = partial(collate_pairs, pad_id=encoder.pad_id), args.schedule.gradient_accumulation_steps
    loader = StepLoader(data.train, collate, micro_batch_size=args.per_device_train_batch_size, seed=args.output.seed,
                        micro_batches_per_step=accumulation, rank=run.rank, world_size=run.world_size)  # fmt: skip
    total_steps = args.schedule.planned_steps(loader.steps_per_epoch)

    # model and engine
    model = RewardModel.from_causal_lm(args.model.path, tokenizer, seed=args.output.seed, notice=run.print,
                                       dropout=args.model.dropout)  # fmt: skip
    adapt(model.model, **args.model.adaptation(), only_optimize_lora=args.only_optimize_lora, seed=args.output.seed,
          notice=run.print, keep_trainable=model.head_parameters())  # fmt: skip
    engine = create_engine(
        model, OptimizerSettings(**args.model.optimizer(), **args.schedule.optimizer(), total_steps=total_steps), run,
        deepspeed=args.engine.deepspeed, zero_stage=args.model.zero_stage, offload=args.model.offload,
        micro_batch_size=2 * args.per_device_train_batch_size, micro_batches_per_step=accumulation,
    )  # fmt: skip

    # loop
    log = MetricsLog(args.output.output_dir, run, tensorboard=args.output.enable_tensorboard,
                     tensorboard_path=args.output.tensorboard_path, curves=CURVES)  # fmt: skip

    def scores(dataset: PromptDataset) -> PairScores:
        share = {"batch_size": args.per_device_eval_batch_size, "rank": run.rank, "world_size": run.world_size}
        return score_pairs(engine, evaluation_batches(dataset, collate, **share), run)

    diverged = None
    try:
        train(args, run, engine, loader, lambda: scores(data.eval).metrics(), log, total_steps)
    except TrainingDiverged as stop:  # the last good weights are saved all the same
        diverged = stop

    # export, with the distribution of the chosen answers' scores
    if args.output.output_dir:
        part, measured = ("evaluation", data.eval) if len(data.eval) > 1 else ("training", data.train)
        stats, population = scores(measured).chosen_stats(), f"chosen answers of the {part} part"
        run.print(f"scores of the {population}: {stats or 'none is finite, so no statistics are saved'}")
        state = engine.full_state_dict()

        def write(folder: Path) -> None:
            adapter_base = args.model.path if args.output.save_adapter else None
            save_trained(folder, model, state, tokenizer, encoder.chat_template, adapter_base)
            if stats is not None:
                write_reward_stats(folder, stats, population)
            save_arguments(folder, {"step": "reward_model", **args.to_dict(), "data_report": data.report})

        if run.is_main:
            write_output(Path(args.output.output_dir), write)
        run.barrier()
        run.print(f"saved the reward model in {args.output.output_dir}")
    log.close()
    if diverged:
        raise UserError(str(diverged))


def train(args: Step2Arguments, run: Run, engine: Engine, loader: StepLoader, evaluation: Callable[[], dict],
          log: MetricsLog, total: int) -> None:  # fmt: skip
    """The loop."""
    skipped, step = SkippedSteps(args.schedule.max_skipped_steps), 0
    log.log(0, told(run, evaluation()))
    bar = run.progress(total, "reward model")
    for epoch in range(args.schedule.num_train_epochs):
        for batches in loader.epoch(epoch):
            if step == total:
                break
            step += 1
            batches = [to_device(batch, run.device) for batch in batches]
            pairs = float(run.sum(sum(batch["row_mask"].sum() for batch in batches)))
            averages = Averages()
            with engine.training_mode():
                loss = partial(batch_loss, engine, args.pair_loss, averages)
                outcome = optimizer_step(engine, run, batches, loss, pairs)
            averages.reduce(run.sum)
            figures = {"epoch": epoch, "pairs": pairs} | averages.result() | outcome.metrics()
            due = args.evaluation_due(step, loader.steps_per_epoch, total)
            log.log(step, figures | (told(run, evaluation()) if due else {}))
            bar.set_postfix({"loss": f"{outcome.loss:.3f}"})
            bar.update(1)
            skipped.note(outcome.failed, step, "the loss or a gradient was not finite")
    bar.close()


if __name__ == "__main__":
    raise SystemExit(command(main)())

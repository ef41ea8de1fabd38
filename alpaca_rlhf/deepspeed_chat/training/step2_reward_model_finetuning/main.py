"""Step 2: the reward model. From pairs of answers it learns a score that is higher for the one people chose.

    python alpaca_rlhf/deepspeed_chat/training/step2_reward_model_finetuning/main.py \\
        --data_path data/preferences --model_name_or_path output/actor --output_dir output/critic
    sh run.sh --num_gpus 2 alpaca_rlhf/deepspeed_chat/training/step2_reward_model_finetuning/main.py … --deepspeed

The loss compares the scores at the two ends by default (``--pair_loss per_token``: all positions from the first
difference on, as in the seed). The statistics of the chosen answers' scores are saved for step 3.
"""

import math
from collections.abc import Callable
from functools import partial

from alpaca_rlhf.algorithms.metrics import Averages
from alpaca_rlhf.arguments.deepspeed_chat import STEP2, parse_step2
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.schema import Step2Arguments
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning.export import export
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning.pairs import (
    PairScores,
    batch_loss,
    score_pairs,
    told,
    told_scale,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_pairs
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import PromptDataset, create_prompt_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.inspection import show_records
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader, evaluation_batches
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model, note_other_shares
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import model_digest
from alpaca_rlhf.deepspeed_chat.training.utils.module.adapt import adapt
from alpaca_rlhf.engines.base import Engine, OptimizerSettings
from alpaca_rlhf.engines.create import create_engine
from alpaca_rlhf.engines.stepping import SkippedSteps, TrainingDiverged, optimizer_step, to_device
from alpaca_rlhf.runtime.checkpoint import Checkpoints
from alpaca_rlhf.runtime.curves import Curve
from alpaca_rlhf.runtime.outputs import prepare_output_dir
from alpaca_rlhf.runtime.run import Run, command, start_run
from alpaca_rlhf.runtime.tracking import MetricsLog

ENOUGH_SCORES = 8  # of chosen answers, to know their deviation to about a quarter; two can be equal by chance
CURVES = {
    "eval_acc": Curve("Held-out pairs whose chosen answer scores higher", "accuracy", {"eval_accuracy": "held out"},
                      (0.5, "guessing")),
    "train_loss": Curve("Loss of the pairs", "nats per pair", {"loss": "training", "eval_loss": "held out"},
                        (math.log(2), "knows nothing: ln 2")),
    "train_reward": Curve("Scores of both sides", "score", {
        "chosen_score": "chosen", "rejected_score": "rejected", "eval_chosen_mean": "chosen, held out",
        "eval_rejected_mean": "rejected, held out"}),
    "train_reward_diff": Curve("Score difference of a pair", "score, chosen - rejected",
                               {"gap": "training", "eval_gap": "held out"}, (0.0, "no difference")),
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Read the pairs, train, evaluate before and after, measure the score statistics, save."""
    args = parse_step2(argv)
    run = start_run(seed=args.output.seed, **args.engine.to_dict())
    prepare_output_dir(args.output.output_dir)
    checkpoints = Checkpoints(run, args.decisive(), STEP2.flag, **args.output.checkpoints())
    check_model(args.model.path, "causal_lm", needed_positions=args.max_seq_len, parts="the tokens of --max_seq_len",
                lora_module_names=args.model.lora_module_names if args.model.lora_dim else None)  # fmt: skip

    # text → ids → batches
    note_other_shares(args.data.paths, args.data.split, args.data.seed, run.print, args.model.path)
    tokenizer = load_tokenizer(args.model.path, notice=run.print)
    encoder = TextEncoder(tokenizer, args.data.template)
    data = create_prompt_dataset(**args.data.reading(), step=2, encoder=encoder, max_len=args.max_seq_len, run=run)
    run.print("\n".join([*encoder.notices, *data.lines]))
    if args.output.inspect:
        return show_records(data.train, encoder, 2, args.output.inspect, run.print)
    collate, accumulation = partial(collate_pairs, pad_id=encoder.pad_id), args.schedule.gradient_accumulation_steps
    loader = StepLoader(data.train, collate, micro_batch_size=args.per_device_train_batch_size, seed=args.output.seed,
                        micro_batches_per_step=accumulation, rank=run.rank, world_size=run.world_size)  # fmt: skip
    checkpoints.identify({"--data_path": lambda: data.fingerprint,
                          "--model_name_or_path": partial(model_digest, args.model.path)})  # fmt: skip
    total_steps = args.schedule.planned_steps(loader.steps_per_epoch)

    # model and engine
    model = RewardModel.from_causal_lm(args.model.path, tokenizer, seed=args.output.seed, notice=run.print,
                                       dropout=args.model.dropout)  # fmt: skip
    adapt(model.model, **args.model.adaptation(), only_optimize_lora=args.only_optimize_lora, seed=args.output.seed,
          notice=run.print, keep_trainable=model.head_parameters())  # fmt: skip
    engine = create_engine(
        model, OptimizerSettings(**args.model.optimizer(), **args.schedule.optimizer(), total_steps=total_steps), run,
        deepspeed=args.engine.deepspeed, **args.model.holding(),
        micro_batch_size=2 * args.per_device_train_batch_size, micro_batches_per_step=accumulation,
    )  # fmt: skip

    # loop
    log = MetricsLog(args.output.output_dir, run, CURVES, resuming=checkpoints.in_place, **args.output.tracking())
    skipped = SkippedSteps(args.schedule.max_skipped_steps)
    checkpoints.restore({"model": engine}, {"log": log, "skipped": skipped}, total_steps)

    def scores(dataset: PromptDataset) -> PairScores:
        share = {"batch_size": args.per_device_eval_batch_size, "rank": run.rank, "world_size": run.world_size}
        return score_pairs(engine, evaluation_batches(dataset, collate, **share), run)

    diverged = None
    try:
        train(args, run, engine, loader, lambda: told(run, scores(data.eval).metrics()), log, skipped, checkpoints)
    except TrainingDiverged as stop:  # the last good weights are saved all the same
        diverged = stop
    if checkpoints.stopped:
        return log.close()

    # export, with the distribution of the chosen answers' scores
    if args.output.output_dir:
        enough = min(ENOUGH_SCORES, len(data.train))
        part, measured = ("evaluation", data.eval) if len(data.eval) >= enough else ("training", data.train)
        population = f"chosen answers of the {part} part"
        stats = told_scale(run, scores(measured), population)
        export(args, run, engine, model, tokenizer, encoder.chat_template, data.report, stats, population)
    log.close()
    if diverged:
        raise UserError(str(diverged))


def train(args: Step2Arguments, run: Run, engine: Engine, loader: StepLoader, evaluation: Callable[[], dict],
          log: MetricsLog, skipped: SkippedSteps, checkpoints: Checkpoints) -> None:  # fmt: skip
    """The loop."""
    if not checkpoints.resuming:
        log.log(0, evaluation())
    bar = run.progress(checkpoints.total, start=checkpoints.start, description="reward model")
    for step, epoch, batches in loader.steps(checkpoints.start, checkpoints.total):
        batches = [to_device(batch, run.device) for batch in batches]
        pairs = float(run.sum(sum(batch["row_mask"].sum() for batch in batches)))
        averages = Averages()
        with engine.training_mode():
            loss = partial(batch_loss, engine, args.pair_loss, averages)
            outcome = optimizer_step(engine, run, batches, loss, pairs)
        averages.reduce(run.sum)
        figures = {"epoch": epoch, "pairs": pairs} | averages.result() | outcome.metrics()
        due = args.evaluation_due(step, loader.steps_per_epoch, checkpoints.total)
        log.log(step, figures | (evaluation() if due else {}))
        bar.set_postfix({"loss": f"{outcome.loss:.3f}"})
        bar.update(1)
        skipped.note(outcome.failed, step, "the loss or a gradient was not finite")
        if checkpoints.after_step(step):
            break
    bar.close()


if __name__ == "__main__":
    raise SystemExit(command(main)())

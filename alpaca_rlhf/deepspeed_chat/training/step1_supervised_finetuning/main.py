"""Step 1: supervised fine-tuning. A base model learns to answer: assistant turns and their EOS are trained, no more.

    python alpaca_rlhf/deepspeed_chat/training/step1_supervised_finetuning/main.py \\
        --data_path data/preferences --model_name_or_path MODEL --output_dir output/actor
    sh run.sh --num_gpus 2 alpaca_rlhf/deepspeed_chat/training/step1_supervised_finetuning/main.py … --deepspeed

The loss of an optimizer step is the mean over its trained tokens, however the step is cut; perplexity is
exp(total loss / total tokens) over the whole evaluation part.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from alpaca_rlhf.arguments.deepspeed_chat import STEP1, parse_step1
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.schema import Step1Arguments
from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning.perplexity import batch_loss, evaluate
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_sft
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import create_prompt_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.inspection import show_records
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader, evaluation_batches
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer, vocabulary_size
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import model_digest
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.deepspeed_chat.training.utils.module.adapt import adapt
from alpaca_rlhf.engines.base import Engine, OptimizerSettings
from alpaca_rlhf.engines.create import create_engine
from alpaca_rlhf.engines.stepping import SkippedSteps, TrainingDiverged, optimizer_step, to_device
from alpaca_rlhf.runtime.checkpoint import Checkpoints
from alpaca_rlhf.runtime.curves import Curve
from alpaca_rlhf.runtime.outputs import prepare_output_dir, save_arguments, write_output
from alpaca_rlhf.runtime.run import Run, command, start_run
from alpaca_rlhf.runtime.tracking import MetricsLog

CURVES = {
    "loss": Curve("Loss of the answers", "nats per token", {"loss": "training", "eval_loss": "held out"}),
    "perplexity": Curve("Perplexity of held-out answers", "perplexity", {"eval_perplexity": "held out"},
                        log_scale=True),
    "learning_rate": Curve("Learning rate", "learning rate", {"learning_rate/decay": "matrices",
                                                              "learning_rate/lora": "LoRA matrices"}),
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Read the data, train, evaluate before and after, save."""
    args = parse_step1(argv)
    run = start_run(seed=args.output.seed, **args.engine.to_dict())
    prepare_output_dir(args.output.output_dir)
    checkpoints = Checkpoints(run, args.decisive(), STEP1.flag, **args.output.checkpoints())
    check_model(args.model.path, "causal_lm", needed_positions=args.max_seq_len, parts="the tokens of --max_seq_len",
                lora_module_names=args.model.lora_module_names if args.model.lora_dim else None)  # fmt: skip

    # text → ids → batches
    tokenizer = load_tokenizer(args.model.path, notice=run.print)
    encoder = TextEncoder(tokenizer, args.data.template, args.train_prompt)
    data = create_prompt_dataset(**args.data.reading(), step=1, encoder=encoder, max_len=args.max_seq_len, run=run,
                                 sft_only_paths=args.data.sft_only_paths)  # fmt: skip
    run.print("\n".join([*encoder.notices, *data.lines]))
    if args.output.inspect:
        return show_records(data.train, encoder, 1, args.output.inspect, run.print)
    collate, accumulation = partial(collate_sft, pad_id=encoder.pad_id), args.schedule.gradient_accumulation_steps
    loader = StepLoader(data.train, collate, micro_batch_size=args.per_device_train_batch_size, seed=args.output.seed,
                        micro_batches_per_step=accumulation, rank=run.rank, world_size=run.world_size)  # fmt: skip
    checkpoints.identify({"--data_path": lambda: data.fingerprint,
                          "--model_name_or_path": partial(model_digest, args.model.path)})  # fmt: skip
    total_steps = args.schedule.planned_steps(loader.steps_per_epoch)

    # model and engine
    model = load_causal_lm(args.model.path, tokenizer, notice=run.print, dropout=args.model.dropout)
    adapt(model, **args.model.adaptation(), only_optimize_lora=args.only_optimize_lora, seed=args.output.seed,
          notice=run.print)  # fmt: skip
    module = CausalLM(model, vocabulary_limit=vocabulary_size(tokenizer))
    engine = create_engine(
        module, OptimizerSettings(**args.model.optimizer(), **args.schedule.optimizer(), total_steps=total_steps), run,
        deepspeed=args.engine.deepspeed, **args.model.holding(),
        micro_batch_size=args.per_device_train_batch_size, micro_batches_per_step=accumulation,
    )  # fmt: skip

    # loop
    log = MetricsLog(args.output.output_dir, run, CURVES, resuming=checkpoints.in_place, **args.output.tracking())
    skipped = SkippedSteps(args.schedule.max_skipped_steps)
    checkpoints.restore({"model": engine}, {"log": log, "skipped": skipped}, total_steps)

    def evaluation() -> dict[str, float]:
        share = {"batch_size": args.per_device_eval_batch_size, "rank": run.rank, "world_size": run.world_size}
        return evaluate(engine, evaluation_batches(data.eval, collate, **share), run)

    diverged = None
    try:
        train(args, run, engine, loader, evaluation, log, skipped, checkpoints)
    except TrainingDiverged as stop:  # the last good weights are saved all the same
        diverged = stop
    if checkpoints.stopped:
        return log.close()

    # export
    if args.output.output_dir:
        state = engine.full_state_dict()

        def write(folder: Path) -> None:
            adapter_base = args.model.path if args.output.save_adapter else None
            save_trained(folder, module, state, tokenizer, encoder.chat_template, adapter_base)
            save_arguments(folder, {"step": "sft", **args.to_dict(), "data_report": data.report})

        if run.is_main:
            write_output(Path(args.output.output_dir), write)
        run.barrier()
        run.print(f"saved the fine-tuned model in {args.output.output_dir}")
    log.close()
    if diverged:
        raise UserError(str(diverged))


def train(args: Step1Arguments, run: Run, engine: Engine, loader: StepLoader, evaluation: Callable[[], dict],
          log: MetricsLog, skipped: SkippedSteps, checkpoints: Checkpoints) -> None:  # fmt: skip
    """The loop."""
    if not checkpoints.resuming:
        log.log(0, evaluation())
    bar = run.progress(checkpoints.total, start=checkpoints.start, description="SFT")
    for step, epoch, batches in loader.steps(checkpoints.start, checkpoints.total):
        batches = [to_device(batch, run.device) for batch in batches]
        tokens = float(run.sum(sum(batch["response_mask"].sum() for batch in batches)))
        with engine.training_mode():
            outcome = optimizer_step(engine, run, batches, partial(batch_loss, engine), tokens)
        figures = {"epoch": epoch, "tokens": tokens} | outcome.metrics()
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

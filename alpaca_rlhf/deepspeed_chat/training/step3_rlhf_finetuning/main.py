"""Step 3: PPO. The fine-tuned model learns to give answers that the reward model scores higher, near where it started.

    python alpaca_rlhf/deepspeed_chat/training/step3_rlhf_finetuning/main.py --data_path data/preferences \\
        --actor_model_name_or_path output/actor --critic_model_name_or_path output/critic --output_dir output/final
    sh run.sh --num_gpus 2 alpaca_rlhf/deepspeed_chat/training/step3_rlhf_finetuning/main.py … --deepspeed

Writes OUTPUT/actor (a plain causal model), OUTPUT/critic and, if asked, OUTPUT/actor_ema. The order of the algorithm is
in ppo_trainer.py, the formulas are in algorithms/.
"""

from functools import partial

from alpaca_rlhf.algorithms.rewards import RewardStats
from alpaca_rlhf.arguments.deepspeed_chat import STEP3, parse_step3
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.schema import Step3Arguments
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.answers import print_answers
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.export import export
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.inputs import check_inputs, sources
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.minibatches import minibatches, plan, text_loader
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import load_reward_function
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.rlhf_engine import MEMORY_ADVICE, RLHFEngine
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import create_prompt_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.inspection import show_records
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import (
    check_same_tokenizer,
    note_other_templates,
)
from alpaca_rlhf.engines.stepping import TrainingDiverged
from alpaca_rlhf.runtime.checkpoint import Checkpoints
from alpaca_rlhf.runtime.curves import Curve
from alpaca_rlhf.runtime.outputs import prepare_output_dir
from alpaca_rlhf.runtime.run import Run, command, start_run
from alpaca_rlhf.runtime.tracking import MetricsLog

CURVES = {
    "train_actor_loss": Curve("Loss of the actor", "clipped policy loss", {"actor_loss": "actor"}),
    "train_cri_loss": Curve("Loss of the critic", "squared error of the values", {"critic_loss": "critic"}),
    "train_average_reward": Curve("Score of the sampled answers", "normalised score",
                                  {"normalized_score": "mean of a rollout"}),
    "kl": Curve("KL to the model that PPO began with", "nats per answer", {"kl": "mean of a rollout"}),
    "length": Curve("Length of the sampled answers", "tokens", {"length": "mean of a rollout"}),
    "entropy": Curve("Entropy of the next token", "nats", {"entropy": "mean of a rollout"}),
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Prompts in, two trained models out."""
    args = parse_step3(argv)
    run = start_run(seed=args.output.seed, **args.engine.to_dict())
    prepare_output_dir(args.output.output_dir)
    checkpoints = Checkpoints(run, args.decisive(), STEP3.flag, **args.output.checkpoints())
    reward_stats = check_inputs(args, run.print)
    reward_function = load_reward_function(args.reward_fn) if args.reward_fn else None

    # text → ids → batches of prompts
    tokenizer = load_tokenizer(args.tokenizer_path or args.actor.path, notice=run.print)
    check_same_tokenizer(tokenizer, args.tokenizer_path or args.actor.path, *args.model_paths())
    encoder = TextEncoder(tokenizer, args.data.template)
    note_other_templates(encoder.chat_template, run.print, *args.model_paths())
    data = create_prompt_dataset(**args.data.reading(), step=3, encoder=encoder, max_len=args.rollout.max_prompt_len,
                                 run=run)  # fmt: skip
    run.print("\n".join([*encoder.notices, *data.lines]))
    if args.output.inspect:
        return show_records(data.train, encoder, 3, args.output.inspect, run.print)
    texts = text_loader(args, run, encoder) if args.unsupervised_dataset_name else None
    checkpoints.identify({"--data_path": lambda: data.fingerprint, **sources(args, texts)})
    prompts = StepLoader(
        data.train, DataCollatorRLHF(encoder.pad_id), micro_batch_size=args.rollout.per_device_batch_size,
        micro_batches_per_step=args.rollout.generation_batches, rank=run.rank, world_size=run.world_size,
        seed=args.output.seed,
    )  # fmt: skip
    rollouts, optimizer_steps = plan(args, len(data.train), run.world_size)
    size = args.rollout_size(run.world_size)
    run.print(f"plan: {rollouts} rollouts of {size} prompts, {optimizer_steps} optimizer steps")

    # four roles
    roles = RLHFEngine(args, run, tokenizer, optimizer_steps=optimizer_steps, reward_function=reward_function,
                       reward_stats=reward_stats if isinstance(reward_stats, RewardStats) else None)  # fmt: skip
    trainer = DeepSpeedPPOTrainer(
        roles, run, args.ppo, seed=args.output.seed, reward_stats=reward_stats,
        minibatches=partial(minibatches, args, run), texts=texts, unsup_coef=args.unsup_coef,
        max_skipped_steps=args.schedule.max_skipped_steps,
    )  # fmt: skip

    # loop
    log = MetricsLog(args.output.output_dir, run, CURVES, resuming=checkpoints.in_place, **args.output.tracking())
    more = {} if roles.ema is None else {"ema": roles.ema}
    models = {"actor": roles.actor.engine, "critic": roles.critic.engine}
    checkpoints.restore(models, {"log": log, "trainer": trainer, **more}, optimizer_steps)
    diverged = train(args, run, prompts, rollouts, trainer, checkpoints, log, encoder)
    if checkpoints.stopped:
        return log.close()

    # export
    if args.output.output_dir:
        export(args, run, roles, tokenizer, encoder.chat_template, data.report)
        run.print(f"saved actor and critic in {args.output.output_dir}")
    log.close()
    if diverged:
        raise UserError(str(diverged))


def train(args: Step3Arguments, run: Run, prompts: StepLoader, rollouts: int, trainer: DeepSpeedPPOTrainer,
          checkpoints: Checkpoints, log: MetricsLog, encoder: TextEncoder) -> TrainingDiverged | None:  # fmt: skip
    """The loop; returns what ended it before its time, if anything but a signal did."""
    bar, diverged = run.progress(rollouts, "PPO", start=trainer.rollouts), None
    for number, epoch, batches in prompts.steps(trainer.rollouts, rollouts):
        rollout = trainer.present or trainer.generate_experience(batches)
        if args.ppo.kl_stop is not None and rollout.figures["kl"] > args.ppo.kl_stop:
            run.print(
                f"the KL to the reference is {rollout.figures['kl']:.1f} nats per answer, beyond --kl_stop "
                f"{args.ppo.kl_stop:g}: the run ends after {trainer.rollouts} of {rollouts} rollouts"
            )
            break
        try:
            figures = trainer.train_rlhf(rollout, checkpoints.after_step)
        except TrainingDiverged as stop:
            figures, diverged = rollout.figures, stop  # the last good weights are saved all the same
        if figures is None:
            break
        figures |= trainer.watch(figures)
        log.log(trainer.optimizer_steps, {"epoch": epoch, "rollout": number} | figures)
        if args.output.print_answers_interval and number % args.output.print_answers_interval == 0:
            print_answers(run, encoder, rollout.experience)
        bar.set_postfix({"score": f"{figures['normalized_score']:.2f}", "kl": f"{figures['kl']:.2f}"})
        bar.update(1)
        if diverged:
            break
    bar.close()
    return diverged


if __name__ == "__main__":
    raise SystemExit(command(main, MEMORY_ADVICE)())

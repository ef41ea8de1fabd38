"""Step 3: PPO. The fine-tuned model learns to give answers that the reward model scores higher, near where it started.

    python alpaca_rlhf/deepspeed_chat/training/step3_rlhf_finetuning/main.py --data_path data/preferences \\
        --actor_model_name_or_path output/actor --critic_model_name_or_path output/critic --output_dir output/final
    sh run.sh --num_gpus 2 alpaca_rlhf/deepspeed_chat/training/step3_rlhf_finetuning/main.py … --deepspeed

Writes OUTPUT/actor (a plain causal model), OUTPUT/critic and, if asked, OUTPUT/actor_ema. The order of the algorithm is
in ppo_trainer.py, the formulas are in algorithms/.
"""

from collections.abc import Callable
from functools import partial

from alpaca_rlhf.algorithms.experience import Experience
from alpaca_rlhf.algorithms.rewards import RewardStats, RunningRewardStats
from alpaca_rlhf.arguments.deepspeed_chat import parse_step3
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.schema import Step3Arguments
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.export import export
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.minibatches import minibatches, plan, text_steps
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
    check_model,
    check_same_tokenizer,
    note_other_shares,
    note_other_templates,
)
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import read_reward_stats
from alpaca_rlhf.engines.stepping import TrainingDiverged
from alpaca_rlhf.runtime.checkpoint import prepare_output_dir
from alpaca_rlhf.runtime.run import Run, command, start_run
from alpaca_rlhf.runtime.tracking import MetricsLog

CURVES = {"train_actor_loss": ["actor_loss"], "train_cri_loss": ["critic_loss"],
          "train_average_reward": ["normalized_score"], "kl": ["kl"], "length": ["length"],
          "entropy": ["entropy"]}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Prompts in, two trained models out."""
    args = parse_step3(argv)
    run = start_run(seed=args.output.seed, **args.engine.to_dict())
    prepare_output_dir(args.output.output_dir)
    reward_stats = check_inputs(args, run.print)
    reward_function = load_reward_function(args.reward_fn) if args.reward_fn else None

    # text → ids → batches of prompts
    tokenizer = load_tokenizer(args.tokenizer_path or args.actor.path, notice=run.print)
    check_same_tokenizer(tokenizer, args.tokenizer_path or args.actor.path, *args.model_paths())
    encoder = TextEncoder(tokenizer, args.data.template)
    note_other_templates(encoder.chat_template, run.print, *args.model_paths())
    data = create_prompt_dataset(
        paths=args.data.paths, step=3, split=args.data.split, seed=args.data.seed, encoder=encoder,
        cache_dir=args.data.cache_dir, max_len=args.rollout.max_prompt_len, run=run, probs=args.data.probs,
        max_samples=args.data.max_samples, workers=args.data.workers,
    )  # fmt: skip
    run.print("\n".join([*encoder.notices, *data.lines]))
    if args.output.inspect:
        return show_records(data.train, encoder, 3, args.output.inspect, run.print)
    prompts = StepLoader(
        data.train, DataCollatorRLHF(encoder.pad_id), micro_batch_size=args.rollout.per_device_batch_size,
        micro_batches_per_step=args.rollout.generation_batches, rank=run.rank, world_size=run.world_size,
        seed=args.output.seed,
    )  # fmt: skip
    rollouts, optimizer_steps = plan(args, len(data.train), run.world_size)
    size = args.rollout_size(run.world_size)
    run.print(f"plan: {rollouts} rollouts of {size} prompts, {optimizer_steps} optimizer steps")

    texts = text_steps(args, run, encoder) if args.unsupervised_dataset_name else None

    # four roles
    roles = RLHFEngine(args, run, tokenizer, optimizer_steps=optimizer_steps, reward_function=reward_function,
                       reward_stats=reward_stats if isinstance(reward_stats, RewardStats) else None)  # fmt: skip
    trainer = DeepSpeedPPOTrainer(
        roles, run, args.ppo, seed=args.output.seed, reward_stats=reward_stats,
        minibatches=partial(minibatches, args, run), texts=texts, unsup_coef=args.unsup_coef,
        max_skipped_steps=args.schedule.max_skipped_steps,
    )  # fmt: skip

    # loop
    log = MetricsLog(args.output.output_dir, run, tensorboard=args.output.enable_tensorboard,
                     tensorboard_path=args.output.tensorboard_path, curves=CURVES)  # fmt: skip
    bar, round_index, diverged = run.progress(rollouts, "PPO"), 0, None
    for epoch in range(args.schedule.num_train_epochs):
        for batches in prompts.epoch(epoch):
            if round_index == rollouts or diverged:
                break
            experience, figures = trainer.generate_experience(batches, round_index)
            try:
                figures |= trainer.train_rlhf(experience, round_index)
            except TrainingDiverged as stop:
                diverged = stop  # the last good weights are saved all the same
            figures |= trainer.watch(figures)
            round_index += 1
            log.log(trainer.optimizer_steps, {"epoch": epoch, "rollout": round_index} | figures)
            if args.output.print_answers_interval and round_index % args.output.print_answers_interval == 0:
                print_answers(run, encoder, experience)
            bar.set_postfix({"score": f"{figures['normalized_score']:.2f}", "kl": f"{figures['kl']:.2f}"})
            bar.update(1)
    bar.close()

    # export
    if args.output.output_dir:
        export(args, run, roles, tokenizer, encoder.chat_template, data.report)
        run.print(f"saved actor and critic in {args.output.output_dir}")
    log.close()
    if diverged:
        raise UserError(str(diverged))


def check_inputs(args: Step3Arguments, notice: Callable[[str], None]) -> RewardStats | RunningRewardStats | None:
    """Refuse what cannot work before a model loads; returns what scores are normalised by."""
    needed = args.rollout.max_prompt_len + args.rollout.max_answer_len
    critic = (args.actor.path, "causal_lm") if args.critic.path is None else (args.critic.path, "reward_model")
    for (path, kind), model in (((args.actor.path, "causal_lm"), args.actor), (critic, args.critic)):
        parts = f"{args.rollout.max_prompt_len} prompt + {args.rollout.max_answer_len} answer tokens"
        check_model(path, kind, needed_positions=needed, parts=parts,
                    lora_module_names=model.lora_module_names if model.lora_dim else None)  # fmt: skip
    note_other_shares(args.data.paths, args.data.split, args.data.seed, notice, *args.model_paths())
    if args.ppo.reward_normalization == "saved":
        return read_reward_stats(args.critic.path)
    return RunningRewardStats() if args.ppo.reward_normalization == "running" else None


def print_answers(run: Run, encoder: TextEncoder, experience: Experience, count: int = 2) -> None:
    """A few answers of the rollout just made, with their scores."""
    for row in range(min(count, len(experience))):
        prompt = experience.sequences[row, : experience.prompt_length]
        prompt = prompt[experience.attention_mask[row, : experience.prompt_length].bool()].tolist()
        answer = experience.responses[row][experience.response_mask[row].bool()].tolist()
        score = float(experience.scores[row])
        run.print(f"--- score {score:.3f}\n{encoder.decode(prompt)}\n>>> {encoder.decode(answer)}")


if __name__ == "__main__":
    raise SystemExit(command(main, MEMORY_ADVICE)())

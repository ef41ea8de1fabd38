"""What step 3 is given: refused before a model loads where it cannot work, and identified for a resume."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial

from alpaca_rlhf.algorithms.rewards import RewardStats, RunningRewardStats
from alpaca_rlhf.arguments.schema import Step3Arguments
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import reward_function_digest
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import StepLoader
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model, note_other_shares
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_stats import read_reward_stats, reward_stats_digest
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import model_digest


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


def sources(args: Step3Arguments, texts: StepLoader | None) -> dict[str, Callable[[], str]]:
    """What else the result depends on: option → digest. ``texts``: the plain text beside PPO."""
    saved = args.ppo.reward_normalization == "saved" and args.critic.path is not None
    found = {
        "--actor_model_name_or_path": partial(model_digest, args.actor.path),
        "--critic_model_name_or_path": partial(model_digest, args.critic.path) if args.critic.path else None,
        "--reward_normalization saved": partial(reward_stats_digest, args.critic.path) if saved else None,
        "--unsupervised_dataset_name": partial(_items_digest, texts.dataset) if texts is not None else None,
        "--reward_fn": partial(reward_function_digest, args.reward_fn) if args.reward_fn else None,
    }
    return {option: digest for option, digest in found.items() if digest is not None}


def _items_digest(items: Sequence[dict]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item["input_ids"]).encode())
    return digest.hexdigest()

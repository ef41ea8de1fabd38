"""What step 3 leaves behind: the actor, the critic and, if asked, the averaged actor."""

from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.schema import Step3Arguments
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.rlhf_engine import RLHFEngine
from alpaca_rlhf.deepspeed_chat.training.utils.model.trained import save_trained
from alpaca_rlhf.runtime.outputs import save_arguments, write_output
from alpaca_rlhf.runtime.run import Run


def export(args: Step3Arguments, run: Run, roles: RLHFEngine, tokenizer: Any, chat_template: str, report: dict) -> None:
    """OUTPUT/actor, OUTPUT/critic and OUTPUT/actor_ema, each complete and readable alone."""
    actor, critic = roles.actor, roles.critic
    policy, value = actor.engine.full_state_dict(), critic.engine.full_state_dict()
    outputs = {"actor": (actor.module, policy, args.actor), "critic": (critic.module, value, args.critic)}
    if roles.ema is not None:
        outputs["actor_ema"] = (actor.module, roles.ema.averaged(policy), args.actor)
    for name, (module, state, settings) in outputs.items() if run.is_main else ():
        keep = args.output.save_adapter and settings.lora_dim and name != "critic"  # whose offset no adapter holds
        adapter_base = settings.path if keep else None

        def write(folder: Path, name=name, module=module, state=state, adapter_base=adapter_base) -> None:
            save_trained(folder, module, state, tokenizer, chat_template, adapter_base)
            save_arguments(folder, {"step": f"ppo_{name}", **args.to_dict(), "data_report": report})

        write_output(Path(args.output.output_dir) / name, write)
    run.barrier()

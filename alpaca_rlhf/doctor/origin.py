"""Which step wrote a directory, when, with which settings, and whether all of it is there."""

import json
import math
from pathlib import Path
from typing import Any

from alpaca_rlhf.doctor.page import Page, number

STEPS = {
    "sft": "step 1 (SFT)",
    "reward_model": "step 2 (reward model)",
    "ppo_actor": "step 3 (PPO)",
    "ppo_actor_ema": "step 3 (PPO)",
    "ppo_critic": "step 3 (PPO)",
}
_ROLES = {"ppo_actor": ": the actor", "ppo_actor_ema": ": the averaged actor", "ppo_critic": ": the critic"}
_PARTS = ("actor", "critic", "actor_ema")  # of step 3's output
_FIGURES = ("loss", "eval_perplexity", "eval_accuracy", "score", "normalized_score", "kl", "length", "ended_share",
            "clip_share", "explained_variance", "alarms")  # fmt: skip


def models_of(path: str, page: Page) -> list[str]:
    """``path`` itself, or the models in it where it is the output directory of step 3."""
    folder = Path(path)
    if not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return [path]
    parts = [str(folder / part) for part in _PARTS if (folder / part / "config.json").is_file()]
    if not parts:
        return [path]
    page.title(f"{path}: an output of step 3")
    page.fact("models", ", ".join(Path(part).name for part in parts))
    for name in ("actor", "critic"):
        if str(folder / name) not in parts:
            page.problem(f"{path} has no {name}, so that step 3 did not finish writing; run it again")
    _describe_figures(folder, page)
    return parts


def describe_origin(path: str, before: dict[str, Any], page: Page) -> dict[str, Any]:
    """Say who wrote the directory; returns its training_arguments.json, {} where there is none.

    ``before``: those of the model described before it; settings of the same run are not repeated.
    """
    folder = Path(path)
    if not folder.is_dir():
        page.fact("made by", "others: a model of the hub")
        return {}
    arguments = _read_arguments(folder, page)
    step = arguments.get("step")
    if step in STEPS:
        when = str(arguments.get("finished", "an unknown day"))[:16].replace("T", " ")
        maker = STEPS[step] + _ROLES.get(step, "")
        page.fact("made by", f"{maker} on {when}", _completeness(folder, page))
        own = {"step": "", "finished": ""}
        same = arguments | own == before | own
        page.fact("settings", *(["those of the same run as above"] if same else _settings(arguments)))
        _describe_figures(folder, page)
    elif (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        page.fact("made by", "a LoRA adapter only; what follows is said of its base model with the adapter merged")
    else:
        page.fact("made by", "others: it has no training_arguments.json of these programs")
    if (folder / ".complete").is_dir():
        page.problem(
            f"a newer complete output waits in {folder / '.complete'}, because the program that wrote it was stopped "
            f"while moving it; start any step with --output_dir {path} to have it put in place"
        )
    if (folder / ".writing").is_dir():
        page.fact("", "the folder .writing is what an interrupted save left; it can be removed")
    return arguments


def recorded(arguments: dict[str, Any], dotted: str, default: Any = None) -> Any:
    """``arguments["a"]["b"]`` for ``a.b``; ``default`` where it was not recorded."""
    value: Any = arguments
    for name in dotted.split("."):
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def _read_arguments(folder: Path, page: Page) -> dict[str, Any]:
    file = folder / "training_arguments.json"
    if not file.is_file():
        return {}
    try:
        arguments = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        page.problem(f"{file} cannot be read ({error}): the output is damaged; run the step again")
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _completeness(folder: Path, page: Page) -> str:
    manifest = folder / ".output_files.json"
    if not manifest.is_file():
        return "its list of files is gone, so it cannot be told whether all of them are there"
    names = json.loads(manifest.read_text(encoding="utf-8"))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        page.problem(f"{folder} is not complete: {', '.join(missing)} is missing; copy it again, or run the step again")
        return f"not complete: {len(missing)} of its {len(names)} files are missing"
    return f"complete: all {len(names)} files of the output are there"


def _settings(arguments: dict[str, Any]) -> list[str]:
    """The settings that decide most, in one sentence each."""

    def get(dotted: str) -> Any:
        return recorded(arguments, dotted, "?")

    def trained(model: str) -> str:
        rank = recorded(arguments, f"{model}.lora_dim", 0)
        alone = " alone" if recorded(arguments, "only_optimize_lora", False) else " and all weights"
        what = f"LoRA of rank {rank}{alone}" if rank else "all weights"
        return f"learning rate {get(f'{model}.learning_rate')}, {what}"

    used, chosen = get("data_report.train.used"), get("data_report.train.chosen")
    split = ",".join(number(share) for share in recorded(arguments, "data.split", []))
    paths = ", ".join([*recorded(arguments, "data.paths", ["?"]), *recorded(arguments, "data.sft_only_paths", [])])
    data = f"data {paths} (split {split}): {used} of {chosen} records; seed {get('output.seed')}"
    schedule = f"{get('schedule.num_train_epochs')} epochs".replace("1 epochs", "1 epoch")
    if recorded(arguments, "schedule.max_steps") is not None:
        schedule += f", at most {get('schedule.max_steps')} steps"
    if "rollout" not in arguments:
        batch = f"{get('per_device_train_batch_size')} × {get('schedule.gradient_accumulation_steps')}"
        return [
            f"from {get('model.path')}; {trained('model')}; {schedule}, batches of {batch}, at most "
            f"{get('max_seq_len')} tokens",
            data,
        ]
    prompts = f"{get('rollout.per_device_batch_size')} × {get('rollout.generation_batches')}"
    return [
        f"actor from {get('actor.path')}; {trained('actor')}",
        f"critic from {recorded(arguments, 'critic.path') or 'the actor'}; {trained('critic')}",
        f"{schedule}; rollouts of {prompts} prompts of at most {get('rollout.max_prompt_len')} tokens, answers of at "
        f"most {get('rollout.max_answer_len')}; {get('ppo.epochs')} PPO epochs; KL coefficient {get('ppo.kl_coef')}, "
        f"scores normalised: {get('ppo.reward_normalization')}",
        data,
    ]


def _describe_figures(folder: Path, page: Page) -> None:
    """The last logged value of the figures that matter most."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return
    last: dict[str, float] = {}
    record: dict[str, Any] = {}
    for number_of_line, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            page.fact("last figures", f"metrics.jsonl is damaged at line {number_of_line}")
            return
        last |= {name: record[name] for name in _FIGURES if isinstance(record.get(name), int | float)}
    figures = [f"{name} {number(value)}" for name, value in last.items() if math.isfinite(value)]
    page.fact("last figures", f"step {record.get('step', '?')}: {', '.join(figures)}")
    holding = [name.removeprefix("alarm/") for name in record if name.startswith("alarm/")]
    if holding:
        page.fact("", f"alarms that held at the end: {', '.join(holding)}; see the log of the run")

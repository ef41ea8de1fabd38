"""What the demo found: figures by the gold judge, which training never saw, curves, and answers side by side."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_rlhf.algorithms.evaluation_metrics import wilson_interval
from alpaca_rlhf.demo.gold import gold_score
from alpaca_rlhf.runtime import html_page
from alpaca_rlhf.runtime.curves import pictures_of

SIDE_BY_SIDE = 10
STEPS = {"sft": "Supervised fine-tuning", "reward_model": "Reward model", "rlhf": "PPO"}  # by folder
SHARES = ("ended", "list")  # of the answers, with Wilson's interval
FIGURES = ("mean_tokens", "ended_share", "distinct_2", "list_share", "kl")
CAPTIONS = {  # of the curves, in the order in which they are shown
    "loss": "Loss on the tokens of the answers and their ends, which alone are trained.",
    "perplexity": "Between how many tokens the model hesitates on average, on answers that it never saw.",
    "learning_rate": "The learning rate rises first and then falls to nothing.",
    "eval_acc": "How often the reward model prefers the answer that people chose, on pairs that it never saw.",
    "train_loss": "Loss of the reward model: −log of the probability that it gives to people's choice.",
    "train_reward": "What the reward model gives to chosen and to rejected answers.",
    "train_reward_diff": "By how much chosen answers are ahead of rejected ones.",
    "train_average_reward": "What the reward model gives to the answers that PPO samples: this is what PPO raises.",
    "length": "Length of the sampled answers. Longer ones hold more of what the reward model likes.",
    "kl": "How far the model is from the SFT model; a penalty on this holds it back.",
    "entropy": "How uncertain the model is of its next token: it falls as the model settles on what scores well.",
    "train_actor_loss": "Loss of the actor. It hovers around 0 and says little by itself: look at the reward.",
    "train_cri_loss": "Loss of the critic: how badly it foretells what an answer will earn.",
}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a step's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def last(metrics: list[dict[str, Any]], name: str) -> float:
    """The last value logged under ``name``."""
    return [record[name] for record in metrics if record.get(name) is not None][-1]


def step_result(name: str, output: Path) -> str:
    """One program's result in one line."""
    if name == "sft":
        perplexities = [r["eval_perplexity"] for r in read_metrics(output / "sft") if "eval_perplexity" in r]
        return f"perplexity {perplexities[0]:.2f} before, {perplexities[-1]:.2f} after"
    if name == "reward_model":
        metrics = read_metrics(output / "reward_model")
        return f"accuracy {last(metrics, 'eval_accuracy'):.3f} on {last(metrics, 'eval_count'):.0f} held-out pairs"
    if name == "ppo":
        metrics = read_metrics(output / "rlhf")
        before, after = metrics[0]["normalized_score"], metrics[-1]["normalized_score"]
        return f"normalised score {before:.2f} → {after:.2f}, KL {last(metrics, 'kl'):.2f}"
    return "done"


def labeller_accuracy(pairs: Path) -> float:
    """How often the gold rule itself agrees with the noisy labels of the held-out pairs; a tie is not correct."""
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    return statistics.fmean(
        gold_score(row["prompt"], row["chosen"]) > gold_score(row["prompt"], row["rejected"]) for row in rows
    )


def build_report(
    output: Path, data: Path, model: str, seed: int, seconds: dict[str, float],
    commands: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All figures of the demo, and a few answers; ``seconds`` and ``commands``: by the name of the program;
    without commands the page shows none."""
    comparison = json.loads((output / "comparison" / "comparison.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (data / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows[: len(comparison["prompts"])]]
    sides: dict[str, Any] = {}
    for side in ("sft", "rlhf"):
        answers = comparison["models"][side]["answers"]
        gold = [gold_score(prompt, answer["text"]) for prompt, answer in zip(prompts, answers, strict=True)]
        own = {key: comparison["models"][side][key] for key in FIGURES}
        sides[side] = {"gold_mean": statistics.fmean(gold), "gold_std": statistics.pstdev(gold), **own,
                       "gold_interval": list(mean_interval(gold)), "gold": gold}  # fmt: skip
        for share in SHARES:
            sides[side][f"{share}_interval"] = list(wilson_interval(own[f"{share}_share"] * len(gold), len(gold)))
    gold_pairs = list(zip(sides["rlhf"].pop("gold"), sides["sft"].pop("gold"), strict=True))
    wins = sum((a > b) + 0.5 * (a == b) for a, b in gold_pairs)
    sides["rlhf"]["win_rate"] = wins / len(gold_pairs)
    sides["rlhf"]["win_rate_interval"] = list(wilson_interval(wins, len(gold_pairs)))
    reward_model, ppo = read_metrics(output / "reward_model"), read_metrics(output / "rlhf")
    shown = [
        {"prompt": prompts[i], **{side: comparison["models"][side]["answers"][i]["text"] for side in sides},
         "gold": {"rlhf": gold_pairs[i][0], "sft": gold_pairs[i][1]}}
        for i in range(min(SIDE_BY_SIDE, len(prompts)))
    ]  # fmt: skip
    return {
        "model": model,
        "seed": seed,
        "prompts": len(prompts),
        "sft": {**sides["sft"], "perplexity": last(read_metrics(output / "sft"), "eval_perplexity")},
        "reward_model": {
            "accuracy": last(reward_model, "eval_accuracy"),
            "count": int(last(reward_model, "eval_count")),
            "labeller_accuracy": labeller_accuracy(data / "preferences" / "test.jsonl"),
        },
        "rlhf": {**sides["rlhf"], "answers_sampled": int(sum(record["answers"] for record in ppo))},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "results": {name: step_result(name, output) for name in seconds if name != "total"},
        "commands": dict(commands or {}),
        "answers": shown,
    }


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean: 1.96 standard errors to either side; the value itself where there is only one."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean - 1.96 * error, mean + 1.96 * error


def table_rows(report: dict[str, Any]) -> list[list[str]]:
    """SFT against RLHF, the head first; 95 % intervals in brackets."""
    sft, rlhf = report["sft"], report["rlhf"]
    rows = [
        ("gold score, mean", "gold_mean", "gold_interval"), ("gold score, std", "gold_std", None),
        ("tokens per answer", "mean_tokens", None), ("share that end by themselves", "ended_share", "ended_interval"),
        ("distinct bigrams", "distinct_2", None), ("share of numbered lists", "list_share", "list_interval"),
        ("KL to SFT, nats per answer", "kl", None),
    ]  # fmt: skip
    wins = with_interval(rlhf, "win_rate", "win_rate_interval")
    return [
        ["held-out prompts", "SFT", "RLHF"],
        *([title, with_interval(sft, *keys), with_interval(rlhf, *keys)] for title, *keys in rows),
        ["wins against SFT (ties count half)", "–", wins],
    ]


def with_interval(figures: dict[str, Any], key: str, interval: str | None) -> str:
    """``0.828 (0.782 to 0.867)``"""
    if interval is None:
        return f"{figures[key]:.3f}"
    low, high = figures[interval]
    return f"{figures[key]:.3f} ({low:.3f} to {high:.3f})"


def reward_model_line(report: dict[str, Any]) -> str:
    """How good the reward model is, and how good it could be."""
    judge = report["reward_model"]
    return (f"Reward model: {judge['accuracy']:.3f} right on {judge['count']} held-out pairs "
            f"(the gold rule itself: {judge['labeller_accuracy']:.3f}, the labels are noisy).")  # fmt: skip


def closing_table(report: dict[str, Any]) -> str:
    """SFT against RLHF as a Markdown table, then the reward model and the times."""
    head, *rows = ["| " + " | ".join(row) + " |" for row in table_rows(report)]
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
    return "\n".join([head, "|---|---|---|", *rows, "", reward_model_line(report), f"Seconds: {seconds}."])


def asked(prompt: str) -> str:
    """A prompt as a person reads it: one question by itself, several turns with their roles."""
    text = prompt.strip().removesuffix("Assistant:").strip()
    return text if "\n\nAssistant:" in text else text.removeprefix("Human:").strip()


def write_report(output: Path, report: dict[str, Any]) -> None:
    """report.json, report.md and report.html in ``output``."""
    (output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    parts = ["# SFT against RLHF on the demo's world\n", closing_table(report), ""]
    for shown in report["answers"]:
        parts.append("## " + " ⏎ ".join(line for line in asked(shown["prompt"]).splitlines() if line) + "\n")
        for side in ("sft", "rlhf"):
            quoted = "\n".join("> " + (line or " ") for line in shown[side].splitlines()) or "> (empty)"
            parts.append(f"**{side.upper()}** (gold {shown['gold'][side]:.2f})\n\n{quoted}\n")
    (output / "report.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    (output / "report.html").write_text(report_page(output, report), encoding="utf-8")


def report_page(output: Path, report: dict[str, Any]) -> str:
    """The whole run as one self-contained page: what was done, figures, curves, answers side by side, settings."""
    done = [[name, result, f"{report['seconds'][name]:.0f}"] for name, result in report["results"].items()]
    parts = [
        html_page.paragraph(
            "A base model was fine-tuned on conversations (SFT); a reward model learned from pairs of answers which "
            "one people prefer; PPO trained the fine-tuned model against that reward model (RLHF). The gold rule that "
            "judges here was never part of the training."
        ),
        html_page.code(f"sh run.sh demo --model {report['model']} --seed {report['seed']}"),
        html_page.heading("SFT against RLHF"),
        html_page.table(table_rows(report)),
        html_page.paragraph(f"{report['prompts']} prompts that no step trained on; 95 % intervals in brackets. "
                            f"{reward_model_line(report)}"),
        html_page.heading("What was done"),
        html_page.table([["program", "result", "seconds"], *done]),
    ]
    if report["commands"]:
        parts.append(html_page.folded("The commands", html_page.code("\n\n".join(report["commands"].values()))))
    for folder, title in STEPS.items():
        curves = pictures_of(output / folder, order=tuple(CAPTIONS))
        if curves:
            captioned = {CAPTIONS.get(name, name.replace("_", " ")): png for name, png in curves.items()}
            parts += [html_page.heading(f"Curves: {title}"), html_page.pictures(captioned)]
    parts.append(html_page.heading(f"{len(report['answers'])} prompts, side by side"))
    for shown in report["answers"]:
        sides = {f"{side.upper()} (gold {shown['gold'][side]:.2f})": shown[side] for side in ("sft", "rlhf")}
        parts += [html_page.prompt(asked(shown["prompt"])), html_page.sides(sides)]
    return html_page.page("SFT against RLHF on the demo's world", [*parts, *settings_parts(output)])


def settings_parts(output: Path) -> list[str]:
    """The settings of the three steps, each folded."""
    parts = [html_page.heading("Settings")]
    for folder, title in STEPS.items():
        file = output / folder / ("actor" if folder == "rlhf" else "") / "training_arguments.json"
        if file.is_file():
            settings = json.loads(file.read_text(encoding="utf-8"))
            settings.pop("data_report", None)
            parts.append(html_page.folded(title, html_page.table([["setting", "value"], *flat(settings)])))
    return parts


def flat(settings: dict[str, Any], prefix: str = "") -> Iterator[list[str]]:
    """Nested settings as rows: dotted name, value."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield [prefix + name, json.dumps(value, ensure_ascii=False)]

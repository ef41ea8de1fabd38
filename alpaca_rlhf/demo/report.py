"""What the demo found: figures by the gold judge, which training never saw, and answers side by side."""

import json
import statistics
from pathlib import Path
from typing import Any

from alpaca_rlhf.demo.gold import gold_score

SIDE_BY_SIDE = 5
FIGURES = ("mean_tokens", "ended_share", "distinct_2", "list_share", "kl")


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


def build_report(output: Path, data: Path, model: str, seed: int, seconds: dict[str, float]) -> dict[str, Any]:
    """All figures of the demo, and a few answers."""
    comparison = json.loads((output / "comparison" / "comparison.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (data / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows[: len(comparison["prompts"])]]
    sides: dict[str, Any] = {}
    for side in ("sft", "rlhf"):
        answers = comparison["models"][side]["answers"]
        gold = [gold_score(prompt, answer["text"]) for prompt, answer in zip(prompts, answers, strict=True)]
        own = {key: comparison["models"][side][key] for key in FIGURES}
        sides[side] = {"gold_mean": statistics.fmean(gold), "gold_std": statistics.pstdev(gold), **own, "gold": gold}
    gold_pairs = list(zip(sides["rlhf"].pop("gold"), sides["sft"].pop("gold"), strict=True))
    sides["rlhf"]["win_rate"] = statistics.fmean((a > b) + 0.5 * (a == b) for a, b in gold_pairs)
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
        "answers": shown,
    }


def closing_table(report: dict[str, Any]) -> str:
    """SFT against RLHF as a Markdown table, then the reward model and the times."""
    sft, rlhf, judge = report["sft"], report["rlhf"], report["reward_model"]
    rows = [
        ("gold score, mean", "gold_mean"), ("gold score, std", "gold_std"), ("tokens per answer", "mean_tokens"),
        ("share that end by themselves", "ended_share"), ("distinct bigrams", "distinct_2"),
        ("share of numbered lists", "list_share"), ("KL to SFT, nats per answer", "kl"),
    ]  # fmt: skip
    lines = ["| held-out prompts | SFT | RLHF |", "|---|---|---|"]
    lines += [f"| {title} | {sft[key]:.3f} | {rlhf[key]:.3f} |" for title, key in rows]
    lines.append(f"| wins against SFT (ties count half) | – | {rlhf['win_rate']:.3f} |")
    lines.append("")
    lines.append(f"Reward model: {judge['accuracy']:.3f} right on {judge['count']} held-out pairs "
                 f"(the gold rule itself: {judge['labeller_accuracy']:.3f}, the labels are noisy).")  # fmt: skip
    lines.append("Seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items()) + ".")
    return "\n".join(lines)


def write_report(output: Path, report: dict[str, Any]) -> None:
    """report.json and report.md in ``output``."""
    (output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    parts = ["# SFT against RLHF on the demo's world\n", closing_table(report), ""]
    for shown in report["answers"]:
        parts.append("## " + " ⏎ ".join(line for line in shown["prompt"].strip().splitlines() if line) + "\n")
        for side in ("sft", "rlhf"):
            quoted = "\n".join("> " + (line or " ") for line in shown[side].splitlines()) or "> (empty)"
            parts.append(f"**{side.upper()}** (gold {shown['gold'][side]:.2f})\n\n{quoted}\n")
    (output / "report.md").write_text("\n".join(parts) + "\n", encoding="utf-8")

"""A reward model's report as files: JSON with everything, Markdown and HTML to read, pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_rlhf.evaluation.figures import markdown_table, with_interval
from alpaca_rlhf.evaluation.pair_figures import ScoredPair, group_name
from alpaca_rlhf.evaluation.pictures import draw_histograms, draw_reliability, draw_shares
from alpaca_rlhf.runtime import html_page

CAPTIONS = {  # of the pictures, by the names of their files
    "reliability": "Calibration: on the dashed line it is right as often as it is sure; below it is too sure.",
    "scores": "The farther the two lie apart, the better it tells them apart.",
    "gaps": "Left of 0 it prefers the answer that people rejected.",
    "accuracy_by_length_difference": "Low on the left and high on the right: it goes by length.",
    "accuracy_by_gap": "It should be right more often where its scores differ more.",
}


def write_reward_report(folder: Path, report: Mapping[str, Any], pairs: Sequence[ScoredPair]) -> None:
    """reward_report.json, .md and .html and pictures/*.png in ``folder``."""
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "reward_report.json").write_text(text + "\n", encoding="utf-8")
    drawn = draw_pictures(folder / "pictures", report, pairs)
    (folder / "reward_report.md").write_text(markdown(report, drawn), encoding="utf-8")
    (folder / "reward_report.html").write_text(html(report, drawn), encoding="utf-8")


def draw_pictures(folder: Path, report: Mapping[str, Any], pairs: Sequence[ScoredPair]) -> dict[str, Path]:
    """Reliability, score and gap histograms, accuracy by length difference and by gap; returns caption → file."""
    paths = {name: folder / f"{name}.png" for name in CAPTIONS}
    draw_reliability(paths["reliability"], "How often it is right, by how sure it is", report["reliability"])
    sides = {"chosen": [p.chosen_score for p in pairs], "rejected": [p.rejected_score for p in pairs]}
    draw_histograms(paths["scores"], "Scores of the chosen and the rejected answers", "score", sides)
    gaps = {"all pairs": [pair.gap for pair in pairs]}
    draw_histograms(paths["gaps"], "Score differences", "score of the chosen - score of the rejected", gaps)
    for name, title, label, digits in (
        ("length_difference", "Accuracy by difference in length", "tokens of the chosen - tokens of the rejected", 0),
        ("gap", "Accuracy by size of the score difference", "size of the score difference", 2),
    ):
        groups = {group_name(group, digits): (group["accuracy"], group["interval"]) for group in report[f"by_{name}"]}
        draw_shares(paths[f"accuracy_by_{name}"], title, label, groups, even=(0.5, "guessing"))
    return {CAPTIONS[name]: path for name, path in paths.items()}


def summary_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The main figures with what they mean."""
    correlation = report["length_correlation"]
    return [
        ["figure", "value", "meaning"],
        ["accuracy", with_interval(report["accuracy"], report["accuracy_interval"]),
         f"pairs whose chosen answer scores higher; {report['ties']} ties are not correct; 95 % interval of Wilson"],
        ["pairs", str(report["count"]), report["population"]],
        ["loss", f"{report['loss']:.3f}", "mean of -log sigmoid(gap), as step 2 trains it; 0.693 knows nothing"],
        ["calibration error", f"{report['expected_calibration_error']:.3f}",
         "sum over bins of (pairs of the bin / pairs) |accuracy - confidence|, confidence = sigmoid(|gap|)"],
        ["mean confidence", f"{report['mean_confidence']:.3f}", "what the accuracy would be if it were calibrated"],
        ["mean gap", f"{report['mean_gap']:.3f}", "score of the chosen - score of the rejected"],
        ["score and length", "–" if correlation is None else f"{correlation:.3f}", "Pearson's r over all answers"],
        ["longer is chosen", f"{report['longer_is_chosen']:.3f}", "accuracy of taking the longer one; equal is half"],
    ]  # fmt: skip


def group_rows(title: str, groups: Sequence[Mapping[str, Any]], digits: int) -> list[list[str]]:
    """A table of accuracies by group."""
    rows = [[group_name(g, digits), str(g["count"]), with_interval(g["accuracy"], g["interval"])] for g in groups]
    return [[title, "pairs", "accuracy"], *rows]


def reliability_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The reliability curve as a table."""
    rows = [[f"{b['confidence']:.3f}", str(b["size"]), f"{b['accuracy']:.3f}"] for b in report["reliability"]]
    return [["mean confidence of the bin", "pairs", "accuracy"], *rows]


def all_tables(report: Mapping[str, Any]) -> list[list[list[str]]]:
    """The tables of both pages."""
    return [
        summary_rows(report),
        group_rows("tokens of chosen - rejected", report["by_length_difference"], 0),
        group_rows("size of the score difference", report["by_gap"], 2),
        reliability_rows(report),
    ]


def markdown(report: Mapping[str, Any], drawn: Mapping[str, Path]) -> str:
    """Tables, pictures, the worst mistakes."""
    parts = [f"# Reward model {report['model']}\n"]
    parts += [markdown_table(rows) + "\n" for rows in all_tables(report)]
    parts += [f"![{caption}](pictures/{path.name})\n" for caption, path in drawn.items()]
    parts.append(f"## The {len(report['mistakes'])} worst mistakes\n")
    for pair in report["mistakes"]:
        parts.append(f"### {pair['record']}, gap {pair['gap']:.3f}\n\n{_quoted(pair['prompt'])}\n")
        for side in ("chosen", "rejected"):
            parts.append(f"**{side}** ({pair[f'{side}_score']:.3f})\n\n{_quoted(pair[side])}\n")
    return "\n".join(parts)


def html(report: Mapping[str, Any], drawn: Mapping[str, Path]) -> str:
    """The same as one self-contained page."""
    main, *by_group = (html_page.table(rows) for rows in all_tables(report))
    parts = [main, html_page.pictures({caption: path.read_bytes() for caption, path in drawn.items()}),
             html_page.folded("The figures of the pictures", "\n".join(by_group))]  # fmt: skip
    parts.append(html_page.heading(f"The {len(report['mistakes'])} worst mistakes"))
    for pair in report["mistakes"]:
        texts = {f"{side} ({pair[f'{side}_score']:.3f})": pair[side] for side in ("chosen", "rejected")}
        parts += [html_page.heading(f"{pair['record']}, gap {pair['gap']:.3f}", 3), html_page.prompt(pair["prompt"]),
                  html_page.sides(texts)]  # fmt: skip
    return html_page.page(f"Reward model {report['model']}", parts)


def _quoted(text: str) -> str:
    return "\n".join("> " + line.replace("<", "\\<") for line in text.splitlines()) or "> (empty)"

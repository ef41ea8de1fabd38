"""A comparison as files: JSON with everything, Markdown and HTML with the figures and the first answers, pictures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alpaca_rlhf.evaluation.figures import MEANING, markdown_table, table_rows
from alpaca_rlhf.evaluation.pictures import draw_histograms, draw_shares
from alpaca_rlhf.runtime import html_page


def write_comparison(folder: Path, comparison: Mapping[str, Any], shown: int) -> None:
    """comparison.json, .md and .html and pictures/*.png in ``folder``; ``shown``: prompts in the two pages."""
    text = json.dumps(comparison, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "comparison.json").write_text(text + "\n", encoding="utf-8")
    drawn = draw_pictures(folder / "pictures", comparison["models"])
    (folder / "comparison.md").write_text(markdown(comparison, shown, drawn), encoding="utf-8")
    (folder / "comparison.html").write_text(html(comparison, shown, drawn), encoding="utf-8")


def draw_pictures(folder: Path, results: Mapping[str, dict]) -> dict[str, Path]:
    """Lengths, and for each judge scores and win rates; returns caption → file."""
    drawn = {"How long the answers are; the end token counts": folder / "tokens.png"}
    lengths = {name: [float(len(answer["ids"])) for answer in result["answers"]] for name, result in results.items()}
    draw_histograms(folder / "tokens.png", "Tokens of an answer", "tokens", lengths)
    first, *others = results
    for number, judge in enumerate(results[first]["judged"], start=1):
        path = drawn[f"What {judge} gives to the answers"] = folder / f"scores_{number}.png"
        scores = {name: [answer["scores"][judge] for answer in result["answers"]] for name, result in results.items()}
        draw_histograms(path, f"Scores by {judge}", "score", scores)
        judged = {name: results[name]["judged"][judge] for name in others}
        if not judged:
            continue
        shares = {}
        for name, found in judged.items():
            shares[name] = found["win_rate"], found["win_rate_interval"]
            shares[f"{name}, equal length"] = found["length_controlled_win_rate"], found["length_controlled_interval"]
        caption = f"How often {judge} scores an answer higher than that of {first}, and what is left at equal length"
        path = drawn[caption] = folder / f"wins_{number}.png"
        draw_shares(path, f"Wins against {first} by {judge}", "", shares, even=(0.5, "as good"))
    return drawn


def markdown(comparison: Mapping[str, Any], shown: int, drawn: Mapping[str, Path]) -> str:
    """The table, what its columns mean, the pictures, then the first answers under their prompts."""
    results = comparison["models"]
    parts = [markdown_table(table_rows(results)), ""]
    parts += [f"- {name}: {meaning}" for name, meaning in used_meanings(results).items()]
    parts += ["", *(f"![{_plain(caption)}](pictures/{path.name})\n" for caption, path in drawn.items())]
    for index, turns in enumerate(comparison["conversations"][:shown]):
        parts.append(f"## Prompt {index + 1}\n\n{_quoted(conversation(turns))}\n")
        for name, result in results.items():
            answer = result["answers"][index]
            parts.append(f"**{_plain(name)}**{scores_of(answer)}\n\n{_quoted(answer['text'])}\n")
    return "\n".join(parts) + "\n"


def html(comparison: Mapping[str, Any], shown: int, drawn: Mapping[str, Path]) -> str:
    """The same as one self-contained page, the table with a column a model."""
    results, made = comparison["models"], comparison["settings"]
    count, many = len(comparison["prompts"]), min(shown, len(comparison["prompts"]))
    meanings = used_meanings(results).items()
    settings = ", ".join(f"{name} {value}" for name, value in made.items())
    parts = [
        html_page.paragraph(f"{len(results)} models, {count} prompts; {settings}."),
        html_page.table(list(zip(*table_rows(results), strict=True))),  # a column a model: that fits a screen
        html_page.folded("What the figures mean", html_page.table([["figure", "meaning"], *meanings])),
        html_page.pictures({caption: path.read_bytes() for caption, path in drawn.items()}),
        html_page.heading(f"{many} of {count} prompts, side by side"),
    ]
    for index, turns in enumerate(comparison["conversations"][:shown]):
        answers = {name: result["answers"][index] for name, result in results.items()}
        parts += [
            html_page.heading(f"Prompt {index + 1}", 3),
            html_page.prompt(conversation(turns)),
            html_page.sides({name + scores_of(answer): answer["text"] for name, answer in answers.items()}),
        ]
    return html_page.page("Comparison of " + ", ".join(results), parts)


def used_meanings(results: Mapping[str, dict]) -> dict[str, str]:
    """What the columns of this comparison mean; those of a judge only where there is one."""
    judged = bool(next(iter(results.values()))["judged"])
    return {name: text for name, text in MEANING.items() if judged or not name.startswith(("score", "wins"))}


def scores_of(answer: Mapping[str, Any]) -> str:
    """What every judge gives one answer: `` (gold 0.512)``, or nothing."""
    scores = ", ".join(f"{judge} {score:.3f}" for judge, score in answer["scores"].items())
    return f" ({scores})" if scores else ""


def conversation(turns: list[dict[str, str]]) -> str:
    """The prompt as a person reads it: one turn by itself, several with their roles."""
    if len(turns) == 1:
        return turns[0]["text"].strip()
    return "\n\n".join(f"{turn['role']}: {turn['text'].strip()}" for turn in turns)


def _quoted(text: str) -> str:
    return "\n".join("> " + _plain(line) for line in text.splitlines()) or "> (empty)"


def _plain(text: str) -> str:
    """A text whose markup a Markdown reader shows and does not obey; lists stay lists."""
    return text.replace("<", "\\<")

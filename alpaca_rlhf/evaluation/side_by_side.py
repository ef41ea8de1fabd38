"""A stored comparison as Markdown tables, for a notebook: its figures, and answers of all models beside each other."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alpaca_rlhf.evaluation.comparison_pages import conversation, scores_of
from alpaca_rlhf.evaluation.figures import markdown_table, table_rows

FORMATTING = str.maketrans({sign: f"&#{ord(sign)};" for sign in "\\`*_~$[]#|"})  # signs that Markdown would obey


def read_comparison(folder: Path) -> dict[str, Any]:
    """What compare_models wrote into ``folder``."""
    return json.loads((folder / "comparison.json").read_text(encoding="utf-8"))


def figures_table(comparison: Mapping[str, Any]) -> str:
    """The figures as Markdown, a column a model: narrow enough for a notebook, whatever the number of judges."""
    columns = table_rows(comparison["models"])
    return markdown_table([[cell.translate(FORMATTING) for cell in row] for row in zip(*columns, strict=True)])


def answers_table(comparison: Mapping[str, Any], rows: Sequence[int]) -> str:
    """The prompts of some ``rows`` with the answers of all models and their scores, as Markdown; texts stay texts."""
    models = comparison["models"]
    table = [["prompt", *map(_cell, models)]]
    for row in rows:
        answers = (model["answers"][row] for model in models.values())
        texts = (f"{answer['text'].strip()}\n\n{scores_of(answer).strip()}" for answer in answers)
        table.append([_cell(conversation(comparison["conversations"][row])), *map(_cell, texts)])
    return markdown_table(table)


def _cell(text: str) -> str:
    lines = html.escape(text.strip(), quote=False).translate(FORMATTING).splitlines()
    return "<br>".join(lines) or "(empty)"

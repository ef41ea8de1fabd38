"""Plain text for the pre-training loss beside PPO (PPO-ptx, arXiv 2203.02155 section 3.5): blocks of equal length."""

from __future__ import annotations

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import open_source
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder

COLUMN = "text"


def load_plain_text(
    name: str, config: str | None, *, encoder: TextEncoder, block: int, cache_dir: str
) -> list[dict]:
    """Items for ``collate_sft``, every token trained: the texts one after another, each closed by EOS, cut into blocks.

    Args:
        name, config: a file, a folder or a hub name with its configuration; read from the column ``text``, else from
            the first one.
        block: tokens of an item; the last one may be shorter.

    Raises:
        UserError: nothing there, or no text in the column.
    """
    ids: list[int] = []
    for table in open_source(name, cache_dir, config).train:
        column = next((name for name in (COLUMN, *table.columns) if name in table.columns), COLUMN)
        for number, row in table.rows:
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise UserError(
                    f"{table.file}:{number} has no text in the column {column}; --unsupervised_dataset_name needs text "
                    f"in the column {COLUMN} or in the first one"
                )
            ids += encoder.plain_text_ids(text)
    blocks = [ids[start : start + block] for start in range(0, len(ids), block)]
    items = [{"input_ids": part, "trained": [1] * len(part)} for part in blocks if len(part) > 1]
    if not items:
        raise UserError(f"{name} holds no text; give --unsupervised_dataset_name a data set of plain text")
    return items

"""Rows and files for the tests of raw data."""

import csv
import gzip
import io
import json
from pathlib import Path

PAIRS = [
    {
        "prompt": f"\n\nHuman: question {n}\n\nAssistant:",
        "response": f" good {n}",
        "chosen": f" good {n}",
        "rejected": f" bad {n}",
    }
    for n in range(1, 4)
]
ALPACA = [{"instruction": f"say {n}", "input": "", "output": f"答え {n}"} for n in range(1, 4)]


def lines(rows) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write(path: Path, rows, name: str) -> Path:
    """The rows as the file ``name`` in the format of its ending."""
    bare = name.lower().removesuffix(".gz")
    if bare.endswith(".json"):
        content = json.dumps(rows, indent=1).encode()
    elif bare.endswith(".csv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
    elif bare.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
        content = buffer.getvalue()
    else:
        content = lines(rows).encode()
    path.mkdir(parents=True, exist_ok=True)
    file = path / name
    file.write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    return file

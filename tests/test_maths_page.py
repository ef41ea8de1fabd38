"""docs/MATHS.md names functions and tests that exist, and leaves no public function of algorithms/ out."""

import ast
import importlib
import re
from functools import cache, reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "MATHS.md").read_text(encoding="utf-8")
CODE = ROOT / "alpaca_rlhf" / "algorithms"
MODULES = sorted(path.stem for path in CODE.glob("*.py") if path.stem != "__init__")
ELSEWHERE = ("engines", "rollout", "deepspeed_chat")
FUNCTION = re.compile(rf"`((?:{'|'.join([*MODULES, *(rf'{folder}[.]' for folder in ELSEWHERE)])})[\w.]*\.\w+)`")
TEST = re.compile(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`")
NAME = re.compile(r"`(\w+)`")
FORMULAS = ["formula", "function", "test", "source"]
RATIOS = ["name", "definition", "test"]


def tables(page):
    """Rows of cells under the head of their table: [(head, [row, …]), …]."""
    found, head = [], None
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = cells
            found.append((head, []))
        elif set(cells) != {"---"}:
            found[-1][1].append(cells)
    return found


@cache
def defined_tests(file):
    path = ROOT / "tests" / (file if "/" in file else f"algorithms/{file}")
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module(body=[], type_ignores=[])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def exists(dotted):
    """Whether ``module.function`` is in algorithms/, or ``folder.module.Class.method`` anywhere in the package."""
    parts = dotted.split(".")
    parts = ["algorithms", *parts] if parts[0] in MODULES else parts
    for length in range(len(parts) - 1, 0, -1):
        if (ROOT / "alpaca_rlhf" / Path(*parts[:length])).with_suffix(".py").is_file():
            module = importlib.import_module(".".join(["alpaca_rlhf", *parts[:length]]))
            return reduce(lambda holder, name: getattr(holder, name, None), parts[length:], module) is not None
    return False


def public_names():
    for module in MODULES:
        for node in ast.parse((CODE / f"{module}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield f"{module}.{node.name}"


def missing(page):
    """What the page names that does not exist."""
    functions = [name for name in FUNCTION.findall(page) if not exists(name)]
    return functions + [f"{file}::{name}" for file, name in TEST.findall(page) if name not in defined_tests(file)]


def test_everything_the_page_names_exists():
    assert missing(PAGE) == []


def test_must_fail_a_page_that_names_what_does_not_exist():
    wrong = "`losses.nothing` `engines.ema.Nothing` `test_losses.py::test_nothing` `engines/test_nothing.py::test_x`"
    with pytest.raises(AssertionError):
        assert missing(wrong) == []
    assert len(missing(wrong)) == 4


def test_every_row_is_whole():
    found = tables(PAGE)
    assert {tuple(head) for head, _ in found} == {tuple(FORMULAS), tuple(RATIOS)}
    wrong = []
    for head, rows in found:
        assert rows, head
        for row in rows:
            whole = len(row) == len(head) and all(row) and TEST.fullmatch(row[2])
            named = FUNCTION.fullmatch(row[1]) if head == FORMULAS else NAME.findall(row[0])
            wrong += [] if whole and named else [row]
    assert wrong == []
    assert sum(len(rows) for head, rows in found if head == FORMULAS) > 40


def test_every_public_function_is_on_the_page():
    assert sorted(set(public_names()) - set(FUNCTION.findall(PAGE))) == []

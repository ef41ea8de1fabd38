"""docs/MATHS.md names functions and tests that exist, and leaves no public function of algorithms/ out."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "MATHS.md").read_text(encoding="utf-8")
CODE = ROOT / "alpaca_rlhf" / "algorithms"
MODULES = sorted(path.stem for path in CODE.glob("*.py") if path.stem != "__init__")
FUNCTION = re.compile(rf"`({'|'.join(MODULES)})\.(\w+)`")
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def table_rows(page):
    """The cells of every table row, without heads and rules."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] not in ("formula", "---")]


def defined_tests(file):
    path = ROOT / "tests" / "algorithms" / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module(body=[], type_ignores=[])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def public_names():
    for module in MODULES:
        for node in ast.parse((CODE / f"{module}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield module, node.name


def missing(page):
    """What the page names that does not exist."""
    functions = [f"{module}.{name}" for module, name in FUNCTION.findall(page)
                 if not hasattr(importlib.import_module(f"alpaca_rlhf.algorithms.{module}"), name)]  # fmt: skip
    return functions + [f"{file}::{name}" for file, name in TEST.findall(page) if name not in defined_tests(file)]


def test_everything_the_page_names_exists():
    assert missing(PAGE) == []


def test_must_fail_a_page_that_names_what_does_not_exist():
    with pytest.raises(AssertionError):
        assert missing("`losses.nothing` `test_losses.py::test_nothing` `test_nothing.py::test_x`") == []
    assert len(missing("`losses.nothing` `test_losses.py::test_nothing` `test_nothing.py::test_x`")) == 3


def test_every_row_has_formula_function_test_and_source():
    rows = table_rows(PAGE)
    assert len(rows) > 20
    wrong = [row for row in rows if len(row) != 4 or not (row[0] and row[3])]
    wrong += [row for row in rows if not (FUNCTION.fullmatch(row[1]) and TEST.fullmatch(row[2]))]
    assert wrong == []


def test_every_public_function_is_on_the_page():
    assert sorted(set(public_names()) - set(FUNCTION.findall(PAGE))) == []

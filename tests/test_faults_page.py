"""docs/FAULTS.md covers every id of its list, names tests that exist, and misses no test that carries an id."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "FAULTS.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`")
IN_A_NAME = re.compile(r"(?<=_)([A-Z])(\d\d)(?=_|$)")
ELSEWHERE = "corrections/"  # ids there are rows of another list
REASON = "Cannot occur here: "


def listed(page):
    """The ids of the page's own list, "D-01 to D-11, …"."""
    (line,) = [line for line in page.splitlines() if line.startswith("Ids: ")]
    ids = []
    for span in line.removeprefix("Ids: ").rstrip(".").split(", "):
        first, _, last = span.partition(" to ")
        letter, start, end = first[0], int(first[2:]), int((last or first)[2:])
        assert (last or first)[0] == letter and start <= end, span
        ids += [f"{letter}-{number:02d}" for number in range(start, end + 1)]
    return ids


def rows(page):
    """id → (sentence, [(file, test), …])."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and re.fullmatch(r"[A-Z]-\d\d", cells[0]):
            assert len(cells) == 3 and cells[0] not in found, line
            found[cells[0]] = cells[1], NAMED.findall(cells[2])
    return found


@cache
def names_in(file):
    path = TESTS / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module(body=[], type_ignores=[])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def ids_in(name):
    return {f"{letter}-{number}" for letter, number in IN_A_NAME.findall(name)}


def uncovered(page):
    """Ids of the list without a test that carries them (or a reason), and rows of ids that are not in the list."""
    found, ids = rows(page), listed(page)
    covered = {
        fault for fault, (sentence, named) in found.items()
        if sentence.startswith(REASON) or any(fault in ids_in(name) for _, name in named)
    }  # fmt: skip
    return sorted(set(ids) ^ found.keys() | set(ids) - covered)


def unknown(page):
    """Tests that the page names and that do not exist."""
    return [f"{file}::{name}" for _, named in rows(page).values() for file, name in named if name not in names_in(file)]


def forgotten(page):
    """Tests whose name carries the id of a fault (by its letter) and that are not in that fault's row."""
    found, letters = rows(page), {fault[0] for fault in listed(page)}
    left = []
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS).as_posix()
        for name in sorted(names_in(file)) if not file.startswith(ELSEWHERE) else ():
            for fault in sorted(ids_in(name)):
                if fault[0] in letters and (file, name) not in found.get(fault, ("", []))[1]:
                    left.append(f"{fault}: {file}::{name}")
    return left


def test_every_id_has_a_row_and_a_test_that_carries_it():
    assert uncovered(PAGE) == []
    assert len(listed(PAGE)) > 80


def test_every_test_that_the_page_names_exists():
    assert unknown(PAGE) == []


def test_every_test_that_carries_an_id_is_in_its_row():
    assert forgotten(PAGE) == []


def test_every_row_says_what_is_right_here():
    assert [fault for fault, (sentence, _) in rows(PAGE).items() if not re.search(r"; here .+\.$", sentence)] == []


HERE = "test_faults_page.py::test_every_id_has_a_row_and_a_test_that_carries_it"


@pytest.mark.parametrize(
    "page, wrong",
    [
        ("Ids: D-01 to D-02.\n| D-01 | x; here y. | `a/test_b.py::test_D01_x` |\n", ["D-02"]),
        (f"Ids: D-01.\n| D-01 | x; here y. | `{HERE}` |\n", ["D-01"]),
        (f"Ids: D-01.\n| D-01 | {REASON}z; here y. | |\n| D-02 | x; here y. | |\n", ["D-02"]),
    ],
)
def test_must_fail_a_page_that_leaves_an_id_without_a_test_of_its_own(page, wrong):
    assert uncovered(page) == wrong


def test_must_fail_a_page_that_names_what_does_not_exist_or_forgets_a_test():
    page = f"Ids: M-08.\n| M-08 | x; here y. | `{HERE}` `demo/test_nothing.py::test_M08_x` |\n"
    assert unknown(page) == ["demo/test_nothing.py::test_M08_x"]
    assert "M-08: test_run_sh.py::test_M08_the_exit_code_is_the_childs" in forgotten(page)

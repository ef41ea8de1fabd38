"""Whatever text of the program tells a person to give an option, the option exists where it is told."""

import ast
import re
from pathlib import Path

import pytest

from alpaca_rlhf.arguments.deepspeed_chat import STEP1, STEP2, STEP3
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import rlhf_engine
from alpaca_rlhf.runtime import run

PACKAGE = Path(__file__).parents[2] / "alpaca_rlhf"
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*\w")
OF_OTHERS = {"--num_gpus", "--no-deps", "--flag"}  # the launcher's, pip's, and what the parser calls any option


def flags_of(*dialects) -> set[str]:
    return {flag for dialect in dialects for row in dialect.rows for flag in row.flags} | {"--help"}


@pytest.mark.parametrize(
    "advice, dialects", [(run.MEMORY_ADVICE, (STEP1, STEP2)), (rlhf_engine.MEMORY_ADVICE, (STEP3,))]
)
def test_Z04_the_advice_when_memory_runs_out_names_options_of_that_step(advice, dialects):
    named = set(FLAG.findall(advice))
    assert len(named) >= 4
    for dialect in dialects:
        assert named <= flags_of(dialect), dialect.program


def texts_and_own_flags() -> tuple[dict[str, set[str]], set[str]]:
    """Flags that the strings of each file name, and those that a program defines with argparse."""
    named, defined = {}, set()
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.setdefault(str(file.relative_to(PACKAGE)), set()).update(FLAG.findall(node.value))
            called = getattr(node, "func", None)  # parser.add_argument(…), or add(…) where that has a short name
            if getattr(called, "attr", "") == "add_argument" or getattr(called, "id", "") == "add":
                defined |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    return named, defined


def test_every_option_that_a_text_names_exists():
    named, defined = texts_and_own_flags()
    known = flags_of(STEP1, STEP2, STEP3) | defined | OF_OTHERS
    unknown = {file: sorted(flags - known) for file, flags in named.items() if flags - known}
    assert unknown == {} and len(named) > 20

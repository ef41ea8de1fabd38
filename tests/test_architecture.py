"""The house rules of CONTRIBUTING.md, enforced on the source itself with the standard library's ast.

Each rule is a pure function from {path: source} to a list of offenders, so that each is also shown to fail on a
small source that breaks it.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
STEPS = {
    "step1_supervised_finetuning": "step 1",
    "step2_reward_model_finetuning": "step 2",
    "step3_rlhf_finetuning": "step 3",
}
TIERS = [
    {"arguments", "algorithms"},
    {"engines", "rollout", "runtime", "utils"},
    set(STEPS.values()),
    {"demo", "doctor", "openllama2", "evaluation", "inference"},
]
ONLY_IN = {
    "deepspeed": r"alpaca_rlhf/engines/deepspeed_\w+\.py",
    "gradio": r"alpaca_rlhf/inference/llama_chatbot_gradio\.py",
    "tensorboard": r"alpaca_rlhf/runtime/tracking\.py",
    "torch.utils.tensorboard": r"alpaca_rlhf/runtime/tracking\.py",
    "wandb": r"alpaca_rlhf/runtime/tracking\.py",
    "ray": r"alpaca_rlhf/engines/ray_group\.py",
    "vllm": r"alpaca_rlhf/rollout/vllm_generate\.py",
}
Sources = dict[str, str]


@cache
def sources(folder: str) -> Sources:
    """Path inside the repository -> text, of every Python file below a folder."""
    files = sorted((REPO / folder).rglob("*.py"))
    return {file.relative_to(REPO).as_posix(): file.read_text(encoding="utf-8") for file in files}


def everything() -> Sources:
    return sources("alpaca_rlhf") | sources("tests")


@cache
def tree(text: str) -> ast.Module:
    return ast.parse(text)


def area(module: str) -> str | None:
    """The folder of the house that a dotted module of ours belongs to; None for the package itself."""
    parts = module.split(".")
    if parts[1:3] == ["deepspeed_chat", "training"]:
        name = parts[3] if len(parts) > 3 else ""
        return STEPS.get(name, "utils" if name == "utils" else None)
    return parts[1] if len(parts) > 1 and parts[1] != "deepspeed_chat" else None


def imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, relative imports resolved; for `from a import b`, a and a.b."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join(base + ([node.module] if node.module else []))
            yield node.lineno, name
            for alias in node.names:
                yield node.lineno, f"{name}.{alias.name}"


def tier_offences(files: Sources) -> list[str]:
    """A file imports only from tiers below it, and inside a tier only from its own folder."""
    tier_of = {name: tier for tier, names in enumerate(TIERS) for name in names}
    offences = []
    for path, text in files.items():
        own = area(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if own is not None and own not in tier_of:
            offences.append(f"{path}: {own} is no folder of the house")
            continue
        for line, name in imports(path, text):
            other = area(name) if name.split(".")[0] == "alpaca_rlhf" else None
            if other in tier_of and other != own and (own is None or tier_of[other] >= tier_of[own]):
                offences.append(f"{path}:{line}: {own or 'a package file'} imports {other} ({name})")
    return offences


def foreign_offences(files: Sources) -> list[str]:
    """arguments knows the standard library only, algorithms torch besides."""
    allowed = {"arguments": set(), "algorithms": {"torch"}}
    return [
        f"{path}:{line}: {folder} imports {name}"
        for folder, others in allowed.items()
        for path, text in files.items()
        if path.startswith(f"alpaca_rlhf/{folder}/")
        for line, name in imports(path, text)
        if name.split(".")[0] not in others | {"alpaca_rlhf"} | set(sys.stdlib_module_names)
    ]


def heavy_offences(files: Sources) -> list[str]:
    """A heavy optional library is known to one file."""
    return [
        f"{path}:{line}: imports {name}"
        for path, text in files.items()
        for line, name in imports(path, text)
        for library, place in ONLY_IN.items()
        if (name + ".").startswith(library + ".") and not re.fullmatch(place, path)
    ]


def sys_path_offences(files: Sources) -> list[str]:
    """Nobody edits sys.path."""
    return [
        f"{path}:{node.lineno}: sys.path"
        for path, text in files.items()
        for node in ast.walk(tree(text))
        if isinstance(node, ast.Attribute) and node.attr == "path"
        if isinstance(node.value, ast.Name) and node.value.id == "sys"
    ]


def length_offences(files: Sources) -> list[str]:
    """Functions of at most 70 lines, files of at most 350, the main of a step of at most 150."""
    offences = []
    for path, text in files.items():
        limit = 150 if path.endswith("_finetuning/main.py") else 350
        if (lines := len(text.splitlines())) > limit:
            offences.append(f"{path}: {lines} lines, at most {limit}")
        for node in ast.walk(tree(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > 70:
                    offences.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, at most 70")
    return offences


def classes(files: Sources) -> dict[str, ast.ClassDef]:
    """Every class of ours by its name."""
    nodes = (node for text in files.values() for node in ast.walk(tree(text)))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def documented_methods(name: str, known: dict[str, ast.ClassDef]) -> set[str]:
    """The methods that a class of ours, or one it inherits from, documents."""
    if name not in known:
        return set()
    node = known[name]
    own = {child.name for child in node.body if isinstance(child, ast.FunctionDef) and ast.get_docstring(child)}
    return own.union(*(documented_methods(getattr(base, "id", ""), known) for base in node.bases))


def documentation_offences(files: Sources) -> list[str]:
    """Every module, public class and public function says what it is, where no base class of ours has said it."""
    known, offences = classes(files), []

    def visit(path: str, node: ast.Module | ast.ClassDef, documented: set[str]) -> None:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef) or child.name.startswith("_"):
                continue
            if ast.get_docstring(child) is None and child.name not in documented:
                offences.append(f"{path}:{child.lineno}: {child.name} has no docstring")
            if isinstance(child, ast.ClassDef):
                visit(path, child, documented_methods(child.name, known))

    for path, text in files.items():
        if text.strip() and ast.get_docstring(tree(text)) is None:
            offences.append(f"{path}: no docstring")
        visit(path, tree(text), set())
    return offences


def except_offences(files: Sources) -> list[str]:
    """No bare except, nor one that catches everything, nor suppress() of everything."""

    def broad(node: ast.expr | None) -> bool:
        kinds = node.elts if isinstance(node, ast.Tuple) else [node]
        return any(kind is None or getattr(kind, "id", "") in ("Exception", "BaseException") for kind in kinds)

    offences = []
    for path, text in files.items():
        for node in ast.walk(tree(text)):
            suppresses = isinstance(node, ast.Call) and "suppress" in (
                getattr(node.func, "id", ""),
                getattr(node.func, "attr", ""),
            )
            if isinstance(node, ast.ExceptHandler) and broad(node.type):
                offences.append(f"{path}:{node.lineno}: catches everything")
            elif suppresses and any(broad(kind) for kind in node.args):
                offences.append(f"{path}:{node.lineno}: suppresses everything")
    return offences


def name_offences(files: Sources) -> list[str]:
    """A file is named after what is in it."""
    empty_names = {"utils.py", "util.py", "common.py", "constants.py", "helpers.py", "misc.py"}
    return [path for path in files if path.rsplit("/", 1)[-1] in empty_names]


def report(offences: list[str]) -> str:
    return "\n" + "\n".join(offences)


def test_a_file_imports_only_from_tiers_below_it():
    assert not (found := tier_offences(sources("alpaca_rlhf"))), report(found)


def test_the_lowest_tier_imports_nothing_but_its_own():
    assert not (found := foreign_offences(sources("alpaca_rlhf"))), report(found)


def test_a_heavy_library_is_known_to_one_file():
    assert not (found := heavy_offences(sources("alpaca_rlhf"))), report(found)


def test_nobody_edits_sys_path():
    assert not (found := sys_path_offences(everything())), report(found)


def test_functions_and_files_are_short():
    assert not (found := length_offences(everything())), report(found)


def test_everything_public_is_documented():
    assert not (found := documentation_offences(sources("alpaca_rlhf"))), report(found)


def test_no_except_catches_everything():
    assert not (found := except_offences(everything())), report(found)


def test_files_are_named_after_what_is_in_them():
    assert not (found := name_offences(everything())), report(found)


@pytest.mark.parametrize("path", sources("alpaca_rlhf"))
def test_every_module_can_be_imported(path):
    importlib.import_module(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))


CHAT = "alpaca_rlhf/deepspeed_chat/training/"
STEP1, STEP2 = CHAT + "step1_supervised_finetuning/main.py", CHAT + "step2_reward_model_finetuning/main.py"


@pytest.mark.parametrize(
    "path, text",
    [
        ("alpaca_rlhf/algorithms/kl.py", "from alpaca_rlhf.arguments import errors"),
        ("alpaca_rlhf/arguments/schema.py", "from alpaca_rlhf.algorithms.kl import f"),
        ("alpaca_rlhf/rollout/base.py", "def f():\n    import alpaca_rlhf.engines.base"),
        ("alpaca_rlhf/engines/base.py", "from ..runtime import run"),
        (CHAT + "utils/data/loader.py", "from alpaca_rlhf.runtime.run import Run"),
        ("alpaca_rlhf/runtime/run.py", "from alpaca_rlhf.deepspeed_chat.training.utils.data import loader"),
        ("alpaca_rlhf/runtime/run.py", "from alpaca_rlhf.deepspeed_chat.training import utils"),
        (STEP1, "from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning import main"),
        (STEP2, "from ..step1_supervised_finetuning.main import main"),
        (STEP1, "from alpaca_rlhf import demo"),
        ("alpaca_rlhf/demo/run.py", "import alpaca_rlhf.evaluation.compare_models"),
        ("alpaca_rlhf/__init__.py", "from alpaca_rlhf.runtime.run import Run"),
        ("alpaca_rlhf/attic/x.py", ""),
    ],
)
def test_the_tier_rule_can_fail(path, text):
    assert len(tier_offences({path: text})) >= 1


@pytest.mark.parametrize(
    "path, text",
    [
        ("alpaca_rlhf/engines/plain.py", "from .base import Engine\nimport alpaca_rlhf.arguments.errors"),
        (CHAT + "utils/data/data_utils.py", "from alpaca_rlhf.deepspeed_chat.training.utils.model import model_utils"),
        (CHAT + "utils/data/data_utils.py", "from ..model import model_utils\nfrom . import loader"),
        (STEP1, "from alpaca_rlhf.runtime.run import Run\nfrom alpaca_rlhf.algorithms import kl"),
        ("alpaca_rlhf/demo/run.py", "from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main"),
    ],
)
def test_the_tier_rule_lets_the_right_way_pass(path, text):
    assert tier_offences({path: text}) == []


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 70
RULE_BREAKERS = [
    (foreign_offences, "alpaca_rlhf/algorithms/x.py", "import numpy"),
    (foreign_offences, "alpaca_rlhf/arguments/x.py", "from torch import nn"),
    (heavy_offences, "alpaca_rlhf/engines/plain.py", "def f():\n    import deepspeed.ops"),
    (heavy_offences, "alpaca_rlhf/demo/run.py", "from torch.utils.tensorboard import SummaryWriter"),
    (heavy_offences, "alpaca_rlhf/demo/run.py", "from torch.utils import tensorboard"),
    (sys_path_offences, "tests/x.py", "import sys\nsys.path.insert(0, '.')"),
    (length_offences, "tests/x.py", LONG_FUNCTION),
    (length_offences, "tests/x.py", "x = 1\n" * 351),
    (length_offences, STEP1, "x = 1\n" * 151),
    (documentation_offences, "alpaca_rlhf/x.py", "x = 1"),
    (documentation_offences, "alpaca_rlhf/x.py", '"""A."""\ndef f():\n    pass'),
    (documentation_offences, "alpaca_rlhf/x.py", '"""A."""\nclass A:\n    """B."""\n    def f(self):\n        pass'),
    (except_offences, "tests/x.py", "try:\n    pass\nexcept:\n    pass"),
    (except_offences, "tests/x.py", "try:\n    pass\nexcept (OSError, Exception):\n    pass"),
    (except_offences, "tests/x.py", "import contextlib\nwith contextlib.suppress(BaseException):\n    pass"),
    (name_offences, "alpaca_rlhf/engines/utils.py", ""),
]


@pytest.mark.parametrize("rule, path, text", RULE_BREAKERS)
def test_each_rule_can_fail(rule, path, text):
    assert len(rule({path: text})) >= 1
    assert rule({path: '"""Nothing wrong here."""'}) == [] or rule is name_offences


def test_what_the_rules_allow():
    assert heavy_offences({"alpaca_rlhf/engines/deepspeed_engine.py": "import deepspeed"}) == []
    assert heavy_offences({"alpaca_rlhf/engines/plain.py": "import deepspeed_free, raytrace"}) == []
    assert length_offences({"tests/x.py": LONG_FUNCTION.removesuffix("    x = 1\n")}) == []
    base = '"""A."""\nclass A:\n    """A."""\n    def f(self):\n        """B."""\n'
    heir = "class B(A):\n    'C.'\n    def f(self):\n        pass"
    assert documentation_offences({"alpaca_rlhf/x.py": base + heir}) == []
    private = '"""A."""\ndef _f():\n    pass\nclass _A:\n    def f(self):\n        pass'
    assert documentation_offences({"alpaca_rlhf/x.py": private}) == []

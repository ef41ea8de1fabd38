"""The notebooks run from the first cell to the last, hold no logic, and are stored small and free of machine paths."""

import ast
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPO = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
MOST_LINES = 12  # of a code cell
LOGIC = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.If, ast.Try, ast.With)
# An absolute path of any machine: from a root, a drive or a home folder; and what is inside an installation.
MACHINE_PATH = re.compile(r"(?<![\w.~:<>/*|-])/[\w.-]+/[\w.-]+|\b[A-Z]:\\|file://|site-packages|(?<!\w)~/\w")


def read(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def execute(tmp_path_factory):
    """Run a notebook in its own folder, as Jupyter does, on a kernel of this very interpreter; returns it."""
    jupyter = tmp_path_factory.mktemp("jupyter")
    kernel = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "this"}
    (jupyter / "kernels" / "this_python").mkdir(parents=True)
    (jupyter / "kernels" / "this_python" / "kernel.json").write_text(json.dumps({**kernel, "language": "python"}))

    def run(notebook, **settings):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "HF_HOME"):
                patch.setenv(name, str(jupyter / name.lower()))
            patch.setenv("JUPYTER_PATH", str(jupyter))
            patch.setenv("PYTHONPATH", str(REPO))
            for name, value in settings.items():
                patch.setenv(f"ALPACA_RLHF_{name}", str(value))
            place = {"metadata": {"path": str(REPO / "notebooks")}}
            NotebookClient(notebook, timeout=300, kernel_name="this_python", resources=place).execute()
        return notebook

    return run


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def three_steps(execute, outputs):
    """The notebook with its outputs, run at the size that shows every part and learns nothing."""
    notebook = read(REPO / "notebooks" / "three_steps.ipynb")
    return execute(notebook, SIZE="glance", OUTPUT=outputs / "three_steps")


def shown(notebook, kind):
    """All that the cells showed in one form: "text/markdown", "image/png", or "text" for what was printed."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            found += [output.text] if kind == "text" and output.output_type == "stream" else []
            found += [output.data[kind]] if kind in output.get("data", {}) else []
    return found


def test_three_steps_runs_and_shows_what_it_promises(three_steps, outputs):
    printed = "".join(shown(three_steps, "text"))
    for words in ("python -m alpaca_rlhf.demo.tiny_model", "--inspect 1", "~~~~", "^", "accuracy"):
        assert words in printed
    assert len(shown(three_steps, "image/png")) == sum(1 for _ in outputs.glob("three_steps/*/curves/*.png")) >= 12
    looked, figures, compared = shown(three_steps, "text/markdown")
    assert looked.startswith("| prompt | base | SFT |") and compared.startswith("| prompt | sft | rlhf |")
    assert "| gold score, mean |" in figures and "held-out pairs" in figures
    for folder in ("sft", "reward_model", "rlhf/actor", "rlhf/critic", "comparison"):
        assert (outputs / "three_steps" / folder).is_dir()


def test_compare_runs_on_any_two_outputs(three_steps, execute, outputs):
    notebook = read(REPO / "notebooks" / "compare_sft_rlhf.ipynb")
    execute(notebook, DEMO=outputs / "three_steps", OUTPUT=outputs / "compare", COUNT=4)
    figures, answers = shown(notebook, "text/markdown")
    assert figures.startswith("| model | SFT | RLHF |") and "wins at equal length" in figures
    assert answers.startswith("| prompt | SFT | RLHF |") and len(answers.splitlines()) == 6
    compared, judged = ((outputs / "compare" / part).glob("*.png") for part in ("pictures", "reward_report/pictures"))
    curves = [*outputs.glob("three_steps/sft/curves/*.png"), *outputs.glob("three_steps/rlhf/curves/*.png")]
    assert len(shown(notebook, "image/png")) == len([*curves, *compared, *judged]) >= 14


def offences(notebook):
    """What a stored notebook must not hold."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        lines = cell.source.splitlines()
        found += [f"{cell.id}: {len(lines)} lines"] if len(lines) > MOST_LINES else []
        nodes = ast.walk(ast.parse(cell.source))
        found += [f"{cell.id}: {type(node).__name__}" for node in nodes if isinstance(node, LOGIC)]
    text = nbformat.writes(notebook)
    found += [f"the path {path}" for path in sorted(set(MACHINE_PATH.findall(without_pictures(notebook))))]
    return found + ([f"{len(text)} bytes"] if len(text) > 500_000 else [])


def without_pictures(notebook):
    """The stored text, but for the base64 of pictures, in which any word may stand."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = ""
    return nbformat.writes(copy)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_stored_notebook_is_small_and_holds_no_logic_and_no_machine_path(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert offences(notebook) == []
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts in ([None] * len(counts), list(range(1, len(counts) + 1)))  # no outputs, or one run from the top
    streams = [o for c in notebook.cells for o in c.get("outputs", ()) if o.output_type == "error"]
    assert streams == []


def test_both_notebooks_are_there():
    assert [path.name for path in NOTEBOOKS] == ["compare_sft_rlhf.ipynb", "three_steps.ipynb"]


@pytest.mark.parametrize(
    "source, output",
    [
        ("def f():\n    pass", ""),
        ("for x in y:\n    z.append(x)", ""),
        ("if x:\n    y = 1", ""),
        ("x = 1\n" * 13, ""),
        ("x = 1", "saved in /data/output/sft"),
        ("x = 1", "saved in C:\\output"),
        ("x = 1", "UserWarning: .../lib/python3/site-packages/x.py"),
        ("x = 1", "x" * 500_000),
    ],
)
def test_must_fail_what_no_notebook_may_hold(source, output):
    stream = nbformat.v4.new_output("stream", text=output)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, outputs=[stream])])
    assert len(offences(notebook)) == 1

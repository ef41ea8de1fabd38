"""run.sh with a pretended Python on the path: set-up, words, exit codes and the one sentence for what is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

# Does what run.sh asks of Python, writes every call to $FAKE/calls, and ends as the variables FAKE_* say.
FAKE_PYTHON = r"""#!/bin/sh
printf '%s\n' "$0 $*" | head -n 1 >>"$FAKE/calls"
case $1 in
-c)
    case $2 in
    *sys.version.split*) echo "${FAKE_VERSION:-3.12.1}" ;;
    *version_info\ \<*) case ${FAKE_VERSION:-3.12.1} in 3.[0-9].*) exit 1 ;; esac ;;
    *ensurepip*) exit "${FAKE_ENSUREPIP:-0}" ;;
    "import pip") [ -z "${FAKE_NO_PIP:-}" ] ;;
    *importlib.metadata*) [ -e "$(dirname "$0")/installed" ] ;;
    esac
    exit
    ;;
-m)
    case $2 in
    venv)
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        ;;
    pip)
        sleep "${FAKE_PIP_SECONDS:-0}"
        echo "${FAKE_PIP_SAYS:-}"
        [ "${FAKE_PIP:-0}" -ne 0 ] || : >"$(dirname "$0")/installed"
        exit "${FAKE_PIP:-0}"
        ;;
    *)
        module=$2
        shift 2
        printf '%s\n' "$module" "in $(pwd)" "path $PYTHONPATH"
        for word; do printf '<%s>\n' "$word"; done
        exit "${FAKE_CODE:-0}"
        ;;
    esac
    ;;
esac
"""

TOOLS = ("sh dirname cat cksum ln rm mv mkdir cp readlink sleep grep tail head uname pwd".split()) + ["kill", "["]


@pytest.fixture
def box(tmp_path):
    """A checkout with run.sh in a folder with a blank, and a path with nothing but the shell's tools and the fake."""
    checkout, tools = tmp_path / "check out", tmp_path / "tools"
    checkout.mkdir()
    tools.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    shutil.copy(REPO / "run.sh", checkout)
    (checkout / "requirements.txt").write_text("torch==1.0\n")
    add_program(tools, "python3", FAKE_PYTHON)
    add_program(tools, "c++", "#!/bin/sh\n")
    return tmp_path


def add_program(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def environment(box, **settings):
    return {"PATH": str(box / "tools"), "FAKE": str(box), "HOME": str(box)} | settings


def run_sh(box, *words, cwd=None, **settings):
    """Run the box's run.sh in a clean environment; the finished process."""
    return subprocess.run(
        ["/bin/sh", str(box / "check out" / "run.sh"), *words],
        cwd=cwd or box,
        env=environment(box, **settings),
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(box, part):
    """How many calls of the fake Python hold the text."""
    path = box / "calls"
    return sum(part in line for line in path.read_text().splitlines()) if path.exists() else 0


def an_error(done):
    """The one error sentence on stderr of a run that failed before its program started."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("run.sh: error: ")]
    assert len(errors) == 1 and done.stderr.endswith(errors[0] + "\n"), done.stderr
    return errors[0]


WORDS = ["a b", "", "it's", 'say "x"', "*", "$HOME", "\\n", "--flag=1 2", "-k", "new\nline"]


@pytest.mark.parametrize(
    "words, module",
    [(["demo"], "alpaca_rlhf.demo.run"), (["test"], "pytest"), (["--num_gpus", "2"], "alpaca_rlhf.runtime.launcher")],
)
def test_words_arrive_unharmed_from_any_folder(box, words, module):
    elsewhere = box / "else where"
    elsewhere.mkdir()
    done = run_sh(box, *words, *WORDS, cwd=elsewhere, PYTHONPATH="/mine")
    assert done.returncode == 0, done.stderr
    checkout = box / "check out"
    expected = words[1:] if module != "alpaca_rlhf.runtime.launcher" else words
    if module == "pytest":
        expected = "-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder".split()
    folder = checkout if module == "pytest" else elsewhere
    head = f"{module}\nin {folder}\npath {checkout}:/mine\n"
    assert done.stdout == head + "".join(f"<{word}>\n" for word in [*expected, *WORDS])


@pytest.mark.parametrize("first", ["demo", "test", "script.py"])
def test_M08_the_exit_code_is_the_childs(box, first):
    assert run_sh(box, first, FAKE_CODE="37").returncode == 37


def test_no_words_and_help(box):
    nothing, asked = run_sh(box), run_sh(box, "--help")
    assert (nothing.returncode, asked.returncode) == (2, 0)
    assert nothing.stdout == "" and asked.stderr == ""
    assert nothing.stderr == asked.stdout and asked.stdout.startswith("usage: sh run.sh demo")
    assert not (box / "calls").exists()


def test_the_set_up_is_done_once_and_again_when_the_pins_change(box):
    first = run_sh(box, "demo")
    assert "installing the pinned requirements into" in first.stderr
    assert calls(box, "-m pip install") == calls(box, "-m venv") == 1
    second = run_sh(box, "demo")
    assert second.stderr == "" and calls(box, "-m pip install") == 1
    (box / "check out" / "requirements.txt").write_text("torch==1.1\n")
    run_sh(box, "demo")
    assert calls(box, "-m pip install") == 2 and calls(box, "-m venv") == 1
    shutil.rmtree(box / "check out" / ".venv" / "bin")
    assert run_sh(box, "demo").returncode == 0
    assert calls(box, "-m pip install") == 3 and calls(box, "-m venv") == 2
    assert not os.path.lexists(box / "check out" / ".venv.lock")


def test_a_failed_install_says_why_and_is_tried_again(box):
    says = "ERROR: Could not find a version that satisfies the requirement torch==1.0"
    sentence = an_error(run_sh(box, "demo", FAKE_PIP="3", FAKE_PIP_SAYS=says))
    assert says in sentence and "alpaca_rlhf_install.log" in sentence
    says = "WARNING: NewConnectionError: [Errno -3] Temporary failure in name resolution"
    assert "check the network" in an_error(run_sh(box, "demo", FAKE_PIP="1", FAKE_PIP_SAYS=says))
    assert not os.path.lexists(box / "check out" / ".venv.lock")
    assert run_sh(box, "demo").returncode == 0
    assert calls(box, "-m pip install") == 3 and calls(box, "-m venv") == 1


def test_no_python_and_an_old_python(box):
    assert "only 3.9.2 was found" in an_error(run_sh(box, "demo", FAKE_VERSION="3.9.2"))
    (box / "tools" / "python3").unlink()
    assert "Python was not found" in an_error(run_sh(box, "demo"))


def test_an_old_python3_beside_a_newer_one(box):
    newer = box / "tools" / "python3.11"
    add_program(box / "tools", "python3", f'#!/bin/sh\nFAKE_VERSION=3.8.1 exec {newer} "$@"')
    add_program(box / "tools", newer.name, FAKE_PYTHON)
    assert run_sh(box, "demo").returncode == 0
    assert calls(box, "python3.11 -m venv") == 1


def test_a_python_without_venv_or_pip(box):
    assert "python3-venv" in an_error(run_sh(box, "demo", FAKE_ENSUREPIP="1", FAKE_NO_PIP="1"))
    assert not (box / "check out" / ".venv").exists()
    assert "has no pip" in an_error(run_sh(box, "demo", FAKE_NO_PIP="1"))


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_is_used(box, variable):
    programs = box / "active" / "bin"
    programs.mkdir(parents=True)
    add_program(programs, "python", FAKE_PYTHON)
    active = {variable: str(box / "active")}
    assert "installing" not in run_sh(box, "demo", **active, ALPACA_RLHF_INSTALL="no").stderr
    assert "installing" in run_sh(box, "demo", **active).stderr
    done = run_sh(box, "demo", "x", **active)
    assert done.stderr == "" and done.stdout.endswith("<x>\n")
    assert calls(box, "-m pip install") == 1 and calls(box, "-m venv") == 0
    assert not (box / "check out" / ".venv").exists()
    assert "older than 3.10" in an_error(run_sh(box, "demo", **active, FAKE_VERSION="3.8.1"))
    assert "has no bin/python" in an_error(run_sh(box, "demo", **{variable: str(box / "gone")}))


def test_two_runs_at_once_share_one_set_up(box):
    command = ["/bin/sh", str(box / "check out" / "run.sh"), "demo"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, env=environment(box, FAKE_PIP_SECONDS="2"), **pipes) for _ in range(2)]
    ends = [one.communicate(timeout=60) for one in both]
    assert [one.returncode for one in both] == [0, 0], ends
    assert calls(box, "-m pip install") == calls(box, "-m venv") == 1
    assert sum(b"waiting for the set-up" in stderr for _, stderr in ends) == 1


def test_a_lock_whose_owner_is_dead_does_not_block(box):
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()
    (box / "check out" / ".venv.lock").symlink_to(str(ended.pid))
    assert run_sh(box, "demo").returncode == 0
    assert sorted(path.name for path in (box / "check out").glob(".venv*")) == [".venv"]


def test_no_compiler_is_asked_for(box):
    """The engines keep DeepSpeed from building anything, so a machine without a compiler is no mistake."""
    (box / "tools" / "c++").unlink()
    assert run_sh(box, "x.py").returncode == 0


def pins_satisfied(requirements, folder):
    """Run the check of run.sh itself, with the Python of this test, against a requirements file."""
    body = (REPO / "run.sh").read_text()
    function = re.search(r"^pins_satisfied\(\) \{.*?^\}", body, re.DOTALL | re.MULTILINE).group()
    (folder / "requirements.txt").write_text(requirements)
    script = f'python=$1 repo=$2\n{function}\npins_satisfied'
    done = subprocess.run(["/bin/sh", "-c", script, "sh", sys.executable, str(folder)], capture_output=True, text=True)
    assert done.stderr == "", done.stderr
    return done.returncode == 0


def test_the_pins_are_compared_with_what_is_installed(tmp_path):
    from importlib.metadata import version

    has = version("pytest")
    assert pins_satisfied(f"# words\n\npytest=={has}  # why\n", tmp_path)
    assert pins_satisfied(f'pytest=={has} ; python_version >= "3.10"\nabsent==1 ; python_version < "3.10"\n', tmp_path)
    assert not pins_satisfied("pytest==0.0.1\n", tmp_path)
    assert not pins_satisfied(f"pytest=={has}\nno-such-package==1\n", tmp_path)
    assert pins_satisfied(f"torch=={version('torch').split('+')[0]}\n", tmp_path)


def test_every_line_of_the_requirements_is_one_that_the_check_reads(tmp_path):
    pins_satisfied((REPO / "requirements.txt").read_text(), tmp_path)
    with pytest.raises(AssertionError, match="AttributeError"):
        pins_satisfied("torch>=2\n", tmp_path)

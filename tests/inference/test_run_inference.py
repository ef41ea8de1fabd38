"""run_inference.sh with a pretended Python: the GPU's number, the words, the folder."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FAKE = r"""#!/bin/sh
[ "$1" != -c ] || exit 0
printf '%s\n' "gpu $CUDA_VISIBLE_DEVICES" "in $(pwd)" "path $PYTHONPATH"
for word; do printf '<%s>\n' "$word"; done
exit 7
"""


@pytest.fixture
def run(tmp_path):
    checkout, python = tmp_path / "check out", tmp_path / "environment" / "bin" / "python"
    checkout.mkdir()
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o755)
    for name in ("run.sh", "run_inference.sh", "requirements.txt"):
        shutil.copy(REPO / name, checkout)
    environment = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(tmp_path / "environment")}

    def started(*words):
        return subprocess.run(["sh", str(checkout / "run_inference.sh"), *words], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=60)  # fmt: skip

    return started


@pytest.mark.parametrize("gpu", ["0", "1,3"])
def test_the_first_word_is_the_gpu_and_the_others_are_pythons(run, tmp_path, gpu):
    done = run(gpu, "script.py", "--path", "a b", "")
    first, *lines = done.stdout.splitlines()
    assert first.endswith(" starting script.py --path a b ") and first[:2] == "20"
    assert lines[:3] == [f"gpu {gpu}", f"in {tmp_path}", f"path {tmp_path / 'check out'}"]
    assert lines[3:] == ["<script.py>", "<--path>", "<a b>", "<>"]
    assert done.returncode == 7


@pytest.mark.parametrize("words", [[], ["script.py"], ["--path"], [""]])
def test_a_forgotten_gpu_gets_the_usage(run, words):
    done = run(*words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("usage: sh run_inference.sh GPU script.py")

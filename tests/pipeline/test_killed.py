"""Real processes of the steps: killed at random moments, ended by SIGTERM, out of disk. Nothing saved is lost."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.model.saving import save_model
from alpaca_rlhf.runtime.outputs import write_output
from tests.pipeline.steps import make_base, metrics, run_step, three_steps
from tests.pipeline.test_resume import assert_same, weights
from tests.processes import ROOT
from tests.tiny import tiny_llama, word_tokenizer


def killed(folder, step: int, kills: int, seed: int) -> dict:
    """Run the kill worker in a fresh process and return what it counted."""
    command = [sys.executable, "-m", "tests.pipeline.kill_worker", str(folder), *map(str, (step, kills, seed))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    return report


@pytest.mark.launcher
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_C01_killed_twenty_times_and_the_same_weights(tmp_path, step):
    """After each kill the newest checkpoint is no older than the last one seen; at the end every bit is the same."""
    three_steps(tmp_path)
    report = killed(tmp_path, step, kills=20, seed=step)
    assert report["kills"] == 20  # some 7 of them while a checkpoint is being written, which chance decides
    assert_same(tmp_path / f"killed{step}", tmp_path / f"unbroken{step}")


def test_SIGTERM_ends_a_real_process_with_a_checkpoint_and_code_0(tmp_path):
    folder = make_base(tmp_path)
    flags = {"model_name_or_path": folder / "base", "per_device_train_batch_size": 2, "num_train_epochs": 40}
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = run_step(1, folder, output_dir=folder / "out", **flags)
        finally:
            os._exit(code)
    log = folder / "out" / "metrics.jsonl"
    while not (log.exists() and log.stat().st_size > 2000):  # it is some steps on its way
        assert os.waitpid(pid, os.WNOHANG)[0] == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    (found,) = (folder / "out" / "checkpoints").iterdir()
    step = int(found.name.removeprefix("step-"))
    assert 0 < step < 480 and metrics(folder / "out")[-1]["step"] == step
    assert not (folder / "out" / "model.safetensors").exists()
    assert run_step(1, folder, output_dir=folder / "out", resume=True, **flags) == 0
    assert run_step(1, folder, output_dir=folder / "whole", **flags) == 0
    assert_same(folder / "out", folder / "whole")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KB, on which a checkpoint of the tiny model takes about 100."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # a log that failed may still be open


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path, small_disk, capsys):
    folder = make_base(tmp_path)
    flags = {"model_name_or_path": folder / "base", "per_device_train_batch_size": 4, "num_train_epochs": 2}
    assert run_step(1, folder, output_dir=small_disk, save_steps=2, keep_checkpoints=0, **flags) == 2
    out, err = capsys.readouterr()
    assert out.count("could not be written (No space left on device); the newest complete one is") >= 2
    assert err.splitlines()[-1].startswith(f"error: the output in {small_disk} could not be written")
    found = sorted(path.name for path in (small_disk / "checkpoints").iterdir())
    assert found[:2] == ["step-00000002", "step-00000004"] and "step-00000012" not in found
    for path in (small_disk / "checkpoints" / name for name in found[:-1]):  # make room
        subprocess.run(["rm", "-r", str(path)], check=True)
    assert run_step(1, folder, output_dir=small_disk, resume=True, **flags) == 0
    assert run_step(1, folder, output_dir=folder / "whole", **flags) == 0
    one, two = weights(small_disk), weights(folder / "whole")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [record["step"] for record in metrics(small_disk)] == list(range(13))


def test_a_disk_that_fills_up_anywhere_in_an_output_is_one_sentence(tmp_path, small_disk):
    page, tokenizer = 4096, word_tokenizer()
    model = tiny_llama(len(tokenizer))

    def write(folder):
        save_model(folder, model, model.state_dict(), tokenizer)

    write(tmp_path / "all")
    pages = sum(-(-path.stat().st_size // page) for path in (tmp_path / "all").iterdir())
    filler, sentences = small_disk / "filler", set()
    for room in range(2, pages + 4):  # one for the folder, one for the list of files
        filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail - room) * page)
        try:
            write_output(small_disk / "out", write)
        except UserError as error:
            sentences.add(str(error))
            assert not (small_disk / "out" / "tokenizer.json").exists()
        filler.unlink()
    assert len(sentences) >= 1 and all("could not be written" in sentence for sentence in sentences), sentences
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == sorted(
        path.name for path in (small_disk / "out").iterdir() if not path.name.startswith(".")
    )

"""Checkpoints: whole or not there, found again, refused where going on would give another model."""

import json
import random
import resource
import signal
import subprocess
import sys

import numpy
import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime import checkpoint, checkpoint_files
from alpaca_rlhf.runtime.checkpoint import Checkpoints
from alpaca_rlhf.runtime.checkpoint_files import checkpoint_folder, read_manifest
from alpaca_rlhf.runtime.outputs import release_output_dirs
from alpaca_rlhf.runtime.random_state import random_states, set_random_states
from alpaca_rlhf.runtime.run import Run

RUN = Run(0, 0, 1, torch.device("cpu"), torch.float32)
SETTINGS = {"model.learning_rate": 0.1, "schedule.max_steps": None}


class Counter:
    """A model and a state in one: a number."""

    def __init__(self, value=0.0):
        self.value = torch.tensor([value])

    def shared_state(self):
        return {"value": self.value}

    def rank_state(self):
        return {"rank": 0}

    def load_state(self, shared, own):
        assert own == {"rank": 0}
        self.value = shared["value"]

    def state_dict(self):
        return float(self.value)

    def load_state_dict(self, state):
        self.value = torch.tensor([state])


@pytest.fixture(autouse=True)
def _handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    release_output_dirs()


def open_at(directory, resume=None, every=2, keep=2, settings=SETTINGS, data="abc", run=RUN, total=10):
    """Checkpoints that are ready for the loop, and the number they hold."""
    flag = "--{}".format
    found = Checkpoints(run, settings, flag, output_dir=str(directory), every=every, keep=keep, resume=resume)
    found.identify({"--data_path": lambda: data})
    counter, state = Counter(), Counter(5.0)
    found.restore({"model": counter}, {"state": state}, total)
    return found, counter, state


def train(directory, upto, resume=None, **more):
    found, counter, state = open_at(directory, resume, **more)
    for step in range(found.start + 1, upto + 1):
        counter.value = torch.tensor([float(step)])
        state.value = counter.value * 10
        if found.after_step(step):
            break
    return found


def steps(directory):
    return [int(path.name.split("-")[1]) for path in checkpoint_files.checkpoints(directory)]


def test_every_so_many_steps_and_at_the_end_and_only_the_newest_stay(tmp_path):
    train(tmp_path, 5)
    assert steps(tmp_path) == [4, 2]
    train(tmp_path, 9, "auto", total=9)
    assert steps(tmp_path) == [9, 8]
    train(tmp_path / "all", 6, keep=0)
    assert steps(tmp_path / "all") == [6, 4, 2]
    train(tmp_path / "none", 6, every=0)
    assert steps(tmp_path / "none") == []


def test_what_was_saved_comes_back(tmp_path):
    train(tmp_path, 5)
    found, counter, state = open_at(tmp_path, "auto")
    assert (found.start, float(counter.value), float(state.value)) == (4, 4.0, 40.0)
    found, counter, state = open_at(tmp_path / "else", str(tmp_path / "checkpoints" / "step-00000002"))
    assert (found.start, float(counter.value), float(state.value)) == (2, 2.0, 20.0)


def test_files_hold_nothing_that_could_run(tmp_path):
    """C-07: what is read back is tensors and numbers."""
    train(tmp_path, 2)
    for name in ("shared.pt", "rank-0.pt"):
        torch.load(checkpoint_folder(tmp_path, 2) / name, weights_only=True)


def test_random_states_go_on():
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    states = random_states(RUN.device)
    drawn = [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist()]
    set_random_states(states, RUN.device)
    assert drawn == [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(3).tolist()]


def test_C02_an_empty_directory_starts_anew_with_a_notice(tmp_path, capsys):
    found, counter, _ = open_at(tmp_path, "auto")
    assert found.start == 0 and float(counter.value) == 0 and not found.resuming
    assert f"there is no checkpoint in {tmp_path} yet, the run starts anew" in capsys.readouterr().out


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("shared.pt", lambda path: path.unlink(), "lacks its file shared.pt"),
        ("rank-0.pt", cut, "is damaged: rank-0.pt has"),
        ("shared.pt", flip, "is damaged: the content of shared.pt has changed"),
        ("checkpoint.json", lambda path: path.unlink(), "is incomplete: it has no checkpoint.json"),
        ("checkpoint.json", cut, "is damaged: its checkpoint.json cannot be read"),
        ("checkpoint.json", lambda path: path.write_text('{"format": 99}'), "is of format 99"),
    ],
)
def test_C02_a_damaged_checkpoint_is_named_and_the_newest_complete_one_is_taken(tmp_path, capsys, name, harm, words):
    train(tmp_path, 4)
    harm(checkpoint_folder(tmp_path, 4) / name)
    found = train(tmp_path, 4, "auto")
    assert found.start == 2
    assert any(f"step-00000004 {words}" in line for line in capsys.readouterr().out.splitlines())
    assert steps(tmp_path) == [4, 2] and isinstance(read_manifest(checkpoint_folder(tmp_path, 4)), dict)


def test_C02_a_half_written_one_is_named_and_left_out(tmp_path, capsys, monkeypatch):
    train(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "complete", lambda folder, record: 1 / 0)  # the process dies before the manifest
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, 4, "auto")
    assert len(checkpoint_files.half_written(tmp_path)) == 1
    assert train(tmp_path, 4, "auto").start == 2
    assert ".writing-step-00000004 was never finished and is left out" in capsys.readouterr().out
    assert steps(tmp_path) == [4, 2] and checkpoint_files.half_written(tmp_path) == []


def test_none_complete_is_an_error(tmp_path):
    train(tmp_path, 4)
    for step in (2, 4):
        (checkpoint_folder(tmp_path, step) / "shared.pt").unlink()
    with pytest.raises(UserError, match="none of the checkpoints in .* is complete; start without --resume"):
        open_at(tmp_path, "auto")


def test_what_would_give_another_model_is_refused_by_name(tmp_path):
    train(tmp_path, 2)
    two = Run(0, 0, 2, torch.device("cpu"), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "gather", lambda self, obj: [obj, obj])
        with pytest.raises(UserError, match=r"made by 1 process\(es\) and 2 were started: .* \(--num_gpus 1\)"):
            open_at(tmp_path, "auto", run=two)
    with pytest.raises(UserError, match="made with --model.learning_rate 0.1 and now it is 0.2"):
        open_at(tmp_path, "auto", settings=SETTINGS | {"model.learning_rate": 0.2})
    with pytest.raises(UserError, match="made with --schedule.max_steps not given and now it is 5"):
        open_at(tmp_path, "auto", settings=SETTINGS | {"schedule.max_steps": 5})
    with pytest.raises(UserError, match="made with another content of --data_path"):
        open_at(tmp_path, "auto", data="changed")
    bf16 = Run(0, 0, 1, torch.device("cpu"), torch.bfloat16)
    with pytest.raises(UserError, match="made with --engine.dtype float32 and now it is bfloat16"):
        open_at(tmp_path, "auto", run=bf16)


def test_a_new_run_does_not_mix_with_the_checkpoints_of_an_old_one(tmp_path):
    train(tmp_path, 2)
    with pytest.raises(UserError, match="holds checkpoints of an earlier run: go on with it"):
        open_at(tmp_path)
    train(tmp_path / "other", 2)
    with pytest.raises(UserError, match="holds checkpoints of an earlier run"):
        open_at(tmp_path, str(tmp_path / "other"))


def test_going_on_from_an_earlier_one_sets_the_later_ones_aside(tmp_path):
    train(tmp_path, 8, keep=0)
    found = train(tmp_path, 4, str(checkpoint_folder(tmp_path, 2)), keep=0)
    assert found.start == 2 and steps(tmp_path) == [4, 2]
    aside = sorted(path.name for path in (tmp_path / "checkpoints").glob("set-aside-*"))
    assert aside == [f"set-aside-1-step-{step:08d}" for step in (4, 6, 8)]
    again = train(tmp_path, 4, str(checkpoint_folder(tmp_path, 2)), keep=0)
    assert again.start == 2 and (tmp_path / "checkpoints" / "set-aside-2-step-00000004").is_dir()  # none is replaced


def test_a_finished_output_without_checkpoints_is_not_trained_again(tmp_path):
    (tmp_path / "training_arguments.json").write_text("{}")
    with pytest.raises(UserError, match="holds a finished model and no checkpoint"):
        open_at(tmp_path, "auto")
    with pytest.raises(UserError, match="there is no such directory"):
        open_at(tmp_path, str(tmp_path / "nowhere"))


def test_a_finished_run_says_so(tmp_path, capsys):
    train(tmp_path, 10)
    assert train(tmp_path, 10, "auto").start == 10
    assert "all are done, nothing is left to train" in capsys.readouterr().out


def test_SIGTERM_saves_after_the_present_step(tmp_path, capsys):
    found, counter, _ = open_at(tmp_path, every=0)
    assert not found.after_step(1)
    signal.raise_signal(signal.SIGTERM)
    counter.value = torch.tensor([2.0])
    assert found.after_step(2) and found.stopped and steps(tmp_path) == [2]
    assert "stopped by SIGTERM after optimizer step 2 of 10" in capsys.readouterr().out
    last, _, _ = open_at(tmp_path, "auto", every=0)
    signal.raise_signal(signal.SIGTERM)
    assert not last.after_step(10) and not last.stopped  # the last step is done: what is left is the output
    assert steps(tmp_path) == [10, 2]  # which can be made again, should the process not live to write it


def test_a_full_disk_keeps_what_is_there_and_the_run(tmp_path, capsys, monkeypatch):
    train(tmp_path, 2)

    def full(state, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_store", full)
        found = train(tmp_path, 5, "auto")
        text = "the checkpoint of step 4 could not be written (No space left on device); the newest complete one is"
        assert text in capsys.readouterr().out
        assert steps(tmp_path) == [2] and checkpoint_files.half_written(tmp_path) == []
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(UserError, match="SIGTERM stopped the run, and its checkpoint of step 7 failed: No space"):
            found.after_step(7)
    assert not open_at(tmp_path, "auto")[0].after_step(3) and train(tmp_path, 4, "auto").start == 2
    assert steps(tmp_path) == [4, 2]


def test_the_manifest_tells_a_reader_what_it_is(tmp_path):
    train(tmp_path, 2)
    manifest = json.loads((checkpoint_folder(tmp_path, 2) / "checkpoint.json").read_text())
    assert manifest["step"] == 2 and manifest["world_size"] == 1 and manifest["sources"] == {"--data_path": "abc"}
    assert manifest["settings"] == {**SETTINGS, "engine.dtype": "float32", "the device": "cpu"}


def test_a_full_disk_is_an_OSError_for_tensors_of_every_size(tmp_path):
    """torch's writer raises RuntimeError over it for all but the smallest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))  # SIGXFSZ is ignored by Python: the write fails
    try:
        for state in ({"one": torch.zeros(400_000)}, {f"{i}": torch.zeros(256, 256) for i in range(6)}):
            with pytest.raises(OSError):
                checkpoint._store(state, tmp_path / "state.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_empty_directory_does_not_start_anew_over_checkpoints(tmp_path):
    train(tmp_path / "out", 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds checkpoints of an earlier run"):
        open_at(tmp_path / "out", str(tmp_path / "empty"))
    assert open_at(tmp_path / "out", str(tmp_path / "out" / "checkpoints"))[0].start == 4


def test_the_digests_are_those_of_the_start(tmp_path):
    content = ["abc"]
    found = Checkpoints(RUN, SETTINGS, "--{}".format, output_dir=str(tmp_path), every=1, keep=2, resume=None)
    found.identify({"--data_path": lambda: content[0]})
    found.restore({"model": Counter()}, {"state": Counter()}, 10)
    content[0] = "edited while it trained"
    found.after_step(1)
    assert open_at(tmp_path, "auto", data="abc")[0].start == 1


def test_two_runs_cannot_write_into_one_directory(tmp_path):
    holder = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(UserError, match="another run is writing into .*: wait for its end, or choose another"):
            open_at(tmp_path)
        other.communicate(b"\n")
    assert train(tmp_path, 2).start == 0  # whoever held it is gone


def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(tmp_path):
    train(tmp_path, 6, keep=0)
    (checkpoint_folder(tmp_path, 6) / "shared.pt").unlink()
    train(tmp_path, 8, "auto", every=4)
    assert steps(tmp_path) == [8, 4]


def test_a_log_in_another_directory_is_not_its_log(tmp_path):
    train(tmp_path / "one", 4)
    assert open_at(tmp_path / "one", "auto")[0].in_place
    assert not open_at(tmp_path / "two", str(tmp_path / "one"))[0].in_place


def test_what_the_checkpoint_was_made_from_must_still_be_there(tmp_path):
    train(tmp_path, 2)
    found = Checkpoints(RUN, SETTINGS, "--{}".format, output_dir=str(tmp_path), every=1, keep=2, resume="auto")
    with pytest.raises(UserError, match="another content of --data_path"):
        found.identify({})

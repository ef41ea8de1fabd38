"""The metrics log: one rising step counter, valid JSON, nothing from other ranks, pictures at the end."""

import json
import math

import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.runtime import tracking
from alpaca_rlhf.runtime.curves import Curve
from alpaca_rlhf.runtime.run import Run
from alpaca_rlhf.runtime.tracking import MetricsLog

MAIN = Run(0, 0, 1, torch.device("cpu"), torch.float32)
OTHER = Run(1, 1, 2, torch.device("cpu"), torch.float32)
LOSS = {"loss": Curve("Loss", "nats", {"loss": "training", "eval_loss": "held out"})}


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_time(directory):
    return [{name: value for name, value in record.items() if name != "time"} for record in records(directory)]


def test_M06_steps_rise_strictly_and_every_line_is_on_disk_at_once(tmp_path):
    log = MetricsLog(tmp_path, MAIN)
    for step in range(1, 7):
        log.log(step, {"loss": 1.0 / step})
        assert [record["step"] for record in records(tmp_path)] == list(range(1, step + 1))
    assert all(record["time"] > 1e9 for record in records(tmp_path))
    with pytest.raises(AssertionError, match="goes back from step 6 to 5"):
        log.log(5, {"loss": 1.0})


def test_a_step_and_its_evaluation_share_a_line(tmp_path):
    log = MetricsLog(tmp_path, MAIN)
    log.log(0, {"eval_loss": 3.0})
    log.log(1, {"loss": 2.5})
    log.log(1, {"eval_loss": 2.0})
    log.log(2, {"loss": 1.0})
    assert without_time(tmp_path) == [
        {"step": 0, "eval_loss": 3.0},
        {"step": 1, "loss": 2.5, "eval_loss": 2.0},
        {"step": 2, "loss": 1.0},
    ]
    with pytest.raises(AssertionError, match="logged twice at step 2: .'loss'"):
        log.log(2, {"loss": 1.0})


def test_values_that_json_does_not_have_become_null(tmp_path):
    MetricsLog(tmp_path, MAIN).log(1, {"loss": math.nan, "grad_norm": math.inf, "tokens": 7})
    assert without_time(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "tokens": 7}]


@pytest.mark.parametrize("value", [torch.tensor(1.0), "1", None])
def test_only_plain_numbers_are_taken(tmp_path, value):
    with pytest.raises(AssertionError, match="loss is a"):
        MetricsLog(tmp_path, MAIN).log(1, {"loss": value})


def test_an_earlier_log_is_kept_aside(tmp_path):
    for loss in (1.0, 2.0):
        log = MetricsLog(tmp_path, MAIN)
        log.log(1, {"loss": loss})
        log.close()
    assert without_time(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert '"loss": 1.0' in (tmp_path / "metrics.previous.jsonl").read_text()


def test_other_ranks_and_runs_without_a_directory_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for log in (
        MetricsLog(tmp_path / "out", OTHER, tensorboard=True, tensorboard_path="tb", curves=LOSS),
        MetricsLog(None, MAIN, curves=LOSS),
    ):
        log.log(1, {"loss": 1.0})
        log.close()
    assert list(tmp_path.iterdir()) == []


def test_curves_are_drawn_for_what_appeared(tmp_path):
    curves = LOSS | {name: Curve(name, "nothing", {name: name}) for name in ("absent", "broken")}
    log = MetricsLog(tmp_path, MAIN, curves=curves)
    for step in range(1, 80):
        log.log(step, {"loss": 3.0 / step, "broken": math.nan})
    log.log(80, {"eval_loss": 1.0})
    log.close()
    log.close()
    pictures = list((tmp_path / "curves").iterdir())
    assert [picture.name for picture in pictures] == ["loss.png"]
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_every_value_only_when_asked(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path / "out", MAIN, tensorboard=True, tensorboard_path=tmp_path / "board")
    for step in range(3):
        log.log(step, {"loss": float(step)})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    MetricsLog(tmp_path / "plain", MAIN).close()
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("run", [MAIN, OTHER])
def test_M05_a_missing_tracker_is_one_sentence_on_every_rank(tmp_path, monkeypatch, run):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--enable_tensorboard needs the package tensorboard.*pip install tensorboard"):
        MetricsLog(tmp_path, run, tensorboard=True, tensorboard_path="tb")
    with pytest.raises(UserError, match="pip install matplotlib"):
        MetricsLog(tmp_path, run, curves=LOSS)
    MetricsLog(tmp_path, run).close()


def test_a_resumed_log_is_that_of_the_unbroken_run(tmp_path):
    """File, history and curves: what the file holds beyond the checkpoint goes, what came before it stays (M-06)."""
    whole = MetricsLog(tmp_path / "whole", MAIN)
    for step in range(4):
        whole.log(step, {"loss": math.nan if step == 1 else 1.0 / (step + 1)})
    cut = MetricsLog(tmp_path / "cut", MAIN)
    for step in range(2):
        cut.log(step, {"loss": math.nan if step == 1 else 1.0 / (step + 1)})
    state = cut.state_dict()
    for step in range(2, 30):  # it went on for long after the checkpoint
        cut.log(step, {"loss": 7.0, "another": 1.0})
    resumed = MetricsLog(tmp_path / "cut", MAIN, resuming=True)
    resumed.load_state_dict(state)
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")[:2]
    for step in (2, 3):
        resumed.log(step, {"loss": 1.0 / (step + 1)})
    assert without_time(tmp_path / "cut") == without_time(tmp_path / "whole")
    assert repr(resumed.history) == repr(whole.history)
    assert not (tmp_path / "cut" / "metrics.previous.jsonl").exists()


def test_events_after_the_checkpoint_are_purged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = MetricsLog(tmp_path, MAIN, tensorboard=True, tensorboard_path=tmp_path / "tb")
    first.log(0, {"loss": 1.0})
    state = first.state_dict()
    first.log(1, {"loss": 9.0})
    first.close()
    again = MetricsLog(tmp_path, MAIN, tensorboard=True, tensorboard_path=tmp_path / "tb", resuming=True)
    again.load_state_dict(state)
    again.log(1, {"loss": 0.5})
    again.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 0.5)]

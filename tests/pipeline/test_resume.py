"""Stopped after any optimizer step and resumed, each step ends with the same bits as the run that went through (C-01).

The child processes that are killed for real are in test_killed.py.
"""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from alpaca_rlhf.runtime.checkpoint import Checkpoints
from tests.pipeline.steps import make_base, metrics, run_step, three_steps, trained
from tests.processes import launch
from tests.tiny import write_jsonl

TWO = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "eval_interval": 2}
FLAGS = {
    1: {**TWO, "gradient_accumulation_steps": 2, "dropout": 0.1, "num_warmup_steps": 2},
    2: {**TWO, "dropout": 0.1, "lora_dim": 4, "only_optimize_lora": True},
    3: {
        "max_steps": 3, "ppo_epochs": 2, "enable_ema": True, "reward_normalization": "running", "kl_target": 3,
        "actor_dropout": 0.1, "unsup_coef": 0.1,
    },
}  # fmt: skip
STEPS = {1: 6, 2: 6, 3: 12}  # optimizer steps of these runs

RANKS = {"zero23": (2, 3), "zero32": (3, 2)}  # actor's and critic's stage; steps 1, 2: the first one's


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = three_steps(tmp_path_factory.mktemp("resume"))
    text = ["the cat eats a big red apples and water " * 3, "sun moon sky tree story of dog " * 4]
    write_jsonl(folder / "text.jsonl", [{"text": line} for line in text])
    return folder


def flags_of(step, folder, out, **more) -> dict:
    flags = FLAGS[step] | ({"model_name_or_path": folder / "base"} if step < 3 else trained(folder))
    flags |= {"unsupervised_dataset_name": folder / "text.jsonl"} if step == 3 else {}
    return flags | {"output_dir": out} | more


def run(step, folder, out, **more) -> int:
    return run_step(step, folder, **flags_of(step, folder, out, **more))


def weights(out) -> dict[str, torch.Tensor]:
    files = sorted(path for path in out.rglob("*.safetensors"))
    assert files
    return {f"{path.relative_to(out)}/{name}": value for path in files for name, value in load_file(path).items()}


def figures(out) -> list[dict]:
    """The log without what a clock says."""
    return [
        {name: value for name, value in record.items() if name != "time" and not name.startswith("seconds")}
        for record in metrics(out)
    ]


def assert_same(out, other) -> None:
    one, two = weights(out), weights(other)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert figures(out) == figures(other)


def stop_after(patch, count):
    """The run is asked to stop, as by a signal, while its ``count``-th optimizer step from now is at work."""
    original, seen = Checkpoints.after_step, []

    def asked(self, step):
        seen.append(step)
        if len(seen) == count:
            signal.raise_signal(signal.SIGTERM)
        return original(self, step)

    patch.setattr(Checkpoints, "after_step", asked)


@pytest.fixture(scope="module")
def whole(done):
    """The three runs that went through, with all their checkpoints: a run with saves."""
    outs = {step: done / f"whole{step}" for step in STEPS}
    for step, out in outs.items():
        assert run(step, done, out, save_steps=1, keep_checkpoints=0) == 0
    return outs


@pytest.mark.parametrize("step", STEPS)
def test_C01_a_run_with_saves_and_evaluations_equals_one_without(done, whole, tmp_path, step):
    more = {"eval_interval": 0} if step < 3 else {}
    assert run(step, done, tmp_path / "plain", **more) == 0
    one, two = weights(tmp_path / "plain"), weights(whole[step])
    assert all(torch.equal(one[name], two[name]) for name in one)
    for mine, theirs in zip(figures(tmp_path / "plain"), figures(whole[step]), strict=True):
        assert all(theirs[name] == value for name, value in mine.items())
    assert len(list((whole[step] / "checkpoints").iterdir())) == STEPS[step]


@pytest.mark.parametrize("step", STEPS)
def test_C01_stopping_after_any_optimizer_step_changes_nothing(done, whole, tmp_path, step):
    """One run, stopped by SIGTERM after each of its optimizer steps in turn: as many processes as steps."""
    for count in range(1, STEPS[step]):
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, 1)
            assert run(step, done, tmp_path / "out", resume=True) == 0
        assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir() if path.name.endswith(f"{count}")]
        assert not list((tmp_path / "out").rglob("*.safetensors"))  # no half-trained model stands there as the output
    assert run(step, done, tmp_path / "out", resume=True) == 0
    assert_same(tmp_path / "out", whole[step])


def test_C01_three_plus_three_steps_equal_six(done, whole, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        assert run(1, done, tmp_path / "out") == 0
    assert "stopped by SIGTERM after optimizer step 3 of 6" in capsys.readouterr().out
    assert run(1, done, tmp_path / "out", resume=True) == 0
    assert "resuming after optimizer step 3 of 6 (3 to go)" in capsys.readouterr().out
    assert_same(tmp_path / "out", whole[1])


@pytest.mark.launcher
def test_C01_two_ranks_under_deepspeed_go_on_with_the_same_bits(done):
    """ZeRO 2 and 3; the signal reaches one of the ranks only."""
    launch("tests.pipeline.resume_worker", done, 2, [])
    for step in STEPS:
        for name in RANKS:
            assert_same(done / f"{name}{step}-out", done / f"{name}{step}-whole")


def test_C02_an_empty_directory_starts_anew(done, whole, tmp_path, capsys):
    assert run(1, done, tmp_path / "out", resume=True) == 0
    assert "there is no checkpoint" in capsys.readouterr().out
    assert_same(tmp_path / "out", whole[1])


def test_C02_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(done, whole, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        assert run(3, done, tmp_path / "out", save_steps=2) == 0
    (tmp_path / "out/checkpoints/step-00000004/shared.pt").unlink()
    capsys.readouterr()
    assert run(3, done, tmp_path / "out", resume=True) == 0
    out = capsys.readouterr().out
    assert "step-00000004 lacks its file shared.pt; looking for the one before" in out
    assert "resuming after optimizer step 2 of 12" in out
    assert_same(tmp_path / "out", whole[3])


def test_C03_counters_and_rates_continue(done, whole, tmp_path):
    """M-06 too: one rising step axis, and the learning rates of the unbroken run."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)
        assert run(1, done, tmp_path / "out") == 0
    assert [record["step"] for record in metrics(tmp_path / "out")] == [0, 1, 2, 3]
    assert run(1, done, tmp_path / "out", resume=True) == 0
    ours, theirs = metrics(tmp_path / "out"), metrics(whole[1])
    assert [record["step"] for record in ours] == [0, 1, 2, 3, 4, 5, 6]
    rates = [[record.get("learning_rate/decay") for record in one] for one in (ours, theirs)]
    assert rates[0] == rates[1] and len(set(rates[0])) == 5  # that of the warm-up comes again on the way down
    assert not (tmp_path / "out" / "metrics.previous.jsonl").exists()


def test_a_finished_run_trains_nothing_and_says_so(done, whole, tmp_path, capsys):
    before = weights(whole[1])
    assert run(1, done, tmp_path / "out", save_steps=4) == 0
    capsys.readouterr()
    assert run(1, done, tmp_path / "out", save_steps=4, resume=True) == 0
    assert "all are done, nothing is left to train" in capsys.readouterr().out
    assert_same(tmp_path / "out", whole[1])
    assert weights(whole[1]).keys() == before.keys()


@pytest.mark.parametrize(
    ("step", "change", "words"),
    [
        (1, {"learning_rate": 3e-3}, "--learning_rate 0.01 and now it is 0.003"),
        (1, {"num_train_epochs": 3}, "--num_train_epochs 2 and now it is 3"),
        (1, {"seed": 5}, "--seed 1234 and now it is 5"),
        (1, {"data_path": "OTHER"}, "another content of --data_path"),
        (1, {"model_name_or_path": "OTHER"}, "another content of --model_name_or_path"),
        (2, {"pair_loss": "per_token"}, "--pair_loss end and now it is per_token"),
        (3, {"kl_target": 4}, "--kl_target 3.0 and now it is 4.0"),
        (3, {"critic_model_name_or_path": "OTHER"}, "another content of --critic_model_name_or_path"),
        (3, {"unsupervised_dataset_name": "OTHER"}, "another content of --unsupervised_dataset_name"),
    ],
)
def test_another_setting_dataset_or_model_is_refused_by_its_flag(done, whole, tmp_path, capsys, step, change, words):
    others = {"data_path": done / "text.jsonl", "model_name_or_path": done / "actor"}
    others["critic_model_name_or_path"] = done / "final" / "critic"
    others["unsupervised_dataset_name"] = write_jsonl(tmp_path / "other.jsonl", [{"text": "the cat runs " * 9}])
    if "data_path" in change:
        rows = (done / "data" / "train.jsonl").read_text().replace("blue", "green").splitlines(keepends=True)
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "train.jsonl").write_text("".join(rows))
        (tmp_path / "d" / "test.jsonl").write_bytes((done / "data" / "test.jsonl").read_bytes())
        others["data_path"] = tmp_path / "d"
    change = {name: others[name] if value == "OTHER" else value for name, value in change.items()}
    before = sorted(path.name for path in (whole[step] / "checkpoints").iterdir())
    assert run(step, done, whole[step], resume=True, save_steps=1, keep_checkpoints=0, **change) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in (whole[step] / "checkpoints").iterdir()) == before


def test_what_does_not_change_the_weights_may_change(done, whole, tmp_path):
    """The data and the model in another place, another cache, evaluation, answers printed."""
    moved = make_base(tmp_path / "moved")
    flags = {"model_name_or_path": moved / "base", "data_path": moved / "data", "data_output_path": tmp_path / "cache"}
    flags |= {"per_device_eval_batch_size": 3, "resume": whole[1] / "checkpoints" / "step-00000003"}
    assert run(1, done, tmp_path / "out", **flags) == 0
    one, two = weights(tmp_path / "out"), weights(whole[1])
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_configuration_statistics_or_a_reward_function_that_changed_is_refused(done, tmp_path, capsys):
    for name in ("actor", "critic"):
        shutil.copytree(done / name, tmp_path / name)
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def score(prompts, answers):\n    return [float(len(answer)) for answer in answers]\n")
    actor = {"actor_model_name_or_path": tmp_path / "actor", "max_steps": 1, "save_steps": 1}
    judged = actor | {"critic_model_name_or_path": tmp_path / "critic"}
    ruled = actor | {"reward_fn": f"{scorer}:score"}
    edits = {"--actor_model_name_or_path": (tmp_path / "actor" / "config.json", judged),
             "--reward_normalization saved": (tmp_path / "critic" / "reward_stats.json", judged),
             "--reward_fn": (scorer, ruled)}  # fmt: skip
    for number, (words, (file, flags)) in enumerate(edits.items()):
        out = tmp_path / f"out{number}"
        assert run_step(3, done, **flags, output_dir=out) == 0
        before = file.read_text()
        if file.name == "reward_stats.json":
            stats = json.loads(before)
            file.write_text(json.dumps(stats | {"mean": stats["mean"] + 1}))
        else:
            file.write_text(before + "\n")
        assert run_step(3, done, **flags, output_dir=out, resume=True) == 2
        assert f"another content of {words}" in capsys.readouterr().err
        file.write_text(before)
        assert run_step(3, done, **flags, output_dir=out, resume=True) == 0


def test_skipped_steps_in_a_row_are_counted_across_a_stop(done, tmp_path, capsys, monkeypatch):
    """P-14: two before the stop and one after it are three, one more than is allowed."""
    from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main

    loss = main.batch_loss
    monkeypatch.setattr(main, "batch_loss", lambda *words: loss(*words) * float("nan"))
    flags = {"max_skipped_steps": 2, "eval_interval": 0}
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert run(1, done, tmp_path / "out", **flags) == 0
    assert run(1, done, tmp_path / "out", resume=True, **flags) == 2
    assert "step 3:" in capsys.readouterr().err and metrics(tmp_path / "out")[-1]["step"] == 3


def test_records_can_be_inspected_where_checkpoints_lie(done, whole):
    assert run(1, done, whole[1], inspect=1) == 0

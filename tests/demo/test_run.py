"""The demo's driver: the order of its programs, what a failing one leaves, and the report's arithmetic."""

import json
import shlex
import sys

import pytest

from alpaca_rlhf.arguments.deepspeed_chat import parse_step1, parse_step2, parse_step3
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.demo import report, run, tiny_model


def test_the_programs_come_in_order_and_their_flags_parse(tmp_path):
    for model, sizes in (("tiny", run.TINY), ("smollm2", run.SMOLLM2), ("tiny", run.GLANCE)):
        commands = dict(run.commands(model, sizes, tmp_path, seed=5))
        assert list(commands) == ["base", "sft", "reward_model", "ppo", "compare"]
        parsers = {"sft": parse_step1, "reward_model": parse_step2, "ppo": parse_step3}
        for name, parse in parsers.items():
            assert parse(commands[name][3:]).output.seed == 5
        reward = parse_step2(commands["reward_model"][3:])
        assert reward.model.path == str(tmp_path / "sft")


def test_M08_a_failing_program_ends_the_demo_with_its_code_and_its_command(tmp_path, monkeypatch, capfd):
    done = tmp_path / "later"
    fails = [sys.executable, "-c", "import sys; print('error: ./misspelt.jsonl', file=sys.stderr); sys.exit(7)"]
    later = [sys.executable, "-c", f"open({str(done)!r}, 'w')"]
    monkeypatch.setattr(run, "commands", lambda *args: [("sft", fails), ("ppo", later)])
    assert run.main(["--output_dir", str(tmp_path)]) == 7
    error = capfd.readouterr().err
    assert "misspelt.jsonl" in error.splitlines()[0] and "sft ended with exit code 7" in error and not done.exists()


def test_a_program_runs_here_and_shows_a_command_that_a_shell_takes(tmp_path, monkeypatch, capsys):
    called = []
    monkeypatch.setattr(tiny_model, "main", called.append)
    line = [sys.executable, "-m", "alpaca_rlhf.demo.tiny_model", str(tmp_path / "a b"), "--seed", "5"]
    run.run_here(line, "--more")
    assert called == [[str(tmp_path / "a b"), "--seed", "5", "--more"]]
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].strip() == "--seed 5 \\" and sys.executable not in shown
    assert shlex.split(shown.replace("\\\n", " ")) == ["python", *line[1:], "--more"]


def test_a_program_that_fails_here_says_so(monkeypatch, capsys):
    def fails(argv):
        raise UserError("no such folder")

    monkeypatch.setattr(tiny_model, "main", fails)
    with pytest.raises(run.StepFailed, match="tiny_model ended with exit code 2"):
        run.run_here(["python", "-m", "alpaca_rlhf.demo.tiny_model", "x"])
    assert "error: no such folder" in capsys.readouterr().err


@pytest.fixture
def outputs(tmp_path):
    """What the programs would have left, with two prompts of the embedded ones."""
    for name, lines in {
        "sft": [{"step": 0, "eval_perplexity": 9.0}, {"step": 2, "eval_perplexity": 3.0}],
        "reward_model": [{"step": 0, "eval_accuracy": 0.5, "eval_count": 300.0}, {"step": 1, "eval_accuracy": 0.8}],
        "rlhf": [{"step": 1, "answers": 4.0, "normalized_score": -1.0, "kl": 0.0}],
    }.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps({"eval_count": 300.0, **line}) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    models = {}
    for side, texts in {"sft": ["It is.", "It is."], "rlhf": ["It is.", "GOOD"]}.items():
        figures = {"mean_tokens": 2, "ended_share": 1.0, "distinct_2": 0.5, "list_share": 0.0, "kl": 0.0}
        models[side] = {**figures, "answers": [{"text": text} for text in texts]}
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "comparison.json").write_text(json.dumps({"prompts": ["p", "q"], "models": models}))
    return tmp_path


def test_the_report_counts_ties_half(outputs, monkeypatch):
    monkeypatch.setattr(report, "gold_score", lambda prompt, text: 1.0 if text == "GOOD" else 0.25)
    result = report.build_report(outputs, run.DATA, "tiny", 1, {"sft": 1.0})
    assert result["rlhf"]["win_rate"] == 0.75
    assert result["rlhf"]["gold_mean"] == 0.625 and result["sft"]["gold_std"] == 0.0
    assert result["reward_model"]["accuracy"] == 0.8 and result["reward_model"]["count"] == 300
    report.write_report(outputs, result)
    assert "| gold score, mean | 0.250 (0.250 to 0.250) | 0.625 (" in (outputs / "report.md").read_text()
    assert json.loads((outputs / "report.json").read_text()) == result


def test_the_labellers_accuracy_is_the_gold_rules_on_the_noisy_labels():
    assert 0.8 < report.labeller_accuracy(run.DATA / "preferences" / "test.jsonl") < 0.95

"""report.html: one file that holds the whole run of the demo, loads nothing, and shows every text as text."""

import html
import json
import re
import sys

import pytest

from alpaca_rlhf.demo import report, run
from alpaca_rlhf.runtime.curves import Curve, draw_curves

ANSWER = "1. a <b> & <script>x</script>"


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """What the programs would have left: twelve prompts, one curve a step, settings."""
    logs = {
        "sft": [{"step": 0, "eval_perplexity": 9.0}, {"step": 2, "eval_perplexity": 3.0}],
        "reward_model": [{"step": 1, "eval_accuracy": 0.8, "eval_count": 300.0}],
        "rlhf": [{"step": 1, "answers": 4.0, "normalized_score": -1.0, "kl": 0.0}],
    }
    for name, lines in logs.items():
        curve = Curve(name, "nats", {"loss": "training"})
        draw_curves(tmp_path / name / "curves" / f"{name}_curve.png", curve, {"loss": ([1, 2], [0.5, 0.25])})
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rlhf" / "actor").mkdir()
    for folder in ("sft", "rlhf/actor"):
        settings = {"ppo": {"kl_coef": 0.125}, "data_report": {"lines": ["not shown"]}}
        (tmp_path / folder / "training_arguments.json").write_text(json.dumps(settings))
    figures = {"mean_tokens": 2, "ended_share": 1.0, "distinct_2": 0.5, "list_share": 0.0, "kl": 0.0}
    texts = {"sft": "It is.", "rlhf": ANSWER}
    models = {side: {**figures, "answers": [{"text": text}] * 12} for side, text in texts.items()}
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "comparison.json").write_text(json.dumps({"prompts": ["p"] * 12, "models": models}))
    monkeypatch.setattr(report, "gold_score", lambda prompt, text: 1.0 if text == ANSWER else 0.25)
    return tmp_path


def test_the_page_holds_the_whole_run_and_loads_nothing(outputs):
    result = report.build_report(outputs, run.DATA, "tiny", 7, {"sft": 61.2, "reward_model": 5, "ppo": 9, "total": 76})
    report.write_report(outputs, result)
    page = (outputs / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert page.count(html.escape(ANSWER)) == 10 and "<script" not in page
    assert page.count('class="prompt text"') == 10
    assert "perplexity 9.00 before, 3.00 after" in page and '<td class="number">61</td>' in page and "--seed 7" in page
    assert "<td>ppo.<wbr>kl_<wbr>coef</td>" in page and ">0.125</td>" in page and "not shown" not in page
    figures = ['<td class="number">0.250 (0.250 to 0.250)</td>', '<td class="number">1.000 (1.000 to 1.000)</td>']
    assert "<td>gold score, mean</td>" + "".join(figures) in page
    # twelve wins of twelve: Wilson's lower end is 12 / (12 + 3.8415)
    wins = f"1.000 ({12 / 15.841459:.3f} to 1.000)"
    assert wins in page and f"| wins against SFT (ties count half) | – | {wins} |" in report.closing_table(result)


def test_the_page_shows_the_commands_and_questions_without_their_frame(outputs):
    line = "python -m step --output_dir 'a <b>'"
    result = report.build_report(outputs, run.DATA, "tiny", 7, {"sft": 1.0}, {"sft": line})
    page = report.report_page(outputs, result)
    assert f"<pre>{html.escape(line)}</pre>" in page
    assert "The commands" not in report.report_page(outputs, {**result, "commands": {}})
    assert report.asked("\n\nHuman: Name it.\n\nAssistant:") == "Name it."
    talk = "Human: Name it.\n\nAssistant: No.\n\nHuman: Why?"
    assert report.asked(f"\n\n{talk}\n\nAssistant:") == talk
    assert '<div class="prompt text">What are some facts about tennis?</div>' in page


def test_curves_come_in_the_order_of_their_captions_with_these(outputs):
    for name in ("kl", "train_average_reward", "another_one"):
        curve = Curve(name, "nats", {"loss": "training"})
        draw_curves(outputs / "rlhf" / "curves" / f"{name}.png", curve, {"loss": ([1], [0.5])})
    page = report.report_page(outputs, report.build_report(outputs, run.DATA, "tiny", 7, {"sft": 1.0}))
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)[2:]
    expected = [report.CAPTIONS["train_average_reward"], report.CAPTIONS["kl"], "another one", "rlhf curve"]
    assert captions == [html.escape(caption) for caption in expected]


def test_the_interval_of_a_mean():
    low, high = report.mean_interval([0.0, 1.0] * 50)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - low == pytest.approx(2 * 1.96 * (25 / 99) ** 0.5 / 10)  # the variance of 100 coins is 25 / 99
    assert report.mean_interval([0.25]) == (0.25, 0.25)


def test_must_fail_a_page_whose_pictures_lie_beside_it(outputs):
    result = report.build_report(outputs, run.DATA, "tiny", 7, {"sft": 1.0})
    (outputs / "sft" / "curves" / "sft_curve.png").unlink()
    with pytest.raises(AssertionError):
        assert report.report_page(outputs, result).count("data:image/png;base64,") == 3


def test_the_demo_ends_by_naming_the_page(outputs, monkeypatch, capsys):
    monkeypatch.setattr(run, "commands", lambda *args: [("sft", [sys.executable, "-c", "pass", "--max_steps", "3"])])
    assert run.main(["--output_dir", str(outputs)]) == 0
    assert "--max_steps 3" in (outputs / "report.html").read_text()  # what was run
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert str(outputs / "report.html") in last and (outputs / "report.html").is_file()

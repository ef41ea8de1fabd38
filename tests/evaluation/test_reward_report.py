"""The report on a reward model: the figures of step 2's own evaluation, known answers, pages that show text as text."""

import html
import json
import math

import pytest

from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.evaluation.pair_figures import ScoredPair, accuracy_by, group_name, pair_figures
from alpaca_rlhf.evaluation.reward_report import main
from alpaca_rlhf.runtime.run import command
from tests.pipeline.steps import make_base, metrics, run_step
from tests.tiny import PAIRS, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("report"))
    flags = {"model_name_or_path": folder / "base", "output_dir": folder / "critic"}
    assert run_step(2, folder, **flags) == 0
    return folder


def report(folder, out, *words, data="data"):
    argv = ["--model", folder / "critic", "--data_path", folder / data, "--output_dir", out, "--max_seq_len", 32]
    return command(main)([str(word) for word in [*argv, *words]])


def read(out):
    return json.loads((out / "reward_report.json").read_text(encoding="utf-8"))


def test_the_report_agrees_with_step_2s_own_evaluation(folder, tmp_path):
    assert report(folder, tmp_path) == 0
    found = read(tmp_path)
    logged = [line for line in metrics(folder / "critic") if "eval_accuracy" in line][-1]
    assert found["count"] == logged["eval_count"] == 8 and found["ties"] == logged["eval_ties"]
    assert found["accuracy"] == logged["eval_accuracy"]
    assert found["mean_gap"] == pytest.approx(logged["eval_gap"], rel=1e-5)
    low, high = found["accuracy_interval"]
    assert low < found["accuracy"] <= high
    assert sum(part["size"] for part in found["reliability"]) == 8
    for groups in (found["by_length_difference"], found["by_gap"]):
        assert sum(group["count"] for group in groups) == 8
        right = sum(group["count"] * group["accuracy"] for group in groups)
        assert right == pytest.approx(8 * found["accuracy"])
    names = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert names == {"reliability.png", "scores.png", "gaps.png", "accuracy_by_length_difference.png",
                     "accuracy_by_gap.png"}  # fmt: skip


def test_neither_the_batch_nor_a_second_start_changes_a_figure(folder, tmp_path, monkeypatch):
    assert report(folder, tmp_path / "1", "--batch_size", 1) == 0
    assert report(folder, tmp_path / "8", "--batch_size", 8) == 0
    one, eight = read(tmp_path / "1"), read(tmp_path / "8")
    assert one["mean_gap"] == pytest.approx(eight["mean_gap"], rel=1e-5) and one["accuracy"] == eight["accuracy"]
    (records,) = (tmp_path / "1" / "records").iterdir()
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:5]) + lines[5][:9])  # as a process leaves it that is killed
    scored, real = [], RewardModel.forward

    def counted(self, ids, *words):
        scored.append(len(ids) // 2)
        return real(self, ids, *words)

    monkeypatch.setattr(RewardModel, "forward", counted)
    assert report(folder, tmp_path / "1", "--batch_size", 2) == 0
    assert scored == [2, 1]
    assert read(tmp_path / "1")["mean_gap"] == pytest.approx(one["mean_gap"], rel=1e-5)


def test_all_pairs_and_what_does_not_fit(folder, tmp_path):
    assert report(folder, tmp_path / "all", "--part", "all") == 0
    assert read(tmp_path / "all")["count"] == 32
    assert report(folder, tmp_path / "short", "--max_seq_len", 13) == 0
    found = read(tmp_path / "short")
    assert sum(found["dropped"].values()) + found["count"] == 8 and found["dropped"]


def test_the_pages_show_markup_as_text(folder, tmp_path):
    pair = {"prompt": "Human: <b>x</b> Assistant:", "chosen": " <script>a</script>", "rejected": " blue"}
    other = {**pair, "chosen": " blue", "rejected": " <script>a</script>"}
    write_jsonl(tmp_path / "evil.jsonl", [pair, other])
    assert report(folder, tmp_path / "out", "--part", "all", data=tmp_path / "evil.jsonl") == 0
    assert len(read(tmp_path / "out")["mistakes"]) == 1  # the pair and its opposite: one is wrong
    page = (tmp_path / "out" / "reward_report.html").read_text()
    assert "<script" not in page and html.escape("<script>a</script>") in page and page.count("data:image/png") == 5
    assert "\\<script>" in (tmp_path / "out" / "reward_report.md").read_text()


@pytest.mark.parametrize(
    "words,data,part",
    [
        (("--max_seq_len", 3), "data", "can be used"),
        (("--bins", 0), "data", "--bins"),
        (("--mistakes", -1), "data", "--mistakes"),
        (("--model", "BASE"), "data", "not a reward model"),
        ((), "few.jsonl", "--part all"),
        ((), "prompts.jsonl", "rejected"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, capsys, words, data, part):
    write_jsonl(folder / "few.jsonl", PAIRS)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": "x"}])
    given = [folder / "base" if word == "BASE" else word for word in words]
    assert report(folder, tmp_path, *given, data=data) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert part in line


def test_scores_that_are_not_finite_have_no_accuracy(folder, tmp_path, monkeypatch, capsys):
    real = RewardModel.forward
    monkeypatch.setattr(
        RewardModel, "forward", lambda self, *words: (out := real(self, *words))._replace(scores=out.scores / 0)
    )
    assert report(folder, tmp_path) == 2
    assert "not finite" in capsys.readouterr().err


def scored(gap, longer_by):
    return ScoredPair("r:1", "p", "c", "r", gap, 0.0, 10 + longer_by, 10)


def test_pair_figures_by_hand():
    nine, third = math.log(9), math.log(3)  # confidences 0.9 and 0.75
    pairs = [scored(nine, 4), scored(nine, 3), scored(-third, -2), scored(third, 0), scored(0.0, 1)]
    found = pair_figures(pairs, bins=2, mistakes=1)
    assert (found["count"], found["ties"], found["accuracy"]) == (5, 1, 0.6)
    # bins 0.5-0.75 and 0.75-1: the tie (0.5, half right) alone, the others (0.9, 0.9, 0.75, 0.75; three of four right)
    assert [part["size"] for part in found["reliability"]] == [1, 4]
    assert found["reliability"][1]["accuracy"] == 0.75
    assert found["expected_calibration_error"] == pytest.approx(4 / 5 * (0.825 - 0.75))
    # -log sigmoid: 0.9, 0.9, 0.25, 0.75, 0.5
    assert found["loss"] == pytest.approx(-sum(map(math.log, (0.9, 0.9, 0.25, 0.75, 0.5))) / 5)
    assert found["longer_is_chosen"] == pytest.approx(3.5 / 5)
    assert found["mistakes"][0]["gap"] == pytest.approx(-third) and len(found["mistakes"]) == 1


def test_must_fail_a_tie_that_counts_as_correct():
    pairs = [scored(1.0, 0), scored(0.0, 0)]
    with pytest.raises(AssertionError):
        assert pair_figures(pairs, 10, 0)["accuracy"] == sum(pair.gap >= 0 for pair in pairs) / 2


def test_groups_are_of_equal_size_and_keep_equal_values_together():
    values = [5.0, 1.0, 2.0, 4.0, 3.0, 6.0]
    groups = accuracy_by(values, [value > 3 for value in values], 3)
    found = [(group["low"], group["high"], group["count"], group["accuracy"]) for group in groups]
    assert found == [(1, 2, 2, 0), (3, 4, 2, 0.5), (5, 6, 2, 1)]
    groups = accuracy_by([0.0] * 5 + [7.0], [True] * 6, 3)
    assert [(g["low"], g["count"]) for g in groups] == [(0, 5), (7, 1)]
    assert [group_name(g, 0) for g in groups] == ["0", "7"] and group_name({"low": -1.5, "high": 2}, 1) == "-1.5 to 2.0"


def test_must_fail_groups_that_cut_through_equal_values():
    groups = accuracy_by([0.0] * 4 + [1.0] * 2, [True] * 6, 3)
    with pytest.raises(AssertionError):
        assert [group["count"] for group in groups] == [2, 2, 2]

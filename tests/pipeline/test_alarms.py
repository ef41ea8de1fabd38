"""Each alarm of step 3 is said when it deserves it, once, and a healthy run says nothing."""

import json
import math

import pytest

from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.alarms import Alarms, kl_limit
from tests.pipeline.steps import metrics, run_step, three_steps, trained


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return three_steps(tmp_path_factory.mktemp("steps"))


def alarms(**changes):
    return Alarms(**{"kl_limit": 30.0, "clip_reward": 5.0} | changes)


def healthy(length=40):
    """The shape of this project's demo: the score rises and answers grow, the KL goes to 4 nats, the critic learns.

    The share of different bigrams falls with the length, as in every text.
    """
    for number in range(length):
        progress = number / (length - 1)
        tokens = 64 * (24 + 37 * progress)
        yield {
            "score": -0.3 + 3 * progress, "score_std": 1.5 - progress, "normalized_score": -1 + 1.8 * progress,
            "clipped_score_share": 0.01, "kl": 4.4 * progress - 0.05 * (number == 0), "ended_share": 0.98,
            "empty_share": 0.0, "distinct_2": 20 / math.sqrt(tokens) * (1 + 0.2 * (-1) ** number),
            "answer_tokens": tokens, "clip_share": 0.05 - 0.04 * progress,
            "explained_variance": -0.05 + 0.7 * progress,
        }  # fmt: skip


def run(watcher, rollouts):
    """Sentences by the index of the rollout that they were said at."""
    said = {index: watcher.rollout(figures) for index, figures in enumerate(rollouts)}
    return {index: sentences for index, sentences in said.items() if sentences}


def changed(**series):
    """The healthy run with some figures replaced: a number, or a function of the rollout's index."""
    for number, figures in enumerate(healthy()):
        yield figures | {name: value(number) if callable(value) else value for name, value in series.items()}


def test_a_healthy_run_says_nothing():
    watcher = alarms()
    assert run(watcher, healthy()) == {}
    assert watcher.metrics() == {"alarms": 0.0}


@pytest.mark.parametrize(
    "series, name, begins, words",
    [
        ({"kl": lambda i: 4.0 * i}, "kl_high", 8, ["32.0 nats", "30 (--kl_alarm)", "--actor_learning_rate"]),
        ({"kl": -0.2}, "kl_negative", 2, ["negative for three rollouts, now -0.20", "--top_p"]),
        ({"clipped_score_share": 1.0}, "scores_clipped", 0, ["100% of the scores", "±5", "--reward_normalization"]),
        ({"clipped_score_share": 0.25}, "scores_clipped", 0, ["25% of the scores"]),
        ({"ended_share": 0.0}, "no_answer_ends", 1, ["--max_answer_seq_len", "--missing_eos_penalty"]),
        ({"empty_share": 1.0}, "empty_answers", 1, ["100% of the answers are empty", "--inspect"]),
        ({"clip_share": 0.4}, "policy_clipped", 1, ["40% of the tokens", "--ppo_epochs"]),
        ({"explained_variance": -0.5}, "critic_useless", 9, ["ten rollouts", "-0.50", "--critic_learning_rate"]),
    ],
)
def test_each_alarm_is_said_once_when_it_begins(series, name, begins, words):
    watcher = alarms()
    said = run(watcher, changed(**series))
    assert list(said) == [begins] and len(said[begins]) == 1
    assert all(word in said[begins][0] for word in [f"alarm at rollout {begins + 1}: ", *words])
    assert watcher.active == [name]
    assert watcher.metrics() == {"alarms": 1.0, f"alarm/{name}": 1.0}


@pytest.mark.parametrize("name", ["ended_share", "empty_share", "clip_share", "explained_variance", "kl"])
def test_one_bad_rollout_alone_is_no_alarm(name):
    bad = {"ended_share": 0.0, "empty_share": 1.0, "clip_share": 0.5, "explained_variance": -3.0, "kl": -1.0}[name]
    for index in (0, 20):
        rollouts = list(healthy())
        rollouts[index][name] = bad
        assert run(alarms(), rollouts) == {}


def test_a_score_that_rises_on_repetition_is_an_alarm():
    """The answers say ever less in the same number of tokens while the score rises."""
    share = lambda i: 0.5 if i < 15 else 0.5 * 0.8 ** (i - 15)  # noqa: E731
    watcher = alarms()
    said = run(watcher, changed(distinct_2=share, answer_tokens=1500.0))
    assert watcher.active == ["distinctness_falls"] and len(said) == 1
    (index,) = said
    assert 18 <= index <= 24
    assert "of its standard deviations while the answers have only" in said[index][0]


@pytest.mark.parametrize(
    "series",
    [
        {"distinct_2": lambda i: 0.5 * 0.9**i, "answer_tokens": 1500.0, "score": 0.0},  # but the score does not rise
        {"distinct_2": lambda i: 0.6 / 2 ** (i / 20), "answer_tokens": lambda i: 1500.0 * 4 ** (i / 20)},  # but longer
        {"distinct_2": math.nan},  # answers of one token have no bigrams
    ],
)
def test_distinctness_that_falls_for_another_reason_is_no_alarm(series):
    assert run(alarms(), changed(**series)) == {}


def test_an_alarm_that_stops_and_returns_is_said_again():
    watcher = alarms()
    high = {0, 1, 5, 6, 7, 12, 13}  # twice within three rollouts is the same alarm, later it is another one
    said = run(watcher, changed(kl=lambda i: 50.0 if i in high else 1.0))
    assert list(said) == [0, 5, 12]
    assert watcher.active == []
    assert list(run(alarms(), changed(kl=lambda i: 50.0 if i in (0, 2, 4, 6) else 1.0))) == [0]


def test_a_figure_that_is_missing_or_not_finite_says_nothing_and_interrupts_nothing():
    """Rollouts that were skipped train nothing and may have no finite KL."""
    for gap in ({"explained_variance": math.nan}, {}):
        rollouts = list(changed(explained_variance=-1.0))
        for index in (3, 5):
            del rollouts[index]["explained_variance"]
            rollouts[index] |= gap
        assert list(run(alarms(), rollouts)) == [11]
    assert run(alarms(), [{"kl": math.nan, "score": math.inf}, {}] * 20) == {}


@pytest.mark.parametrize("stop", [1, 6, 12, 20])
def test_a_resumed_run_goes_on_where_it_stopped(stop):
    share = lambda i: 0.5 if i < 15 else 0.5 * 0.8 ** (i - 15)  # noqa: E731
    rollouts = list(changed(distinct_2=share, answer_tokens=1500.0, explained_variance=-1.0, kl=-1.0))
    whole = run(alarms(), rollouts)
    assert len(whole) == 3
    first, second = alarms(), alarms()
    said = run(first, rollouts[:stop])
    state = first.state_dict()
    run(first, rollouts[stop:])  # the state is a copy, not a view
    second.load_state_dict(json.loads(json.dumps(state)))
    said |= {stop + index: sentences for index, sentences in run(second, rollouts[stop:]).items()}
    assert said == whole


def test_the_limit_of_the_kl():
    assert kl_limit(None, None) == 30.0
    assert kl_limit(None, 6.0) == 18.0
    assert kl_limit(10.0, 6.0) == 10.0


def test_R05_every_score_clipped_is_said_and_logged(done, tmp_path, capsys):
    flags = {"reward_normalization": "off", "clip_reward": 1e-6, "output_dir": tmp_path / "out"}
    assert run_step(3, done, **trained(done), **flags) == 0
    assert capsys.readouterr().out.count("alarm at rollout 1: 100% of the scores are beyond ±1e-06 and clipped") == 1
    assert [record["alarm/scores_clipped"] for record in metrics(tmp_path / "out")] == [1.0, 1.0]


def test_P06_a_kl_that_stays_negative_is_said(done, tmp_path, capsys, monkeypatch):
    """The reference's log-probs are 1 nat a token too high, as if it were another model."""
    from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import roles

    original = roles.Reference.score
    monkeypatch.setattr(roles.Reference, "score", lambda self, sequences: original(self, sequences) + 1)
    flags = {"max_steps": 3, "num_train_epochs": 2, "actor_learning_rate": 0, "output_dir": tmp_path / "out"}
    assert run_step(3, done, **trained(done), **flags) == 0
    assert capsys.readouterr().out.count("negative for three rollouts") == 1
    assert [record.get("alarm/kl_negative", 0.0) for record in metrics(tmp_path / "out")] == [0.0, 0.0, 1.0]


def test_the_users_limit_of_the_kl_counts(done, tmp_path, capsys):
    flags = {"kl_alarm": 1e-9, "kl_estimator": "abs", "output_dir": tmp_path / "out"}
    assert run_step(3, done, **trained(done), **flags) == 0
    assert "beyond 1e-09 (--kl_alarm)" in capsys.readouterr().out
    assert metrics(tmp_path / "out")[-1]["alarm/kl_high"] == 1.0


def test_P12_beyond_the_users_limit_the_run_ends_and_saves(done, tmp_path, capsys):
    rate = {"actor_learning_rate": 1e-2, "num_train_epochs": 3, "max_steps": 6}
    assert run_step(3, done, **trained(done), **rate, output_dir=tmp_path / "whole") == 0
    kl = [record["kl"] for record in metrics(tmp_path / "whole")]
    limit = sorted(kl)[2]
    first = next(index for index, value in enumerate(kl) if value > limit)
    assert 0 < first < len(kl) - 1
    assert run_step(3, done, **trained(done), **rate, kl_stop=limit, output_dir=tmp_path / "out", save_steps=1) == 0
    assert f"beyond --kl_stop {limit:g}: the run ends after {first} of {len(kl)} rollouts" in capsys.readouterr().out
    assert [record["kl"] for record in metrics(tmp_path / "out")] == kl[:first]
    assert (tmp_path / "out" / "actor" / "model.safetensors").exists()
    more = {"output_dir": tmp_path / "out", "resume": True}  # a higher limit is no other run
    assert run_step(3, done, **trained(done), **rate, kl_stop=1e9, save_steps=1, **more) == 0
    assert [record["kl"] for record in metrics(tmp_path / "out")] == kl

"""Pictures of a run: what each step draws, that noise and outliers do not hide the trend, that they stay small."""

import importlib
import io
import math
import random

import pytest
from matplotlib.figure import Figure
from PIL import Image

from alpaca_rlhf.demo.report import CAPTIONS
from alpaca_rlhf.demo.run import STEP_NAMES, STEPS
from alpaca_rlhf.runtime import curves
from alpaca_rlhf.runtime.curves import Curve, draw_curves, is_noisy, pictures_of, running_mean
from tests.pipeline.steps import metrics, three_steps

DRAWN = [importlib.import_module(f"{STEPS}{name}.main").CURVES for name in STEP_NAMES]
SEEDS_SEVEN = ["eval_acc", "train_loss", "train_reward", "train_reward_diff", "train_actor_loss", "train_cri_loss",
               "train_average_reward"]  # fmt: skip
CURVE = Curve("A title", "nats", {"loss": "training", "eval_loss": "held out"})


@pytest.fixture
def axes(monkeypatch):
    """Draws a curve and returns the axes of its picture."""
    kept = []
    monkeypatch.setattr(curves, "save_picture", lambda figure, path: kept.append(figure))

    def draw(curve, history):
        draw_curves("nowhere", curve, history)
        return kept[-1].axes[0]

    return draw


def noisy(count=400, seed=0):
    numbers = random.Random(seed)
    return list(range(1, count + 1)), [2 - step / count + numbers.gauss(0, 0.3) for step in range(count)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    return three_steps(tmp_path_factory.mktemp("curves"))


def test_each_step_draws_the_seeds_seven_and_kl_length_entropy(outputs):
    names = [set(pictures_of(outputs / folder)) for folder in ("actor", "critic", "final")]
    assert {*SEEDS_SEVEN, "kl", "length", "entropy"} <= set().union(*names)
    assert names == [set(drawn) for drawn in DRAWN]
    assert set(CAPTIONS) == set().union(*names)


def test_evaluations_stand_on_the_plots_of_the_losses(outputs):
    for folder, curve in (("actor", DRAWN[0]["loss"]), ("critic", DRAWN[1]["train_loss"])):
        assert list(curve.lines) == ["loss", "eval_loss"]
        evaluated = [line for line in metrics(outputs / folder) if "eval_loss" in line]
        assert evaluated[0]["step"] == 0 and len(evaluated) >= 2
    assert evaluated[0]["eval_loss"] == pytest.approx(math.log(2), abs=0.1)  # before training it knows nothing


def test_every_picture_has_a_title_and_names_its_axes(axes):
    for drawn in DRAWN:
        for curve in drawn.values():
            picture = axes(curve, {name: ([0, 5], [2.0, 1.0]) for name in curve.lines})
            assert picture.get_title() == curve.title and picture.get_xlabel() == "optimizer step"
            assert picture.get_ylabel() == curve.unit and curve.unit


def test_noise_is_pale_behind_its_trend_and_evaluations_are_points(axes):
    picture = axes(CURVE, {"loss": noisy(), "eval_loss": ([0, 200, 400], [2.1, 1.5, 1.1])})
    pale, trend, points = picture.lines
    assert pale.get_alpha() < 0.5 and points.get_marker() == "o" and list(points.get_xdata()) == [0, 200, 400]
    middle = slice(50, -50)
    exact = [2 - step / 400 for step in range(400)][middle]
    assert max(abs(a - b) for a, b in zip(trend.get_ydata()[middle], exact, strict=True)) < 0.3
    assert [text.get_text() for text in picture.get_legend().get_texts()] == ["training, mean of 20 steps", "held out"]


def test_a_smooth_line_is_itself_and_one_line_needs_no_legend(axes):
    steps = list(range(300))
    (line,) = axes(CURVE, {"loss": (steps, [math.cos(step / 100) for step in steps])}).lines
    assert line.get_alpha() is None and line.axes.get_legend() is None


def test_outliers_do_not_flatten_the_rest_and_are_counted(axes):
    steps, values = noisy()
    values[7], values[300] = 1e4, math.nan
    picture = axes(CURVE, {"loss": (steps, values)})
    assert picture.get_ylim()[1] < 30 and [text.get_text() for text in picture.texts] == ["1 of 399 points lie outside"]
    assert list(axes(CURVE, {"loss": noisy()}).texts) == []
    few = axes(CURVE, {"eval_loss": ([0, 1], [1.0, 1e4])})  # an evaluation is always shown
    assert few.get_ylim()[1] > 1e4


def test_a_level_is_inside_the_picture_and_named(axes):
    picture = axes(CURVE._replace(level=(0.5, "guessing")), {"loss": ([0, 1], [0.8, 0.9])})
    low, high = picture.get_ylim()
    assert low < 0.5 < 0.9 < high
    assert "guessing" in [text.get_text() for text in picture.get_legend().get_texts()]
    assert axes(CURVE._replace(log_scale=True), {"loss": ([0, 1], [2000.0, 1.5])}).get_yscale() == "log"


def test_running_mean_does_not_lag_and_leaves_out_what_is_not_finite():
    assert running_mean([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [1.0, 2.0, 3.0, 4.0, 4.5]
    assert running_mean([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, 4.0, 5.0]
    assert math.isnan(running_mean([math.inf], 3)[0])
    assert running_mean([1.0, 3.0], 1) == [1.0, 3.0]


def test_what_is_noisy():
    assert is_noisy(noisy()[1]) and not is_noisy([float(step) for step in range(100)])
    assert not is_noisy([]) and not is_noisy([math.nan]) and not is_noisy([1.0] * 50)


def test_a_picture_is_small_and_its_texts_are_no_formulas(tmp_path):
    steps, values = noisy(1500)
    draw_curves(tmp_path / "new" / "loss.png", CURVE._replace(title="$x_1$ a"), {"loss": (steps, values)})
    size = (tmp_path / "new" / "loss.png").stat().st_size
    picture = Image.open(tmp_path / "new" / "loss.png")
    assert size < 40_000 and picture.format == "PNG" and picture.width > 600
    figure, axes = curves.new_picture("$x_1$", "steps", "$")
    assert isinstance(figure, Figure) and axes.get_title() == r"\$x_1\$"
    figure.savefig(io.BytesIO())


def test_pictures_of_a_folder_come_in_order(tmp_path):
    (tmp_path / "curves").mkdir()
    for name in "abc":
        (tmp_path / "curves" / f"{name}.png").write_bytes(name.encode())
    assert list(pictures_of(tmp_path, ("c", "absent"))) == ["c", "a", "b"]
    assert pictures_of(tmp_path)["b"] == b"b" and pictures_of(tmp_path / "nowhere") == {}

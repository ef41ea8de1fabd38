"""How close does step 3 come to the best policy there is? On a task small enough to know that policy exactly.

    python benchmarks/exact_optimum.py --output_dir DIR [--seeds 5] [--samples 20000] [--set ppo_epochs=4 …]

PPO with a KL penalty maximises J(π) = E[score] − beta · KL(π ‖ reference). Its maximum is known in closed form, and
with 1555 possible answers to a prompt J of any policy is a finite sum. Each seed has a reward table of its own. Printed
and written to DIR: the share of the gap from J(reference) to the maximum that step 3 closes against the number of
sampled answers, and whether the sampled scores, KL, rewards, advantages and returns agree with the enumerated ones.

``--set`` gives step 3 further options, ``--critic_start`` another start of the critic than the default.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("alpaca_rlhf") is None or importlib.util.find_spec("benchmarks") is None:
    # Started as a file: the checkout is not where Python looks. Start again, with it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, *sys.argv])

from benchmarks.small_task import COPIES, PROMPTS, Task, make_critic, make_task  # noqa: E402
from benchmarks.watched_ppo import (  # noqa: E402
    SETTINGS,
    Agreement,
    Watch,
    compare_advantages,
    compare_log,
    log_probs_of,
    make_problem,
    run_ppo,
)

GOAL_MEDIAN, GOAL_LEAST = 0.95, 0.9
COLUMNS = (2000, 5000, 10000)  # answers, of the printed table
# Every advantage is checked where GAE is unbiased: exact values, lambda 1, as they are before whitening.
UNBIASED: dict[str, object] = {"lam": 1, "whiten_advantages": "false"}


class Result(NamedTuple):
    """One seed."""

    seed: int
    start: float  # J of the reference
    optimum: float
    reached: float  # J of the saved actor
    curve: list[tuple[int, float]]  # (answers, share of the gap closed), the saved actor last
    seconds: float
    z: dict[str, list[float]]  # of the log's means

    @property
    def share(self) -> float:
        """Share of the gap that the saved actor closes."""
        return self.curve[-1][1]

    def share_after(self, answers: int) -> float:
        """Share of the gap that was closed when ``answers`` had been sampled, by the nearest policy looked at."""
        return min(self.curve, key=lambda point: abs(point[0] - answers))[1]


def main(argv: Sequence[str] | None = None) -> dict:
    """Run all seeds; returns what exact_optimum.json holds."""
    args = parse(argv)
    settings: dict[str, object] = {**SETTINGS, **dict(one.split("=", 1) for one in args.set)}
    task = make_task(args.output_dir / "task")
    after = [f"after {answers:,}" for answers in COLUMNS]
    print(table_row("seed", "J(reference)", "J(optimum)", "J(reached)", *after, "at the end", "seconds"), flush=True)
    results = []
    for seed in range(1, args.seeds + 1):
        one = one_seed(task, args, settings, seed)
        results.append(one)
        shares = [f"{share:.3f}" for share in (*map(one.share_after, COLUMNS), one.share)]
        values = [f"{value:.4f}" for value in (one.start, one.optimum, one.reached)]
        print(table_row(str(seed), *values, *shares, f"{one.seconds:.0f}"), flush=True)
    report = build_report(results, check_advantages(task, args, settings), settings, args.critic_start)
    (args.output_dir / "exact_optimum.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(results, args.output_dir / "exact_optimum.png")
    print(closing(report))
    return report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of everything that is written")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    parser.add_argument("--samples", type=int, default=20000, help="most sampled answers of a seed (default 20000)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="options of step 3, such as lam=1 kl_estimator=k2"
    )
    parser.add_argument(
        "--critic_start",
        choices=("default", "zero", "normal", "reward_model"),
        default="default",
        help="default: step 3's own; else a model made beforehand: the reference with a head of zeros or a normal one, "
        "or step 2's reward model of the same table",
    )
    return parser.parse_args(argv)


def one_seed(task: Task, args: argparse.Namespace, settings: dict[str, object], seed: int) -> Result:
    """PPO on the reward table of this seed."""
    watch, output = Watch(make_problem(task, seed, float(str(settings["kl_coef"])))), args.output_dir / f"seed_{seed}"
    if args.critic_start != "default":
        settings = {**settings, "critic_model_name_or_path": make_critic(task, args.critic_start, seed)}
    started = time.perf_counter()
    run_ppo(task, watch, output, seed=seed, samples=args.samples, settings=settings)
    seconds = time.perf_counter() - started
    problem = watch.problem
    reached = problem.objective(log_probs_of(output / "actor", problem.tree))
    curve = [*watch.shares(), (watch.answers, watch.share(reached))]
    start, optimum = problem.objective(problem.ref_log_probs), problem.optimum()
    enumerated = ("score", "kl", "reward") if settings.get("kl_estimator", "k1") == "k1" else ("score",)
    return Result(seed, start, optimum, reached, curve, seconds, compare_log(watch, output, enumerated))


def check_advantages(task: Task, args: argparse.Namespace, settings: dict[str, object]) -> Agreement:
    """Sampled advantages and returns against enumerated ones, in a shorter run where they are unbiased."""
    watch = Watch(make_problem(task, 1, float(str(settings["kl_coef"]))), every=1, exact_critic=True)
    samples, settings = max(args.samples // 4, COPIES * len(PROMPTS)), {**settings, **UNBIASED}
    run_ppo(task, watch, args.output_dir / "unbiased", seed=1, samples=samples, settings=settings)
    return compare_advantages(watch)


def z_summary(z: list[float]) -> dict[str, float]:
    """How many z-scores, their root mean square (1 where the errors are what the theory says) and the largest."""
    rms = math.sqrt(statistics.fmean(one * one for one in z)) if z else math.nan
    return {"count": len(z), "rms": rms, "largest": max(map(abs, z), default=math.nan)}


def build_report(
    results: Sequence[Result], advantages: Agreement, settings: dict[str, object], critic_start: str
) -> dict:
    """What exact_optimum.json holds."""
    shares = [one.share for one in results]
    z = {f"logged {name}": [z for one in results for z in one.z[name]] for name in results[0].z}
    z |= {"advantages": advantages.advantages, "returns": advantages.returns}
    return {
        "median_gap_closed": statistics.median(shares),
        "min_gap_closed": min(shares),
        "samples": max(one.curve[-1][0] for one in results),
        "answers_for_0.9": [next((n for n, share in one.curve if share >= 0.9), None) for one in results],
        "per_seed": [
            {"seed": one.seed, "gap_closed": one.share, "objective_of_reference": one.start, "optimum": one.optimum,
             "objective_reached": one.reached, "seconds": one.seconds, "curve": one.curve}
            for one in results
        ],
        "z_scores": {name: z_summary(found) for name, found in z.items()},
        "largest_error_of_a_certain_advantage": advantages.certain,
        "settings": {**{name: str(value) for name, value in settings.items()}, "critic_start": critic_start},
    }  # fmt: skip


def table_row(*cells: str) -> str:
    """Cells under one another."""
    return "  ".join(cell.rjust(12) for cell in cells)


def closing(report: dict) -> str:
    """The last lines: the goal, and how far sampled figures are from enumerated ones."""
    median, least = report["median_gap_closed"], report["min_gap_closed"]
    met = "met" if median >= GOAL_MEDIAN and least >= GOAL_LEAST else "not met"
    lines = [
        f"gap closed with {report['samples']:,} answers: median {median:.3f}, least {least:.3f} "
        f"(goal {GOAL_MEDIAN} and {GOAL_LEAST}: {met})",
        "sampled against enumerated, z-scores (root mean square 1 where all is right):",
    ]
    for name, z in report["z_scores"].items():
        lines.append(f"  {name:13} {z['count']:5} means, rms {z['rms']:.2f}, largest {z['largest']:.2f}")
    certain = report["largest_error_of_a_certain_advantage"]
    return "\n".join([*lines, f"  largest error of an advantage that is certain: {certain:.1e}"])


def plot(results: Sequence[Result], file: Path) -> None:
    """Share of the gap against answers, one line a seed."""
    figure = Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for one in results:
        axes.plot(*zip(*one.curve, strict=True), label=f"seed {one.seed}: {one.share:.3f}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(GOAL_MEDIAN, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="sampled answers", ylabel="share of the gap J(reference) → J(optimum)", ylim=(-0.1, 1.05))
    axes.legend(loc="lower right")
    figure.savefig(file)


if __name__ == "__main__":
    main()

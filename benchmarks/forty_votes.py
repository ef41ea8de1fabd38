"""Do people's votes reach the model? Forty votes for answers with a list, round the loop, with figures.

    python benchmarks/forty_votes.py --sft output/demo/sft --output_dir DIR [--seed 1]

1. The SFT model and a twin (the same after a little more of step 1) answer questions on the chat page, names hidden; a
   visitor votes, through the page's own functions, where one answer has a numbered list and the other has none.
2. Step 2 learns a reward model from votes.jsonl as it is, and from nothing else. Does it prefer lists on prompts that
   nobody voted on? Also where the list is the shorter answer?
3. Step 3 trains the SFT model against it for twenty rollouts. Does the model write more lists to prompts of neither?

Writes DIR/forty_votes.json and forty_votes.png; each program's words are in DIR/*.txt, its output beside them.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("alpaca_rlhf") is None or importlib.util.find_spec("benchmarks") is None:
    # Started as a file: the checkout is not where Python looks. Start again, with it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, *sys.argv])

from alpaca_rlhf.algorithms.evaluation_metrics import wilson_interval  # noqa: E402
from alpaca_rlhf.arguments.errors import UserError  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main as step1  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.step2_reward_model_finetuning import main as step2  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import load_raw_dataset  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer  # noqa: E402
from alpaca_rlhf.evaluation import compare_models, reward_report  # noqa: E402
from alpaca_rlhf.inference.models import load_chat_model  # noqa: E402
from alpaca_rlhf.runtime.curves import new_picture, save_picture  # noqa: E402
from alpaca_rlhf.runtime.run import command, start_run  # noqa: E402
from benchmarks.list_voter import Ballot, Candidate, ListPair, cast_votes, list_pairs, watched_lists  # noqa: E402
from benchmarks.small_task import quiet  # noqa: E402

DATA = ROOT / "data"
VOTES, ITERATIONS = 40, 20
CANDIDATES = 12  # answers to each held-out prompt that pairs are made of
LENGTHS = {"max_prompt_seq_len": 128, "max_answer_seq_len": 96}  # as in the demo
WHOLE = {"max_seq_len": 224}
TWIN: dict[str, object] = {
    "data_path": "MultiTurnAlpaca", "data_split": "1,0,0", "learning_rate": 1e-3, "max_steps": 60,
    "num_warmup_steps": 5, "per_device_train_batch_size": 8, "eval_interval": 0,
}  # fmt: skip
REWARD_MODEL: dict[str, object] = {
    "data_split": "0,1,0", "learning_rate": 5e-4, "num_train_epochs": 4, "per_device_train_batch_size": 8,
}  # fmt: skip
# The demo's, but for two: the number of rollouts, and raw scores. The deviation of the chosen scores, by which step 3
# divides them else, is that of answers which all have a list: from another answer they are ten and more of it away, so
# that all answers without a list are clipped to one score and the critic begins with values far outside the clip.
PPO: dict[str, object] = {
    "data_path": DATA / "preferences", "data_split": "0,0,1", "actor_learning_rate": 2e-4, "critic_learning_rate": 5e-4,
    "lr_scheduler_type": "constant_with_warmup", "num_warmup_steps": 5, "per_device_train_batch_size": 64,
    "per_device_mini_train_batch_size": 32, "ppo_epochs": 2, "max_steps": ITERATIONS, "kl_coef": 0.1,
    "reward_normalization": "off",
}  # fmt: skip


class Places(NamedTuple):
    """Where the parts lie."""

    folder: Path
    sft: Path
    seed: int

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def run(self, name: str, main: Callable, flags: Mapping[str, object], *more: str) -> Path:
        """Run a program as a shell would; gives its output folder.

        Raises:
            UserError: it ended with another exit code than 0; its last words are told.
        """
        output, words = self / name, self / f"{name}.txt"
        if output.exists():
            shutil.rmtree(output)  # of an earlier run
        flags = {**flags, "output_dir": output, "data_output_path": self / "cache"}
        argv = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
        with words.open("w", encoding="utf-8") as file, quiet(file):
            code = command(main)([*argv, *more])
        told = words.read_text(encoding="utf-8")
        if code or "stopped by SIGTERM" in told:  # which is no failure, but leaves no model
            last = told.strip().splitlines()[-1:]
            raise UserError(f"{name} ended with exit code {code} ({' '.join(last)}); all it said is in {words}")
        return output


def main(argv: Sequence[str] | None = None) -> None:
    """Go round, write and print the figures."""
    args = parse(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    report = go_round(Places(args.output_dir, args.sft, args.seed))
    (args.output_dir / "forty_votes.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(report, args.output_dir / "forty_votes.png")
    print(table(report))


def go_round(places: Places) -> dict[str, Any]:
    """The loop; returns what forty_votes.json holds."""
    seconds: dict[str, float] = {}
    report: dict[str, Any] = {"seed": places.seed, "sft": str(places.sft)}

    def timed(name: str, part: Callable[[Places], Any]) -> Any:
        started = time.perf_counter()
        result = part(places)
        seconds[name] = time.perf_counter() - started
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
        return result

    timed("twin", train_twin)
    report["votes"] = timed("votes", vote)._asdict()
    timed("reward model", train_reward_model)
    report["reward_model"] = timed("held-out pairs", judge_pairs)
    report["rollouts"] = timed("PPO", train_policy)
    report |= timed("comparison", compare)
    return report | {"seconds": {**seconds, "total": sum(seconds.values())}, "settings": settings()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sft", type=Path, required=True, help="the demo's SFT model (sh run.sh demo makes one)")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of everything that is written")
    parser.add_argument("--seed", type=int, default=1, help="of questions, answers and training (default 1)")
    return parser.parse_args(argv)


def train_twin(places: Places) -> Path:
    """A second model for the page: two answers of one model with one seed are the same answer."""
    return places.run("twin", step1.main, {**TWIN, **WHOLE, "model_name_or_path": places.sft, "seed": places.seed})


def vote(places: Places) -> Ballot:
    """Cast the votes into votes.jsonl."""
    file = places / "votes.jsonl"
    file.unlink(missing_ok=True)
    known = load_raw_dataset(str(DATA / "preferences"), cache_dir=str(places / "cache"), needs_rejected=False).train
    questions = list(dict.fromkeys(c.prompt[0].text for c in known if len(c.prompt) == 1))
    random.Random(places.seed).shuffle(questions)
    with (places / "votes.txt").open("w", encoding="utf-8") as words, quiet(words):
        run = start_run(seed=places.seed, dtype="auto")
        models = [load_chat_model(str(path), path.name, "auto", None, run) for path in (places.sft, places / "twin")]
    limit = LENGTHS["max_answer_seq_len"]
    return cast_votes(models, questions, VOTES, file, seed=places.seed, max_new_tokens=limit)


def train_reward_model(places: Places) -> Path:
    """Step 2 on the votes as they are, from the SFT model."""
    flags = {"data_path": places / "votes.jsonl", "model_name_or_path": places.sft, "seed": places.seed}
    return places.run("reward_model", step2.main, {**REWARD_MODEL, **WHOLE, **flags})


def judge_pairs(places: Places) -> dict[str, dict]:
    """Accuracy on new prompts, answered by the SFT model: on any pair, and on pairs whose list is shorter."""
    prompts = [json.loads(line)["prompt"] for line in (DATA / "preferences/test.jsonl").open(encoding="utf-8")]
    asked = [prompt for prompt in dict.fromkeys(prompts) for _ in range(CANDIDATES)]
    write_jsonl(places / "asked.jsonl", [{"prompt": prompt} for prompt in asked])
    output = places.run("candidates", compare_models.main, {
        "prompts": places / "asked.jsonl", **LENGTHS, "seed": places.seed, "models": places.sft, "names": "sft",
    })  # fmt: skip
    answers: dict[str, list[Candidate]] = {}
    for prompt, answer in zip(asked, read_comparison(output)["sft"]["answers"], strict=True):
        answers.setdefault(prompt, []).append(Candidate(answer["text"], len(answer["ids"])))
    return {name: accuracy(places, name, list_pairs(answers, places.seed, shorter=name == "shorter_list"))
            for name in ("any_pair", "shorter_list")}  # fmt: skip


def accuracy(places: Places, name: str, pairs: Sequence[ListPair]) -> dict[str, Any]:
    """What the reward report says of the reward model on these pairs."""
    write_jsonl(places / f"{name}.jsonl", [pair.row() for pair in pairs])
    flags = {"model": places / "reward_model", "data_path": places / f"{name}.jsonl", "part": "all", **WHOLE}
    output = places.run(f"report_{name}", reward_report.main, flags)
    found = json.loads((output / "reward_report.json").read_text(encoding="utf-8"))
    kept = ("count", "accuracy", "accuracy_interval", "ties", "longer_is_chosen", "mean_gap", "length_correlation")
    return {key: found[key] for key in kept}


def train_policy(places: Places) -> dict[str, list[float]]:
    """Step 3 from the SFT model and the reward model; figures of each rollout."""
    tokenizer = load_tokenizer(str(places.sft), notice=lambda _: None)
    start = {"actor_model_name_or_path": places.sft, "critic_model_name_or_path": places / "reward_model"}
    with watched_lists(TextEncoder(tokenizer)) as lists:
        output = places.run("rlhf", step3.main, {**PPO, **LENGTHS, **start, "seed": places.seed})
    log = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"list_share": lists, **{key: [row[key] for row in log] for key in ("score", "kl", "length")}}


def compare(places: Places) -> dict[str, dict]:
    """Both models on held-out prompts, with the same random numbers."""
    flags = {"prompts": DATA / "prompts.jsonl", **LENGTHS, "seed": places.seed}
    models = ("--models", str(places.sft), str(places / "rlhf" / "actor"), "--names", "before", "after")
    found = read_comparison(places.run("comparison", compare_models.main, flags, *models))
    kept = ("count", "list_share", "kl", "mean_tokens", "ended_share", "repetition_4")
    return {name: {**{key: figures[key] for key in kept}, "list_interval": list_interval(figures)}
            for name, figures in found.items()}  # fmt: skip


def list_interval(figures: Mapping[str, Any]) -> list[float]:
    """Wilson's, of the share of answers with a list."""
    return list(wilson_interval(figures["list_share"] * figures["count"], figures["count"]))


def read_comparison(folder: Path) -> dict[str, dict]:
    """name → figures and answers."""
    return json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["models"]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settings() -> dict[str, dict[str, str]]:
    """What was given to each step beside its models, lengths and seed."""
    parts = {"twin": TWIN, "reward_model": REWARD_MODEL, "ppo": {**PPO, "data_path": "data/preferences"}}
    return {name: {flag: str(value) for flag, value in part.items()} for name, part in parts.items()}


def table(report: Mapping[str, Any]) -> str:
    """The figures in words."""
    votes, before, after = (report[name] for name in ("votes", "before", "after"))
    lines = [
        f"seed {report['seed']}: {VOTES} votes out of {votes['asked']} questions; the list was the longer answer in "
        f"{votes['longer']} of them"
    ]
    for name, what in (("any_pair", "held-out pairs"), ("shorter_list", "those whose list is the shorter answer")):
        pairs = report["reward_model"][name]
        low, high = pairs["accuracy_interval"]
        lines.append(f"  {what}: the list scores higher in {pairs['accuracy']:.3f} of {pairs['count']} "
                     f"({low:.3f} to {high:.3f})")  # fmt: skip
    rows = (("before", before), (f"after {ITERATIONS} rollouts", after))
    for name, one in rows:
        low, high = one["list_interval"]
        lines.append(f"  {name}: lists in {one['list_share']:.3f} of {one['count']} answers ({low:.3f} to {high:.3f}), "
                     f"{one['mean_tokens']:.1f} tokens, KL {one['kl']:.2f} nats")  # fmt: skip
    return "\n".join([*lines, f"  {report['seconds']['total']:.0f} s"])


def plot(report: Mapping[str, Any], file: Path) -> None:
    """List share and mean score of each rollout."""
    rollouts = report["rollouts"]
    figure, axes = new_picture("PPO on forty votes for lists", "rollout", "share of answers with a list")
    numbers = range(1, len(rollouts["list_share"]) + 1)
    lines = axes.plot(numbers, rollouts["list_share"], color="C0", marker="o", markersize=3.5, label="lists")
    axes.set_ylim(0, 1.03)
    axes.xaxis.get_major_locator().set_params(integer=True)
    right = axes.twinx()
    right.set_ylabel("mean score by the reward model")
    lines += right.plot(numbers, rollouts["score"], color="C1", marker="o", markersize=3.5, label="score")
    axes.legend(handles=lines, fontsize="small", loc="lower right")
    save_picture(figure, file)


if __name__ == "__main__":
    raise SystemExit(command(main)())

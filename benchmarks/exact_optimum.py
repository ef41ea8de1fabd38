"""How much of what can be gained does PPO gain? On a task small enough to know the optimum exactly.

    python benchmarks/exact_optimum.py --output_dir DIR [--seeds 5] [--samples 20000] [--set ppo_epochs=2 lam=0.95]

A tiny LLaMA over 6 tokens and EOS answers four prompts in at most 4 tokens: 1,555 answers each, all enumerated. Step 1
trains the reference on sampled answers; a random table (one number per prompt and answer, another for each seed) is
the reward, given to step 3's own program through --reward_fn. What step 3 then maximises, J = E[score] − β KL, is known
for every policy, and its optimum is β log Z. Reported: the share of the gap J(reference) → J(optimum) that is closed
after so many sampled answers, and how far the figures of the log are from the enumerated ones, in standard errors.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("alpaca_rlhf") is None or importlib.util.find_spec("benchmarks") is None:
    # Started as a file: the checkout is not where Python looks. Start again, with it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from alpaca_rlhf.arguments.errors import UserError  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.step1_supervised_finetuning import main as step1  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning import main as step3  # noqa: E402
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.ppo_trainer import DeepSpeedPPOTrainer  # noqa: E402
from alpaca_rlhf.runtime.run import command  # noqa: E402
from benchmarks.enumeration import AnswerTree, Problem  # noqa: E402

PROMPTS = ["a", "b c", "d", "e a d"]
LETTERS = "abcde"
LIMIT = 4  # most tokens of an answer
COPIES = 64  # of each prompt in the data; a rollout of 256 holds each prompt equally often
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' else ' ' }}{% endfor %}"
)
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 256, "per_device_mini_train_batch_size": 256, "ppo_epochs": 4, "kl_coef": 0.25,
    "actor_learning_rate": 1e-3, "critic_learning_rate": 1e-2, "lr_scheduler_type": "linear", "num_warmup_steps": 0,
    "lam": 1, "clip_ratio": 0.4, "clip_value": 100, "reward_normalization": "off",
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Seven ids: <unk> (which is sampled like any other), </s> and five letters."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "</s>", *LETTERS])}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", unk_token="<unk>", pad_token="<unk>", chat_template=TEMPLATE
    )


def make_reference(folder: Path) -> Path:
    """A model that step 1 has trained on answers of which a few are much likelier than others."""
    words = tokenizer()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        initializer_range=0.1,
    )).save_pretrained(folder / "base")  # fmt: skip
    words.save_pretrained(folder / "base")
    chance, rows = random.Random(5), []
    for prompt in PROMPTS:
        lengths = chance.choices([1, 2, 3, 4, 5], [2, 3, 4, 3, 2], k=6)
        answers = [" ".join(chance.choices(LETTERS, k=length)) for length in lengths]
        drawn = chance.choices(answers, [1 / (rank + 1) for rank in range(6)], k=500)
        rows += [{"prompt": prompt, "response": answer} for answer in drawn]
    write(folder / "sft.jsonl", rows)
    run_program(step1.main, {
        "data_path": folder / "sft.jsonl", "data_split": "1,0,0", "data_output_path": folder / "cache",
        "model_name_or_path": folder / "base", "output_dir": folder / "reference", "learning_rate": 1e-2,
        "per_device_train_batch_size": 64, "num_train_epochs": 16, "max_seq_len": 12,
    })  # fmt: skip
    return folder / "reference"


def write(path: Path, rows: list[dict]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_table(folder: Path, seed: int) -> str:
    """A random reward table as a user's file; returns what --reward_fn takes."""
    (folder / "table.py").write_text(
        '"""A number between -1 and 1 for each prompt and answer."""\n\nimport random\n\n\n'
        "def score(prompts, answers):\n"
        f'    keys = [f"{seed}/{{prompt}}/{{answer}}" for prompt, answer in zip(prompts, answers)]\n'
        "    return [random.Random(key).uniform(-1, 1) for key in keys]\n",
        encoding="utf-8",
    )
    return f"{folder / 'table.py'}:score"


def run_program(main: Any, flags: dict[str, Any]) -> None:
    """A step's own program with these flags, its output kept back; raises UserError when it does not end well."""
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = command(main)(words)
    if code:
        raise UserError(f"the step ended with {code}: " + "\n".join(printed.getvalue().splitlines()[-5:]))


class Watch:
    """What is measured along one run of step 3; nothing of the training is changed."""

    def __init__(self, every: int) -> None:
        """``every``: rollouts between two measurements of J; the log is compared at the same rollouts."""
        self.every, self.samples = every, 0
        self.curve: list[tuple[int, float]] = []  # sampled answers, share of the gap closed
        self.scores: dict[str, list[float]] = {"score": [], "kl": [], "return": [], "advantage": []}
        self.problem: Problem | None = None

    def start(self, trainer: DeepSpeedPPOTrainer) -> None:
        """Enumerate the reference's answers and their scores, before anything is trained."""
        roles, words = trainer.roles, trainer.roles.tokenizer
        prompts = [words(f"{prompt} ")["input_ids"] for prompt in PROMPTS]
        self.tree = AnswerTree(prompts, len(words), roles.eos_ids[0], roles.pad_id, LIMIT)
        reference = self.tree.log_probs(roles.reference.score)
        scores = roles.reward.score(self.tree.sequences(), None).double().view(len(PROMPTS), -1)
        self.problem = Problem(self.tree, reference, scores, trainer.settings.kl_coef)
        self.low, self.high = self.problem.objective(reference), self.problem.optimum()

    def measure(self, trainer: DeepSpeedPPOTrainer) -> Any:
        """The share closed by the present policy; returns its log-probs (Q, N, R)."""
        assert self.problem is not None
        log_probs = self.tree.log_probs(lambda sequences: trainer.roles.actor.score(sequences)[0])
        share = (self.problem.objective(log_probs) - self.low) / (self.high - self.low)
        self.curve.append((self.samples, share))
        return log_probs

    def compare(self, rollout: Any, log_probs: torch.Tensor) -> None:
        """Standard scores of sampled means against the enumerated ones, every prompt being drawn equally often.

        The errors are the enumerated ones too: near the optimum almost all returns to a prompt are alike and a rare one
        is far away, so that a sample does not show how much its mean may vary.
        """
        assert self.problem is not None
        exact, experience = self.problem.expected(log_probs), rollout.experience
        values = exact.action_values[:, self.tree.after[:, 0]]  # (Q, N): Q of each answer's first token
        spread = (log_probs.sum(-1).exp() * (values - exact.reward[:, None]).square()).sum(-1)
        rows = [self._place(experience, row) for row in range(len(experience))]
        returns = experience.returns[:, 0].double()  # of the first action, which with lambda 1 is the whole answer's
        advantages = returns - torch.stack([exact.action_values[prompt, node] for prompt, node in rows])
        for name, apart, variance in (
            ("score", rollout.figures["score"] - exact.score.mean(), exact.score_variance),
            ("kl", rollout.figures["kl"] - exact.kl.mean(), exact.kl_variance),
            ("return", returns.mean() - exact.reward.mean(), exact.reward_variance),
            ("advantage", advantages.mean(), exact.reward_variance - spread),  # given the first token
        ):
            error = (variance.clamp(min=0) / (len(rows) / len(PROMPTS))).sum().sqrt() / len(PROMPTS)
            self.scores[name].append(float(apart / error))

    def _place(self, experience: Any, row: int) -> tuple[int, int]:
        start = experience.prompt_length
        prompt = experience.sequences[row, :start][experience.attention_mask[row, :start].bool()].tolist()
        first = int(experience.responses[row, 0])
        return self.tree.prompts.index(tuple(prompt)), self.tree.node[(first,)]


def watched(watch: Watch) -> type[DeepSpeedPPOTrainer]:
    """Step 3's trainer, with ``watch`` looking on."""

    class Watched(DeepSpeedPPOTrainer):
        """The shipped trainer; the measurements stand beside it."""

        def generate_experience(self, batches: Any) -> Any:
            """As shipped; lambda 1 makes the returns unbiased whatever the critic says."""
            if watch.problem is None:
                watch.start(self)
            exact = watch.measure(self) if self.rollouts % watch.every == 0 else None
            rollout = super().generate_experience(batches)
            watch.samples += len(rollout.experience)
            if exact is not None and self.rollouts and self.settings.lam == 1:  # at the first one every KL is 0
                watch.compare(rollout, exact)
            return rollout

        def watch(self, figures: Any) -> Any:
            """As shipped; called after the training on a rollout."""
            watch.last = self
            return super().watch(figures)

    return Watched


def one_run(folder: Path, seed: int, samples: int, settings: dict[str, Any]) -> dict:
    """PPO with one table; returns the share closed along the way and the comparison with the log."""
    rollouts = samples // int(settings["per_device_train_batch_size"])
    watch, began = Watch(max(1, rollouts // 20)), time.perf_counter()
    flags = {
        "data_path": folder / "prompts", "data_split": "0,0,1", "data_output_path": folder / "cache",
        "seed": seed,
        "actor_model_name_or_path": folder / "reference", "reward_fn": write_table(folder, seed), "max_steps": rollouts,
        "num_train_epochs": samples // (COPIES * len(PROMPTS)) + 1, "max_prompt_seq_len": 8,
        "max_answer_seq_len": LIMIT, **settings,
    }  # fmt: skip
    shipped, step3.DeepSpeedPPOTrainer = step3.DeepSpeedPPOTrainer, watched(watch)
    try:
        run_program(step3.main, flags)
    finally:
        step3.DeepSpeedPPOTrainer = shipped
    watch.measure(watch.last)
    rms = {name: (sum(z * z for z in found) / len(found)) ** 0.5 for name, found in watch.scores.items() if found}
    return {
        "seed": seed, "gap_closed": watch.curve[-1][1], "samples": watch.samples, "curve": watch.curve,
        "objective_of_reference": watch.low, "optimum": watch.high, "standard_scores_rms": rms,
        "standard_scores": watch.scores, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def draw(path: Path, runs: list[dict]) -> None:
    """The share closed against the number of sampled answers, one line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for run in runs:
        axes.plot(*zip(*run["curve"], strict=True), marker="o", markersize=3, label=f"seed {run['seed']}")
    axes.axhline(1, color="black", linewidth=1, label="exact optimum")
    axes.axhline(0.95, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("sampled answers")
    axes.set_ylabel("share of the gap J(reference) → J(optimum)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> None:
    """Train the reference, run PPO for each seed, print the table, write exact_optimum.json and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5, help="runs, each with a reward table of its own")
    parser.add_argument("--samples", type=int, default=20000, help="sampled answers of each run, at most")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG=VALUE", help="other flags of step 3")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.samples < COPIES * len(PROMPTS):
        raise UserError(f"--seeds must be at least 1 and --samples at least {COPIES * len(PROMPTS)}")
    settings = SETTINGS | dict(pair.split("=", 1) for pair in args.set)
    folder = args.output_dir.resolve()
    torch.set_num_threads(1)  # the matrices are too small to share
    make_reference(folder)
    for part, copies in (("train", COPIES), ("test", 1)):
        write(folder / "prompts" / f"{part}.jsonl", [{"prompt": prompt} for prompt in PROMPTS for _ in range(copies)])
    runs = []
    print("seed  gap closed  samples  J(reference)  J(optimum)  z of score, kl, return, advantage (rms)  seconds")
    for seed in range(1, args.seeds + 1):
        run = one_run(folder, seed, args.samples, settings)
        runs.append(run)
        rms = "  ".join(f"{value:.2f}" for value in run["standard_scores_rms"].values())
        print(f"{seed:4}  {run['gap_closed']:10.4f}  {run['samples']:7}  {run['objective_of_reference']:12.4f}  "
              f"{run['optimum']:10.4f}  {rms:39}  {run['seconds']:7.0f}", flush=True)  # fmt: skip
    closed = [run["gap_closed"] for run in runs]
    report = {
        "median_gap_closed": statistics.median(closed), "min_gap_closed": min(closed),
        "samples": max(run["samples"] for run in runs), "per_seed": runs, "settings": settings,
    }  # fmt: skip
    (folder / "exact_optimum.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(folder / "exact_optimum.png", runs)
    print(f"gap closed: median {report['median_gap_closed']:.4f}, least {report['min_gap_closed']:.4f}; {folder}")


if __name__ == "__main__":
    raise SystemExit(command(main)())

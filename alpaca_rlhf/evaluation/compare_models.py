"""Answer the same prompts with several models, side by side, with figures.

    python -m alpaca_rlhf.evaluation.compare_models --models output/sft output/rlhf/actor --names SFT RLHF \\
        --judge output/another_reward_model --output_dir output/comparison

Prompts: a file (--prompts), the hold-out of a data set (--data_path), or without either the seed's own four questions.
Writes comparison.json (figures and every answer), comparison.md, comparison.html (one file, opens anywhere) and
pictures/*.png. All models get the same prompts, random numbers and settings; wins and KL are against the first model.
Answers and scores lie in records/ while the program runs and after it: when it is started again, only what is missing
is generated.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.parts import default_cache_dir
from alpaca_rlhf.deepspeed_chat.training.step3_rlhf_finetuning.reward_function import load_reward_function
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, load_raw_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import actor_directory
from alpaca_rlhf.evaluation.answering import Answering, Settings
from alpaca_rlhf.evaluation.comparison_pages import write_comparison
from alpaca_rlhf.evaluation.figures import add_distinct, figures, markdown_table, table_rows
from alpaca_rlhf.evaluation.held_out import held_out
from alpaca_rlhf.evaluation.judging import Judge, rule_scores, verdict, warn_of_own_judge
from alpaca_rlhf.runtime.outputs import prepare_output_dir, write_output
from alpaca_rlhf.runtime.run import Run, command, start_run

SEED_QUESTIONS = Path(__file__).with_name("seed_questions.jsonl")

Scorer = Callable[[str, Sequence[str]], Sequence[float]]  # a model's name, its answers → their scores


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(prog="compare_models", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--models", nargs="+", required=True, metavar="DIR", help="folders or hub names, also step 3's whole output; "
        "the first is the yardstick")  # fmt: skip
    add("--names", nargs="+", metavar="NAME", help="one name a model (default: the folders' paths)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", metavar="FILE", help="prompts, in any layout the steps read (default: the seed's "
                        "four questions)")  # fmt: skip
    source.add_argument("--data_path", metavar="SET", help="a data set: its test part, or the hold-out")
    add("--data_seed", type=int, default=1234, help="the steps' --data_seed, which decides the hold-out (default 1234)")
    add("--max_prompts", type=int, help="use the first so many prompts (default: all)")
    add("--judge", nargs="+", default=[], metavar="DIR", help="reward models that score the answers; best one that "
        "none of the models was trained against")  # fmt: skip
    add("--rule", nargs="+", default=[], metavar="FILE.py:NAME", help="functions that score: (prompts, answers), lists "
        "of texts as --reward_fn of step 3 gets them, return one number for each answer")  # fmt: skip
    add("--output_dir", required=True, metavar="DIR", help="where the comparison is written")
    add("--max_prompt_seq_len", type=int, default=256, help="longer prompts are refused (default 256)")
    add("--max_answer_seq_len", type=int, default=256, help="most new tokens (default 256)")
    add("--temperature", type=float, default=1.0, help="sampling temperature, 0 = greedy (default 1)")
    add("--top_p", type=float, default=1.0, help="nucleus sampling; below 1 there is no KL (default 1)")
    add("--batch_size", type=int, default=32, help="prompts at once; changes no answer (default 32)")
    add("--template", default="auto", help="chat template (default auto: the tokenizer's own)")
    add("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default auto)")
    add("--shown", type=int, default=20, help="prompts in the Markdown and HTML pages (default 20)")
    add("--data_output_path", default=default_cache_dir(), help="cache folder")
    add("--seed", type=int, default=1234, help="seed of the random numbers (default 1234)")
    args = parser.parse_args(argv)
    check_names(args)
    for name in ("max_prompt_seq_len", "max_answer_seq_len", "batch_size", "max_prompts", "shown"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if args.temperature < 0:
        raise UserError(f"--temperature is {args.temperature}; it must be 0 (greedy) or more")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top_p is {args.top_p}; it must be above 0 and at most 1 (everything)")
    return args


def check_names(args: argparse.Namespace) -> None:
    """Fill in ``args.names`` and refuse names that do not tell the models apart."""
    if args.names is not None and len(args.names) != len(args.models):
        raise UserError(f"--names has {len(args.names)} words for {len(args.models)} --models; give one each")
    args.names = args.names or args.models
    if len(set(args.names)) < len(args.names):
        raise UserError(f"two of the models have one name ({', '.join(args.names)}); give each its own with --names")


def main(argv: Sequence[str] | None = None) -> None:
    """Answer, score, count, write."""
    args = parse(argv)
    run = start_run(seed=args.seed, dtype=args.dtype)
    output = Path(args.output_dir)
    prepare_output_dir(output)
    needed = {"needed_positions": args.max_prompt_seq_len + args.max_answer_seq_len, "lora_module_names": None,
              "parts": f"{args.max_prompt_seq_len} prompt + {args.max_answer_seq_len} answer tokens"}  # fmt: skip
    args.models = [actor_directory(path) for path in args.models]
    for path in args.models:
        check_model(path, "causal_lm", **needed)
    for path in args.judge:
        check_model(path, "reward_model", **needed)
        warn_of_own_judge(path, dict(zip(args.names, args.models, strict=True)), run.print)
    rules = {place: load_reward_function(place, "--rule") for place in args.rule}
    conversations = read_prompts(args, run)
    results, prompts = all_answers(args, run, conversations, output / "records")
    add_distinct(results)
    short = short_names([*args.judge, *args.rule])
    for path in args.judge:
        judge = Judge(path, args.template, args.batch_size, run)

        def by_model(name: str, texts: Sequence[str], judge: Judge = judge) -> Sequence[float]:
            return judge.scores(name, conversations, texts, output / "records")

        add_judgement(results, short[path], by_model)
    for place, rule in rules.items():

        def by_rule(name: str, texts: Sequence[str], place: str = place, rule: Any = rule) -> Sequence[float]:
            return rule_scores(rule, f"--rule {place}", prompts, texts)

        add_judgement(results, short[place], by_rule)
    comparison = {
        "seed": args.seed,
        "settings": used_settings(args, run),
        "prompts": [conversation.prompt[-1].text for conversation in conversations],
        "conversations": [[{"role": t.role, "text": t.text} for t in c.prompt] for c in conversations],
        "models": results,
    }
    write_output(output, lambda folder: write_comparison(folder, comparison, args.shown))
    run.print(markdown_table(table_rows(results)))
    run.print(f"side by side: {output / 'comparison.html'}")


def read_prompts(args: argparse.Namespace, run: Run) -> list[Conversation]:
    """The prompts that the options name, and a line on where they come from."""
    name = args.data_path or args.prompts or str(SEED_QUESTIONS)
    raw = load_raw_dataset(name, cache_dir=args.data_output_path, needs_rejected=False)
    if args.data_path is None:
        chosen, what = raw.train, args.prompts or "the seed's questions"
    else:
        chosen, what = held_out(raw, args.data_seed, "give the file as --prompts")
    used = chosen[: args.max_prompts]
    run.print(f"{len(used)} of {len(chosen)} prompts: {what}")
    return used


def all_answers(
    args: argparse.Namespace, run: Run, conversations: Sequence[Conversation], records: Path
) -> tuple[dict[str, dict], list[str]]:
    """name → path, figures and answers of every model, one or two of them in memory at a time; and the prompts as the
    first model's template renders them, special tokens left out."""
    settings = Settings(args.max_prompt_seq_len, args.max_answer_seq_len, args.temperature, args.top_p, args.seed,
                        args.batch_size, args.template)  # fmt: skip
    models = [Answering(name, path, settings, conversations, run)
              for name, path in zip(args.names, args.models, strict=True)]  # fmt: skip
    first, results = models[0], {}
    for model in models:
        stored = model.answers(records)
        kl = model.kl_to(first, stored, records)
        answers = [{**record, "kl": value, "scores": {}}
                   for record, value in zip(stored.ordered(len(conversations)), kl, strict=True)]  # fmt: skip
        results[model.name] = {"path": model.path, "digest": model.digest, **figures(answers), "judged": {},
                               "answers": answers}  # fmt: skip
        if model is not first:
            model.release()
    first.release()
    return results, [first.encoder.decode(ids) for ids in first.prompts]


def add_judgement(results: dict[str, dict], judge: str, score: Scorer) -> None:
    """Scores into the answers of all models, and ``judged[judge]``: mean score, for all but the first also wins."""
    texts = {name: [answer["text"] for answer in result["answers"]] for name, result in results.items()}
    scores = {name: list(score(name, answers)) for name, answers in texts.items()}
    first = next(iter(results))
    for name, result in results.items():
        for answer, value in zip(result["answers"], scores[name], strict=True):
            answer["scores"][judge] = value
        result["judged"][judge] = {"mean_score": sum(scores[name]) / len(scores[name])}
        if name != first:
            result["judged"][judge] |= verdict(scores[name], scores[first], texts[name], texts[first])


def short_names(places: Sequence[str]) -> dict[str, str]:
    """place → its last word, or the whole place where two would be called the same."""
    short = {place: Path(place).name.rpartition(":")[2] for place in places}
    twice = len(set(short.values())) < len(short)
    return {place: place if twice else name for place, name in short.items()}


def used_settings(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """What decides the answers besides models and prompts."""
    names = ("seed", "temperature", "top_p", "max_prompt_seq_len", "max_answer_seq_len", "template")
    return {name: getattr(args, name) for name in names} | {"dtype": str(run.dtype).removeprefix("torch.")}


if __name__ == "__main__":
    raise SystemExit(command(main)())

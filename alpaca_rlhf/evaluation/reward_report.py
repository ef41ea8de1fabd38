"""How good a reward model is on pairs: accuracy, calibration, what it fails on.

    python -m alpaca_rlhf.evaluation.reward_report --model output/reward_model --data_path data/preferences \\
        --output_dir output/reward_report

Any reward model (a sequence classifier with one label) and any pairs that step 2 reads; by default those that no step
trains on. Writes reward_report.json, .md, .html (one file, opens anywhere) and pictures/*.png. Scores lie in records/:
when the program is started again, only what is missing is scored.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.parts import default_cache_dir
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import collate_pairs
from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import create_dataset_split
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, load_raw_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_tokenizer
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model
from alpaca_rlhf.deepspeed_chat.training.utils.model.reward_model import RewardModel
from alpaca_rlhf.deepspeed_chat.training.utils.model.sources import model_digest
from alpaca_rlhf.evaluation.figures import markdown_table
from alpaca_rlhf.evaluation.held_out import held_out
from alpaca_rlhf.evaluation.pair_figures import ScoredPair, pair_figures
from alpaca_rlhf.evaluation.reward_pages import summary_rows, write_reward_report
from alpaca_rlhf.evaluation.stored import StoredRecords
from alpaca_rlhf.runtime.outputs import prepare_output_dir, write_output
from alpaca_rlhf.runtime.run import Run, command, start_run


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(prog="reward_report", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="the reward model")
    add("--data_path", required=True, metavar="PAIRS", help="pairs, in any layout that step 2 reads")
    add("--part", choices=("held_out", "all"), default="held_out", help="held_out: the test part, or what the steps "
        "hold out; all: every pair (default held_out)")  # fmt: skip
    add("--data_seed", type=int, default=1234, help="the steps' --data_seed, which decides the hold-out (default 1234)")
    add("--max_pairs", type=int, help="use the first so many pairs (default: all)")
    add("--output_dir", required=True, metavar="DIR", help="where the report is written")
    add("--max_seq_len", type=int, default=512, help="pairs with a longer side lose early turns, or are dropped "
        "(default 512)")  # fmt: skip
    add("--batch_size", type=int, default=16, help="pairs at once; changes no figure (default 16)")
    add("--bins", type=int, default=10, help="bins of the reliability curve (default 10)")
    add("--mistakes", type=int, default=10, help="how many of the worst mistakes are shown (default 10)")
    add("--template", default="auto", help="chat template (default auto: the tokenizer's own)")
    add("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (default auto)")
    add("--data_output_path", default=default_cache_dir(), help="cache folder")
    args = parser.parse_args(argv)
    for name in ("max_seq_len", "batch_size", "bins", "max_pairs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if args.mistakes < 0:
        raise UserError(f"--mistakes is {args.mistakes}; it must be 0 or more")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Read the pairs, score both sides, count, write."""
    args = parse(argv)
    run = start_run(seed=0, dtype=args.dtype)  # nothing is drawn
    output = Path(args.output_dir)
    prepare_output_dir(output)
    check_model(args.model, "reward_model", needed_positions=args.max_seq_len, parts="the tokens of --max_seq_len",
                lora_module_names=None)  # fmt: skip
    raw = load_raw_dataset(args.data_path, cache_dir=args.data_output_path, needs_rejected=True)
    if args.part == "held_out":
        chosen, population = held_out(raw, args.data_seed, "take all pairs with --part all")
    else:
        chosen, population = [*raw.train, *(raw.test or [])], f"all pairs of {raw.name}"
    pairs, dropped = scored_pairs(args, run, chosen[: args.max_pairs], output / "records")
    report = {
        "model": args.model,
        "population": population,
        "dropped": dropped,
        **pair_figures(pairs, args.bins, args.mistakes),
    }
    write_output(output, lambda folder: write_reward_report(folder, report, pairs))
    for reason, count in dropped.items():
        run.print(f"dropped {count}: {reason}")
    run.print(markdown_table(summary_rows(report)))
    run.print(f"report: {output / 'reward_report.html'}")


def scored_pairs(
    args: argparse.Namespace, run: Run, conversations: Sequence[Conversation], records: Path
) -> tuple[list[ScoredPair], dict[str, int]]:
    """The pairs that can be encoded, with their scores; and how many cannot, per reason.

    Raises:
        UserError: none can, or a score is not finite.
    """
    tokenizer = load_tokenizer(args.model, notice=run.print)
    encoder = TextEncoder(tokenizer, args.template)
    encoded = create_dataset_split(conversations, step=2, encoder=encoder, max_len=args.max_seq_len)
    dropped: dict[str, int] = {}
    for reason in (result.dropped for result in encoded if result.dropped):
        dropped[reason] = dropped.get(reason, 0) + 1
    kept = [(c, result.item) for c, result in zip(conversations, encoded, strict=True) if result.item is not None]
    if not kept:
        raise UserError(f"none of the {len(encoded)} pairs of {args.data_path} can be used ({dropped})")
    scores = pair_scores(args, run, encoder, [item for _, item in kept], records)
    pairs = []
    for (conversation, item), (chosen, rejected) in zip(kept, scores, strict=True):
        lengths = (len(item[f"{side}_ids"]) - item["prompt_length"] for side in ("chosen", "rejected"))
        prompt = "\n\n".join(f"{turn.role}: {turn.text.strip()}" for turn in conversation.prompt)
        assert conversation.rejected is not None, conversation.record  # a pair was encoded
        pairs.append(ScoredPair(conversation.record, prompt, conversation.chosen, conversation.rejected, chosen,
                                rejected, *lengths))  # fmt: skip
    return pairs, dropped


@torch.no_grad()
def pair_scores(
    args: argparse.Namespace, run: Run, encoder: TextEncoder, items: Sequence[dict], records: Path
) -> list[tuple[float, float]]:
    """(score of the chosen, score of the rejected) of each item, kept in ``records``."""
    ids = [[item[f"{side}_ids"].tolist() for side in ("chosen", "rejected")] for item in items]
    stored = StoredRecords(records, "pair_scores", {"model": model_digest(args.model), "ids": ids,
                                                    "dtype": str(run.dtype)})  # fmt: skip
    missing = stored.missing(len(items))
    if missing:
        model = RewardModel.from_pretrained(args.model, encoder.tokenizer, notice=run.print, dtype=run.dtype)
        model.eval().to(run.device)
    bar = run.progress(len(items), "scores", start=len(items) - len(missing))
    for start in range(0, len(missing), args.batch_size):
        rows = missing[start : start + args.batch_size]
        batch = collate_pairs([items[row] for row in rows], len(rows), encoder.pad_id)
        scores = model(batch["input_ids"].to(run.device), batch["attention_mask"].to(run.device)).scores.tolist()
        if not all(map(math.isfinite, scores)):
            raise UserError(f"the reward model {args.model} gives scores that are not finite; it has no accuracy")
        both = zip(rows, scores[: len(rows)], scores[len(rows) :], strict=True)
        stored.add({row: {"chosen": chosen, "rejected": rejected} for row, chosen, rejected in both})
        bar.update(len(rows))
    bar.close()
    return [(record["chosen"], record["rejected"]) for record in stored.ordered(len(items))]


if __name__ == "__main__":
    raise SystemExit(command(main)())

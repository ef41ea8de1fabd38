"""Answer the same prompts with several models, side by side, with figures.

    python -m alpaca_rlhf.evaluation.compare_models --models output/actor output/final/actor \\
        --prompts data/prompts.jsonl --output_dir output/comparison

Writes ``comparison.json`` (figures and every answer) and ``comparison.md`` (figures and the first answers). All models
get the same prompts, random numbers and settings; KL is to the first model.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from alpaca_rlhf.algorithms.masking import first_eos_mask
from alpaca_rlhf.algorithms.metrics import distinct_n, ended_rows
from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, load_raw_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.deepspeed_chat.training.utils.model.causal_lm import CausalLM
from alpaca_rlhf.deepspeed_chat.training.utils.model.model_utils import load_causal_lm, load_tokenizer, vocabulary_size
from alpaca_rlhf.deepspeed_chat.training.utils.model.preflight import check_model
from alpaca_rlhf.rollout.base import SamplingSettings, row_uniforms
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout
from alpaca_rlhf.runtime.outputs import prepare_output_dir, write_output
from alpaca_rlhf.runtime.run import Run, command, start_run

SHOWN = 10  # answers in the Markdown page


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; see --help."""
    parser = argparse.ArgumentParser(prog="compare_models", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--models", nargs="+", required=True, metavar="DIR", help="folders; the first is the yardstick")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="one name a model (default: the folders' paths)")
    parser.add_argument("--prompts", required=True, metavar="FILE", help="prompts, in any layout the steps read")
    parser.add_argument("--max_prompts", type=int, help="use the first so many prompts (default: all)")
    parser.add_argument("--output_dir", required=True, metavar="DIR", help="where comparison.json and .md are written")
    parser.add_argument("--max_prompt_seq_len", type=int, default=256, help="longer prompts are refused (default 256)")
    parser.add_argument("--max_answer_seq_len", type=int, default=256, help="most new tokens (default 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature, 0 = greedy (default 1)")
    parser.add_argument("--batch_size", type=int, default=32, help="prompts at once (default 32)")
    parser.add_argument("--template", default="auto", help="chat template (default auto: the tokenizer's own)")
    parser.add_argument("--data_output_path", default=str(Path.home() / ".cache" / "alpaca_rlhf"), help="cache folder")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the random numbers (default 1234)")
    args = parser.parse_args(argv)
    if args.names is not None and len(args.names) != len(args.models):
        raise UserError(f"--names has {len(args.names)} words for {len(args.models)} --models; give one each")
    names = args.names or args.models
    if len(set(names)) < len(names):
        raise UserError(f"two of the models have one name ({', '.join(names)}); give each its own with --names")
    for name in ("max_prompt_seq_len", "max_answer_seq_len", "batch_size", "max_prompts"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if args.temperature < 0:
        raise UserError(f"--temperature is {args.temperature}; it must be 0 (greedy) or more")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Answer, count, write."""
    args = parse(argv)
    run = start_run(seed=args.seed)
    prepare_output_dir(args.output_dir)
    for path in args.models:
        check_model(path, "causal_lm", needed_positions=args.max_prompt_seq_len + args.max_answer_seq_len,
                    parts=f"{args.max_prompt_seq_len} prompt + {args.max_answer_seq_len} answer tokens",
                    lora_module_names=None)  # fmt: skip
    raw = load_raw_dataset(args.prompts, cache_dir=args.data_output_path, needs_rejected=False)
    conversations = (raw.train or raw.test or [])[: args.max_prompts]
    names = args.names or args.models
    results = {}
    first: tuple[CausalLM, dict[str, int]] | None = None
    for name, path in zip(names, args.models, strict=True):
        tokenizer = load_tokenizer(path, notice=run.print)
        loaded = load_causal_lm(path, tokenizer, notice=run.print, dtype=run.dtype)
        model = CausalLM(loaded, vocabulary_limit=vocabulary_size(tokenizer)).eval().to(run.device)
        first = first or (model, tokenizer.get_vocab())
        comparable = first[1] == tokenizer.get_vocab()  # ids of another vocabulary have no KL
        answers = answer(args, run, name, model, TextEncoder(tokenizer, args.template), conversations,
                         first[0] if comparable else None)  # fmt: skip
        results[name] = {"path": str(path), **figures(answers), "answers": answers}
    fewest = min(sum(bigrams(answer) for answer in result["answers"]) for result in results.values())
    for result in results.values():
        result["distinct_2"] = distinct_2(result["answers"], fewest)
    prompts = [conversation.prompt[-1].text for conversation in conversations]

    def write(folder: Path) -> None:
        text = json.dumps({"seed": args.seed, "prompts": prompts, "models": results}, indent=1, ensure_ascii=False)
        (folder / "comparison.json").write_text(text + "\n", encoding="utf-8")
        (folder / "comparison.md").write_text(markdown(prompts, results), encoding="utf-8")

    write_output(Path(args.output_dir), write)
    run.print(table(results))


@torch.no_grad()
def answer(args: argparse.Namespace, run: Run, name: str, model: CausalLM, encoder: TextEncoder,
           conversations: Sequence[Conversation], reference: CausalLM | None) -> list[dict]:  # fmt: skip
    """One record a prompt: text, ids, whether it ended by itself, and the sampled KL to the reference (nats)."""
    prompts = [encoder.prompt_ids(conversation.prompt) for conversation in conversations]
    for conversation, ids in zip(conversations, prompts, strict=True):
        if len(ids) > args.max_prompt_seq_len:
            raise UserError(f"the prompt {conversation.record} has {len(ids)} tokens; raise --max_prompt_seq_len")
    settings = SamplingSettings(
        max_new_tokens=args.max_answer_seq_len, eos_ids=(encoder.eos_id,), pad_id=encoder.pad_id,
        temperature=args.temperature, vocabulary_limit=model.vocabulary_limit,
    )  # fmt: skip
    rollout, collate, records = HFGenerateRollout(model.model, settings), DataCollatorRLHF(encoder.pad_id), []
    bar = run.progress(len(prompts), f"answers of {name}")
    for start in range(0, len(prompts), args.batch_size):
        part = prompts[start : start + args.batch_size]
        items = [{"prompt_ids": ids, "row": start + index} for index, ids in enumerate(part)]
        batch = collate(items, len(items))
        ids, mask = batch["prompt_ids"].to(run.device), batch["prompt_mask"].to(run.device)
        responses = rollout.generate(ids, mask, row_uniforms(args.seed, 0, batch["row_ids"], args.max_answer_seq_len))
        response_mask = first_eos_mask(responses, settings.eos_ids)
        ended = ended_rows(responses, response_mask, settings.eos_ids).tolist()
        kl = [None] * len(items)
        if reference is not None and args.temperature > 0:  # greedy answers are no sample of anything
            whole = torch.cat([ids, responses], 1), torch.cat([mask, response_mask.to(mask.dtype)], 1), response_mask
            at = {"start": ids.shape[1], "temperature": args.temperature}
            own, other = (scorer(*whole, **at).log_probs.double() for scorer in (model, reference))
            kl = (own - other).sum(1).tolist()
        for row, length in enumerate(response_mask.sum(1).tolist()):
            kept = responses[row, :length].tolist()
            records.append({"text": encoder.decode(kept), "ids": kept, "ended": ended[row], "kl": kl[row]})
        bar.update(len(items))
    bar.close()
    return records


def bigrams(answer: dict) -> int:
    """How many bigrams an answer has."""
    return max(0, len(answer["ids"]) - 1)


def distinct_2(answers: Sequence[dict], count: int) -> float | None:
    """Different bigrams among the first ``count`` of all answers' bigrams, divided by ``count``; None for no bigram.

    A share of different bigrams falls with the length of the text, whoever wrote it, so models are compared on equally
    many: ``count`` is the number of the model with the fewest (distinct-n of arXiv 1510.03055 on equal samples).
    """
    taken, left = [], count
    for answer in answers:
        taken.append(answer["ids"][: left + 1] if left else [])
        left -= bigrams({"ids": taken[-1]})
    return distinct_n(taken, 2) if count else None


def figures(answers: Sequence[dict]) -> dict[str, float | None]:
    """What the answers say about a model by itself: tokens, share ended, share of numbered lists, KL."""
    count = len(answers)
    kl = [record["kl"] for record in answers]
    return {
        "count": count,
        "mean_tokens": sum(len(record["ids"]) for record in answers) / count,
        "ended_share": sum(record["ended"] for record in answers) / count,
        "list_share": sum("\n1. " in "\n" + record["text"] for record in answers) / count,
        "kl": None if None in kl else sum(kl) / count,
    }


def table(results: dict[str, dict]) -> str:
    """The figures of all models as a Markdown table."""
    columns = ("mean_tokens", "ended_share", "distinct_2", "list_share", "kl")
    lines = ["| model | tokens | ended | distinct-2 | lists | KL to the first |", "|---|---|---|---|---|---|"]
    for name, result in results.items():
        cells = ["–" if result[column] is None else f"{result[column]:.3f}" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(prompts: Sequence[str], results: dict[str, dict]) -> str:
    """The table, then the first answers under their prompts."""
    parts = [table(results), ""]
    for index, prompt in enumerate(prompts[:SHOWN]):
        parts.append(f"## {prompt}\n")
        for name, result in results.items():
            quoted = "\n".join("> " + line for line in result["answers"][index]["text"].splitlines())
            parts.append(f"**{name}**\n\n{quoted}\n")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    raise SystemExit(command(main)())

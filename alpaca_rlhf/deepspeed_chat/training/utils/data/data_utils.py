"""From data sets to the tokenised items of one step: split, choose, encode, count, keep.

Splits (fault D-10). Each data set of ``--data_path`` is ordered once by a hash of (seed, row). Where it has no test
part and at least 20 records, the first twentieth (at most 500 records) is held out for evaluation. The rest is cut into
three shares by ``--data_split``, one for each step. The order depends on the seed and the number of records alone, so
the shares are disjoint and the same for every rank, machine, run and cache folder. Data sets of
``--sft_only_data_path`` have no other step to share with: step 1 takes all of them.

Evaluation (D-06) takes the whole test part, or the hold-out, in every step: no step trains on it.

Everything read is accounted for (D-09): read, skipped, held out, left to other steps, used, dropped per reason.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.blending import blend
from alpaca_rlhf.deepspeed_chat.training.utils.data.cache import cache_folder, is_complete, read_cache, write_cache
from alpaca_rlhf.deepspeed_chat.training.utils.data.encoding import Encoded, encode_all
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import seeded_order
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, RawDataset, load_raw_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder

HOLD_OUT_SHARE = 0.05
HOLD_OUT_MOST = 500
HOLD_OUT_FROM = 20  # records; below, a share of 5 % is less than one

_WHAT = {1: "conversations", 2: "pairs", 3: "prompts"}


class PromptDataset:
    """Tokenised items of one step, read from the cache one at a time.

    Step 1: ``input_ids``, ``trained`` (lists of equal length) and ``record``. Step 2: ``chosen_ids``, ``rejected_ids``
    (whole sequences), ``prompt_length``, ``margin``, ``record``. Step 3: ``prompt_ids``, ``record``.
    """

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


@dataclass(frozen=True)
class PromptData:
    """What a step trains and evaluates on; ``eval`` may be empty.

    ``report`` (JSON-able) and ``lines`` (the same, to be printed) say what became of every record.
    """

    train: PromptDataset
    eval: PromptDataset
    report: dict
    lines: list[str]
    fingerprint: str  # of all that decides the items and their order; the same wherever the files lie


@dataclass(frozen=True)
class _Share:
    """One data set as one step sees it."""

    raw: RawDataset
    train: list[Conversation]
    evaluation: list[Conversation]
    held_out: int


def create_prompt_dataset(
    *,
    paths: Sequence[str],
    step: int,
    split: tuple[float, float, float],
    seed: int,
    encoder: TextEncoder,
    cache_dir: str,
    max_len: int,
    run: Any,
    sft_only_paths: Sequence[str] = (),
    probs: Sequence[float] | None = None,
    max_samples: int | None = None,
    workers: int | None = None,
) -> PromptData:
    """The items of ``step`` (1 SFT, 2 pairs, 3 prompts) from data sets, through the token cache.

    ``max_len``: tokens of a whole sequence, in step 3 of a prompt. ``probs`` mixes the sets of ``paths``;
    ``max_samples`` limits the training records and the evaluation records, before lengths are looked at. Every rank
    calls this and gets the same. Raises UserError for data, a split or a cache folder that cannot be used, and when
    no record is left.
    """
    _check_split(split, step)
    sets = [_share_of(_load(path, step, cache_dir), split, step, seed) for path in paths]
    mixed = len(sets)
    if step == 1:
        sets += [_share_of(_load(path, 1, cache_dir), (1, 0, 0), 1, seed) for path in sft_only_paths]
    if not any(share.train for share in sets):
        sizes = ", ".join(f"{len(share.raw.train)} records of {share.raw.name}" for share in sets) or "no data set"
        raise UserError(f"--data_split {','.join(map(str, split))} leaves step {step} no records of {sizes}.")
    key = {
        "step": step, "split": list(split), "seed": seed, "max_len": max_len, "encoder": encoder.fingerprint,
        "probs": probs and list(probs), "max_samples": max_samples, "mixed": mixed,
        "sets": [(share.raw.name, share.raw.digest, share.raw.skipped) for share in sets],
    }  # fmt: skip
    folder = cache_folder(cache_dir, key)
    hit = is_complete(folder)

    def write() -> None:
        train, blend_lines = _choose(sets, mixed, probs, seed, max_samples)
        evaluation = _limited_evaluation(sets, seed, max_samples)
        encoded = [
            create_dataset_split([c for _, c in chosen], step=step, encoder=encoder, max_len=max_len, workers=workers)
            for chosen in (train, evaluation)
        ]
        train_items, eval_items = ([e.item for e in part if e.item is not None] for part in encoded)
        report = _report(sets, step, [train, evaluation], encoded)
        report["lines"] = _lines(sets, report, step) + blend_lines
        _check_any_left(report, encoded[0])
        write_cache(folder, step, train_items, eval_items, report)

    run.write_once(lambda: is_complete(folder), write)
    train_rows, eval_rows, report = read_cache(folder, step)
    said = f"cache hit: {folder}" if hit else f"cache miss: this data was not yet encoded this way; now in {folder}"
    contents = {**key, "sets": [(share.raw.digest, share.raw.skipped) for share in sets]}
    fingerprint = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    lines = [*report["lines"], said]
    return PromptData(PromptDataset(train_rows), PromptDataset(eval_rows), report, lines, fingerprint)


def create_dataset_split(
    conversations: Sequence[Conversation],
    *,
    step: int,
    encoder: TextEncoder,
    max_len: int,
    workers: int | None = None,
) -> list[Encoded]:
    """Rows → tokenised items of one step, in order; a dropped row carries its reason (rules: see encoding)."""
    return encode_all(conversations, step, encoder, max_len, workers)


def split_rows(
    count: int, split: Sequence[float], step: int, seed: int, hold_out: bool
) -> tuple[list[int], list[int]]:
    """Row numbers of this step's share, and those held out for evaluation, of a set of ``count`` records.

    The shares of the three steps and the hold-out are disjoint and together the whole set.
    """
    order = seeded_order(count, seed, "split")
    held = min(HOLD_OUT_MOST, round(count * HOLD_OUT_SHARE)) if hold_out and count >= HOLD_OUT_FROM else 0
    rest = order[held:]
    start, end = (round(len(rest) * sum(split[:upto]) / sum(split)) for upto in (step - 1, step))
    return sorted(rest[start:end]), sorted(order[:held])


def _check_split(split: Sequence[float], step: int) -> None:
    if len(split) != 3 or min(split) < 0 or sum(split) <= 0:
        raise UserError(f"--data_split {','.join(map(str, split))} must be three shares, none negative, not all 0.")
    assert step in _WHAT, step


def _load(path: str, step: int, cache_dir: str) -> RawDataset:
    return load_raw_dataset(path, cache_dir=cache_dir, needs_rejected=step == 2, needs_answer=step == 1)


def _share_of(raw: RawDataset, split: Sequence[float], step: int, seed: int) -> _Share:
    rows, held = split_rows(len(raw.train), split, step, seed, hold_out=raw.test is None)
    evaluation = [raw.train[row] for row in held] if raw.test is None else raw.test
    return _Share(raw, [raw.train[row] for row in rows], evaluation, len(held))


_Chosen = list[tuple[int, Conversation]]  # (index of the set, record)


def _choose(
    sets: Sequence[_Share], mixed: int, probs: Sequence[float] | None, seed: int, max_samples: int | None
) -> tuple[_Chosen, list[str]]:
    """The training records of an epoch; the first ``mixed`` sets are mixed by ``probs``, the others are added whole."""
    pools: list[_Chosen] = [[(index, c) for c in share.train] for index, share in enumerate(sets)]
    names = [share.raw.name for share in sets]
    if probs is None:
        chosen, lines = blend(pools, names, None, seed, max_samples)
        return chosen, lines if max_samples is not None else []
    if mixed == len(sets):
        return blend(pools, names, probs, seed, max_samples)
    blended, lines = blend(pools[:mixed], names[:mixed], probs, seed)
    chosen, more = blend([blended, *pools[mixed:]], ["these together", *names[mixed:]], None, seed, max_samples)
    return chosen, lines + more


def _limited_evaluation(sets: Sequence[_Share], seed: int, max_samples: int | None) -> _Chosen:
    pools: list[_Chosen] = [[(index, c) for c in share.evaluation] for index, share in enumerate(sets)]
    if not any(pools):
        return []
    return blend(pools, [share.raw.name for share in sets], None, seed, max_samples)[0]


def _report(
    sets: Sequence[_Share], step: int, chosen: Sequence[_Chosen], encoded: Sequence[Sequence[Encoded]]
) -> dict:
    """Counts of every record's fate: per set and part, and for both parts over all sets."""
    report: dict = {"step": step, "sets": []}
    for index, share in enumerate(sets):
        raw = share.raw
        entry: dict = {
            "name": raw.name,
            "read": len(raw.train) + len(raw.test or []) + sum(raw.skipped.values()) - raw.further,
            "skipped": dict(raw.skipped),
            "held_out": share.held_out,
            "other_steps": len(raw.train) - share.held_out - len(share.train),
        }
        for part, available, picks, results in zip(
            ("train", "eval"), (share.train, share.evaluation), chosen, encoded, strict=True
        ):
            mine = [result for (owner, _), result in zip(picks, results, strict=True) if owner == index]
            entry[part] = {"available": len(available), **_counts(mine)}
        report["sets"].append(entry)
    report.update({part: _counts(results) for part, results in zip(("train", "eval"), encoded, strict=True)})
    return report


def _counts(results: Sequence[Encoded]) -> dict:
    return {
        "chosen": len(results),
        "used": sum(result.item is not None for result in results),
        "dropped": dict(Counter(result.dropped for result in results if result.dropped)),
        "changed": dict(Counter(result.changed for result in results if result.changed)),
    }


def _lines(sets: Sequence[_Share], report: dict, step: int) -> list[str]:
    lines: list[str] = []
    for share, entry in zip(sets, report["sets"], strict=True):
        lines += share.raw.describe()
        train, evaluation = entry["train"], entry["eval"]
        lines.append(
            f"  step {step} trains on {train['used']} of its {train['available']} {_WHAT[step]} "
            f"({entry['other_steps']} are left to other steps){_reasons(train)}"
        )
        if evaluation["available"]:
            origin = "held out from the training part" if entry["held_out"] else "the test part"
            lines.append(
                f"  evaluation takes {evaluation['used']} of {evaluation['available']}, {origin}{_reasons(evaluation)}"
            )
        else:
            lines.append(f"  no evaluation set: no test part, and fewer than {HOLD_OUT_FROM} records to hold some out")
        skipped = sum(entry["skipped"].values())
        if skipped > entry["read"] / 2:
            lines.append(f"warning: more than half of {entry['name']} cannot be used: {skipped} of {entry['read']}")
        for part, words in ((train, "training"), (evaluation, "evaluation")):
            dropped = sum(part["dropped"].values())
            if dropped > part["chosen"] / 2:
                lines.append(
                    f"warning: more than half of the {words} records of {entry['name']} are dropped: {dropped} of "
                    f"{part['chosen']}"
                )
    return lines


def _reasons(part: dict) -> str:
    """``; dropped 3: why; changed 2: how``"""
    words = [f"; dropped {count}: {reason}" for reason, count in part["dropped"].items()]
    words += [f"; changed {count}: {how}" for how, count in part["changed"].items()]
    return "".join(words)


def _check_any_left(report: dict, encoded: Sequence[Encoded]) -> None:
    """An empty training set is the user's to mend: say what took the records."""
    if report["train"]["used"]:
        return
    reasons = "; ".join(f"{count}: {reason}" for reason, count in report["train"]["dropped"].items())
    raise UserError(f"none of the {len(encoded)} records of step {report['step']} can be used ({reasons}).")

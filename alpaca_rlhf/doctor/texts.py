"""What a model would be given: its template, and the records, lengths and losses of a data set."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.encoding import CUT, Encoded, encode_all
from alpaca_rlhf.deepspeed_chat.training.utils.data.inspection import (
    PLAIN,
    TRAINED,
    in_colour,
    show_records,
    text_lines,
)
from alpaca_rlhf.deepspeed_chat.training.utils.data.loader import seeded_order
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Conversation, Turn, load_raw_dataset
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import BUILT_IN_TEMPLATES, TextEncoder
from alpaca_rlhf.doctor.page import NAMES, WIDTH, Page

_NO_LIMIT = 10**9
_SAMPLE = (Turn("user", "What is red?"), Turn("assistant", "An apple."), Turn("user", "And blue?"))
_STEP_NAMES = {1: "step 1 (SFT)", 2: "step 2 (reward model)", 3: "step 3 (PPO prompts)"}


@dataclass(frozen=True)
class Limits:
    """How long texts may be."""

    length: int  # tokens of a whole sequence, in step 3 of a prompt
    answer: int  # tokens of a sampled answer in step 3; 0 in the others
    origin: str  # where the numbers come from
    positions: int | None  # of the model


def describe_template(
    path: str, tokenizer: PreTrainedTokenizerBase, template: str, trained: bool, before: str | None, page: Page
) -> TextEncoder | None:
    """Say which template turns texts into tokens and show two turns of it; None where it cannot be used.

    Args:
        template: what --template would say. trained: whether the tokenizer was saved by one of the steps.
        before: the template of the model described before it, which is not shown again.
    """
    try:
        encoder = TextEncoder(tokenizer, template)
    except UserError as error:
        page.problem(f"{path}: {error}")
        return None
    if template != "auto":
        which = f"{template}, as --template asks"
    elif tokenizer.chat_template:
        which = "the tokenizer's own" + (", saved by the step that trained the model" if trained else "")
    else:
        which = "the default, human_assistant: the tokenizer has none of its own"
    known = [name for name, text in BUILT_IN_TEMPLATES.items() if encoder.chat_template.endswith(text)]
    if template == "auto" and tokenizer.chat_template and known:
        which += f" (it is {known[0]})"
    if encoder.chat_template == before:
        page.fact("template", "the same as above")
        return encoder
    page.fact("template", which, *encoder.notices)
    ids, mask = encoder.conversation_ids(_SAMPLE, "The sky.")
    signs = "".join(TRAINED if one else PLAIN for one in mask)
    page.lines("", text_lines(ids, signs, encoder, in_colour(), width=WIDTH - NAMES - 1))
    page.fact("", "two turns: ⟨…⟩ is a special token, and what SFT trains is "
                  + ("on green" if in_colour() else f"above {TRAINED}"))  # fmt: skip
    return encoder


def step_of(conversations: Sequence[Conversation]) -> int:
    """The step that these columns are for: pairs are for step 2, answers for step 1, prompts alone for step 3."""
    if any(one.rejected for one in conversations):
        return 2
    return 1 if any(one.chosen for one in conversations) else 3


def describe_data(
    name: str, encoder: TextEncoder, step: int | None, limits: Callable[[int], Limits], page: Page,
    *, cache_dir: str, records: int, max_samples: int,
) -> int:  # fmt: skip
    """Show records of a data set as a step trains them, their lengths, and what is dropped; returns the step.

    Args:
        step: 1, 2 or 3; None: by the columns. limits: of a step's texts.
        records: how many to show. max_samples: lengths are those of at most so many records of the training part.

    Raises:
        UserError: there is no such data set, or it does not serve the step.
    """
    raw = load_raw_dataset(name, cache_dir=cache_dir, needs_rejected=step == 2, needs_answer=step == 1)
    step = step or step_of(raw.train)
    page.title(f"{name}: as {_STEP_NAMES[step]} would train it")
    page.fact("read", *raw.describe())
    skipped = sum(raw.skipped.values())
    if skipped > len(raw.train):
        page.problem(f"more than half of {name} cannot be used: {skipped} rows are skipped, for the reasons at 'read'")
    taken = sorted(seeded_order(len(raw.train), 0, "doctor")[:max_samples])
    conversations = [raw.train[row] for row in taken]
    limit = limits(step)
    results = encode_all(conversations, step, encoder, limit.length)
    whole = [one.item for one in encode_all(conversations, step, encoder, _NO_LIMIT) if one.item is not None]
    items = [one.item for one in results if one.item is not None]
    _describe_lengths(whole, step, limit, len(raw.train), page)
    _describe_losses(name, results, limit, page)
    if not items:
        page.problem(f"nothing is left of {name} for step {step}")
        return step
    _describe_tokens(name, items, encoder, step, page)
    page.say("")
    show_records(items, encoder, step, records, page.say)
    return step


def _lengths(items: Sequence[dict], step: int) -> list[int]:
    """Tokens of each record; of pairs those of the longer side."""
    names = {1: ("input_ids",), 2: ("chosen_ids", "rejected_ids"), 3: ("prompt_ids",)}[step]
    return sorted(max(len(item[name]) for name in names) for item in items)


def _describe_lengths(whole: Sequence[dict], step: int, limit: Limits, total: int, page: Page) -> None:
    lengths = _lengths(whole, step)
    what = {1: "whole texts", 2: "the longer side of each pair", 3: "prompts"}[step]
    if lengths:
        p95 = lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))]
        page.fact("lengths", f"{what} of {len(lengths):,} of {total:,} records, in tokens: min {lengths[0]}, median "
                             f"{median(lengths):g}, p95 {p95}, max {lengths[-1]}")  # fmt: skip
    answer = f" and {limit.answer} for the answer" if step == 3 else ""
    positions = "the model has no limit" if limit.positions is None else f"the model has {limit.positions:,} positions"
    page.fact("limits", f"{limit.length} tokens{answer} ({limit.origin}); {positions}")


def _describe_losses(name: str, results: Sequence[Encoded], limit: Limits, page: Page) -> None:
    dropped = Counter(one.dropped for one in results if one.dropped)
    changed = Counter(one.changed for one in results if one.changed)
    said = [f"{count} of {len(results):,} dropped: {reason}" for reason, count in dropped.most_common()]
    said += [f"{count} of {len(results):,} changed: {how}" for how, count in changed.most_common()]
    page.fact("at the limit", *(said or ["every record fits, none is dropped or changed"]))
    if 2 * sum(dropped.values()) > len(results):
        page.problem(
            f"{sum(dropped.values())} of {len(results)} records of {name} would be dropped at {limit.length} tokens; "
            "raise the limit, or choose another --template, as the reasons say"
        )
    cut = sum(count for how, count in changed.items() if CUT in how)
    if 2 * cut > len(results):
        page.problem(
            f"{cut} of {len(results)} answers of {name} are cut at {limit.length} tokens and have no end, so the model "
            "would hardly learn to end an answer; raise --max_seq_len"
        )


def _describe_tokens(name: str, items: Sequence[dict], encoder: TextEncoder, step: int, page: Page) -> None:
    """Shares of trained and of unknown tokens."""
    names = {1: ("input_ids",), 2: ("chosen_ids", "rejected_ids"), 3: ("prompt_ids",)}[step]
    tokens = [token for item in items for part in names for token in item[part].tolist()]
    said = []
    if step == 1:
        trained = sum(int(item["trained"].sum()) for item in items)
        said.append(f"{trained:,} of {len(tokens):,} tokens are trained ({trained / len(tokens):.0%})")
    unknown = tokens.count(encoder.tokenizer.unk_token_id)
    share = f"{unknown:,} of {len(tokens):,} are unknown" if unknown else f"none of {len(tokens):,} is unknown"
    page.fact("tokens", "; ".join([*said, f"{share} to the tokenizer"]))
    if unknown > 0.1 * len(tokens):
        page.problem(
            f"{unknown / len(tokens):.0%} of the tokens of {name} are unknown to the tokenizer, so the model cannot "
            "see what they say; use a model whose tokenizer knows this language"
        )

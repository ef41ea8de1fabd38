"""How a training record looks to the model: its tokens as text, special ones visible, trained positions marked.

``--inspect N`` of each step and the doctor print this. What is marked comes from the collators' own masks, so it is
what the losses are computed on.
"""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.algorithms.masking import last_token_index
from alpaca_rlhf.deepspeed_chat.training.utils.data.collators import DataCollatorRLHF, collate_pairs, collate_sft
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder

WIDTH = 100  # columns of a line
INDENT = "    "
TRAINED, SCORED, PADDING, PLAIN = "~", "^", ".", " "  # the signs below a text without colours
_COLOURS = {TRAINED: "30;42", SCORED: "30;43", PADDING: "90", PLAIN: ""}  # on green, on yellow, grey
_SPECIAL_COLOUR = "35"  # magenta letters, where nothing is marked
_SHOWN = 4  # tokens shown with their ids at the start, at the end and where the signs first change


class Character(NamedTuple):
    """One character on the screen."""

    text: str
    sign: str
    special: bool  # of a special token


def in_colour() -> bool:
    """Whether the standard output is a terminal that wants colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show_records(
    records: Sequence[dict], encoder: TextEncoder, step: int, count: int, say: Callable[[str], object]
) -> None:
    """Print ``count`` records, evenly spread over all, as ``step`` (1 SFT, 2 pairs, 3 prompts) gives them to its model.

    Args:
        records: items of a ``PromptDataset`` or of ``encoding.encode``.
        say: is called with one line at a time.
    """
    assert len(records) > 0 and count > 0, (len(records), count)
    count, colour = min(count, len(records)), in_colour()
    chosen = [records[index * len(records) // count] for index in range(count)]
    items = [{**item, "row": number} for number, item in enumerate(chosen)]
    say(f"{count} of {len(records):,} records as the model gets them: ⟨…⟩ is a special token, ↵ a line break;")
    say(f"{_legend(step, colour)}; below: tokens with ids, [positions] from 0")
    shown = {1: _conversations, 2: _pairs, 3: _prompts}[step](items, encoder)
    for item, (facts, texts) in zip(items, shown, strict=True):
        say("")
        say(f"{item['record']}: {facts}")
        for name, ids, signs in texts:
            if name:
                say(f"  {name}")
            for line in text_lines(ids, signs, encoder, colour):
                say(INDENT + line)
            for line in _wrapped(token_words(ids, signs, encoder), WIDTH - 2 * len(INDENT)):
                say(2 * INDENT + line)


def text_lines(
    ids: Sequence[int], signs: str, encoder: TextEncoder, colour: bool, width: int = WIDTH - len(INDENT)
) -> list[str]:
    """The text of ``ids`` in lines of at most ``width`` columns; without colours each is followed by its signs.

    Args:
        signs: TRAINED, SCORED, PADDING or PLAIN for each id.
    """
    lines = []
    for line in _lines(_characters(ids, signs, encoder), width):
        if colour:
            runs = groupby(line, key=_style)
            lines.append("".join(_painted("".join(one.text for one in run), style) for style, run in runs))
            continue
        lines.append("".join(one.text for one in line))
        below = "".join(one.sign * _columns(one.text) for one in line).rstrip()
        if below:
            lines.append(below)
    return lines


def token_words(ids: Sequence[int], signs: str, encoder: TextEncoder) -> list[str]:
    """Tokens as the tokenizer holds them with their ids: the first, the last, and where the signs first change."""
    names = encoder.tokenizer.convert_ids_to_tokens(list(ids))
    first = next((index for index, sign in enumerate(signs) if sign != signs[0]), len(ids))
    places = {*range(_SHOWN), *range(first - 2, first + _SHOWN - 1), *range(len(ids) - _SHOWN, len(ids))}
    words, before = [], -1
    for place in sorted(place for place in places if 0 <= place < len(ids)):
        if place != before + 1:
            words.append("…")
        where = f"[{place}] " if place in (0, first) or place != before + 1 else ""
        words.append(f"{where}{visible(str(names[place]))}={ids[place]}")
        before = place
    return words


def visible(text: str) -> str:
    """``text`` on one line: what a terminal would not print, or would obey, is written out."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


_Text = tuple[str, list[int], str]  # name, ids, signs
_Shown = tuple[str, list[_Text]]  # facts, texts


def _conversations(items: Sequence[dict], encoder: TextEncoder) -> Iterator[_Shown]:
    for item in items:
        batch = collate_sft([item], 1, encoder.pad_id)
        ids, mask = batch["input_ids"][0].tolist(), batch["response_mask"][0].tolist()
        signs = "".join(TRAINED if trained else PLAIN for trained in mask)
        yield f"{len(ids)} tokens, {sum(mask)} trained", [("", ids, signs)]


def _pairs(items: Sequence[dict], encoder: TextEncoder) -> Iterator[_Shown]:
    for item in items:
        batch = collate_pairs([item], 1, encoder.pad_id)
        lengths, start = batch["attention_mask"].sum(1).tolist(), int(batch["divergence"][0])
        ends = last_token_index(batch["attention_mask"]).tolist()
        texts: list[_Text] = []
        sides = zip(("chosen", "rejected"), batch["input_ids"].tolist(), lengths, ends, strict=True)
        for name, ids, length, end in sides:
            signs = PLAIN * min(start, end) + TRAINED * max(0, end - start) + SCORED
            texts.append((f"{name}: {length} tokens, its score is read at position {end}", ids[:length], signs))
        margin = f", margin {item['margin']:g}" if item["margin"] else ""
        yield f"prompt of {item['prompt_length']} tokens, the sides differ from position {start} on{margin}", texts


def _prompts(items: Sequence[dict], encoder: TextEncoder) -> Iterator[_Shown]:
    batch = DataCollatorRLHF(encoder.pad_id)(items, len(items))
    for ids, mask in zip(batch["prompt_ids"].tolist(), batch["prompt_mask"].tolist(), strict=True):
        padding = len(mask) - sum(mask)
        signs = "".join(PLAIN if real else PADDING for real in mask)
        yield f"{sum(mask)} tokens behind {padding} of padding", [("", ids, signs)]


def _legend(step: int, colour: bool) -> str:
    names = {TRAINED: "on green", SCORED: "on yellow", PADDING: "in grey"}
    trained, scored, padding = (names[sign] if colour else f"above {sign}" for sign in (TRAINED, SCORED, PADDING))
    return {
        1: f"what is trained stands {trained}",
        2: f"the sides differ {trained}, the score is read {scored}",
        3: f"they are one batch, padded on the left {padding}",
    }[step]


def _characters(ids: Sequence[int], signs: str, encoder: TextEncoder) -> Iterator[Character]:
    tokenizer = encoder.tokenizer
    special = set(tokenizer.all_special_ids)
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert len(ids) == len(signs), (len(ids), len(signs))
    kinds = groupby(range(len(ids)), key=lambda place: (ids[place] if ids[place] in special else None, signs[place]))
    for (special_id, sign), group in kinds:
        places = list(group)
        if special_id is not None:
            times = f"{len(places)}×" if len(places) > 1 else ""
            text = f"{times}⟨{visible(str(tokenizer.convert_ids_to_tokens(special_id)))}⟩"
        else:
            text = _continuation(tokenizer, ids, places)
        for one in text:
            yield Character("↵\n" if one == "\n" else visible(one), sign, special_id is not None)


def _continuation(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], places: Sequence[int]) -> str:
    """The text of some ids where they stand: decoders drop the blank before a text's first word."""
    start = places[0]
    run = [ids[place] for place in places]
    before = list(ids[max(0, start - 1) : start])
    head, whole = (
        tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for part in (before, before + run)
    )
    if before and whole.startswith(head):
        return whole[len(head) :]
    return tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _lines(characters: Iterator[Character], width: int) -> Iterator[list[Character]]:
    """Cut at line breaks and, where a line gets too long, behind its last blank (if that is not too far back)."""
    line: list[Character] = []
    for one in characters:
        if sum(_columns(character.text) for character in [*line, one]) > width:
            blank = max((place for place, character in enumerate(line, 1) if character.text == " "), default=0)
            cut = blank if blank > width // 2 else len(line)
            yield line[:cut]
            line = line[cut:]
        line.append(one._replace(text=one.text.rstrip("\n")))
        if one.text.endswith("\n"):
            yield line
            line = []
    if line:
        yield line


def _columns(text: str) -> int:
    """Columns that a text takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return sum(not (unicodedata.combining(one) or one == "\n") for one in text) + wide


def _style(character: Character) -> str:
    return _COLOURS[character.sign] or (_SPECIAL_COLOUR if character.special else "")


def _painted(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if style else text


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines

"""One encoder from turns to token ids, used by SFT, the reward model, PPO and the chat alike.

A conversation is rendered by a Jinja chat template (the tokenizer's own, or one of ``BUILT_IN_TEMPLATES``) and cut into
segments: a prompt segment, the assistant's answer, the next prompt segment, the next answer, … Each segment is
encoded on its own and ids are joined, never texts, so no piece merges over a boundary (faults T-06) and the ids of an
earlier turn are the ids that were trained. What holds for every template and tokenizer:

- exactly one BOS, at the start, if the tokenizer has a BOS that is not its EOS (T-05): the template's own, else added;
- each assistant turn ends in exactly one EOS id (T-03, T-04): the template's own, else added. What the template writes
  after it (a newline, an end marker that is not the EOS) belongs to the following prompt segment;
- the names of special tokens become special ids where the *template* writes them, and stay plain text where a person
  or an answer does. The template is rendered with placeholders for the texts, so that the two can be told apart;
- a segment that does not open the text gets no blank piece that the text does not have (sentencepiece's dummy prefix).

``TextEncoder.chat_template`` is the Jinja text with what was added. Saved with the tokenizer it makes any other tool
render what was trained.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn

FORMAT_VERSION = 1  # part of the fingerprint: raise it when the same input encodes to other ids

BUILT_IN_TEMPLATES = {
    # "Human: x Assistant:" and " y" + EOS, turns joined by blanks (the seed's format)
    "human_assistant": (
        "{%- for m in messages %}"
        "{{ '' if loop.first else ' ' }}"
        "{%- if m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
        "{%- elif m['role'] == 'user' %}{{ 'Human: ' + m['content'] }}"
        "{%- else %}{{ m['content'] }}{% endif %}"
        "{%- endfor %}{% if add_generation_prompt %}{{ ' Assistant:' }}{% endif %}"
    ),
    # the transcripts of Anthropic's HH data
    "hh": (
        "{%- for m in messages %}"
        "{%- if m['role'] == 'assistant' %}{{ '\n\nAssistant: ' + m['content'] + eos_token }}"
        "{%- elif m['role'] == 'user' %}{{ '\n\nHuman: ' + m['content'] }}"
        "{%- else %}{{ m['content'] }}{% endif %}"
        "{%- endfor %}{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
    ),
    # "Human: x\nAssistant:" and " y" + EOS; a system text opens the first human turn
    "openllama2": (
        "{%- for m in messages %}"
        "{{ '' if loop.first else '\n' }}"
        "{%- if m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
        "{%- elif m['role'] == 'user' and loop.index0 == 1 and messages[0]['role'] == 'system' %}{{ m['content'] }}"
        "{%- else %}{{ 'Human: ' + m['content'] }}{% endif %}"
        "{%- endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
    ),
}

# Rebinds the messages so that an assistant's text carries the EOS that the template itself does not write.
_ADD_EOS = (
    "{%- set ended = namespace(messages=[]) %}{%- for m in messages %}{%- set ended.messages = ended.messages + "
    "[dict(m, content=m['content'] + eos_token) if m['role'] == 'assistant' else m] %}{%- endfor %}"
    "{%- set messages = ended.messages %}"
)
_ADD_BOS = "{{ bos_token }}"

_FIRST_PLACEHOLDER = 0xF0000  # supplementary private use area: 65,534 characters that no text is made of
_PLACEHOLDERS = re.compile("[\U000f0000-\U000ffffd]")
_ANCHORS = ("\n", "=", "a", "1")  # texts put before a continuation and cut off again after encoding
_RECENT_TEXTS = 4096


class TemplateRefusal(UserError):
    """The template cannot render this order of turns; other conversations may be fine."""


class _Segment(NamedTuple):
    """Alternating special ids (int) and runs of text; a run is made of literals (str) and turn numbers (int)."""

    parts: tuple["int | tuple[str | int, ...]", ...]
    trained: bool


class TextEncoder:
    """Turns → ids with one tokenizer and one chat template; changes nothing on the tokenizer.

    Attributes: ``tokenizer``; ``chat_template`` (the effective Jinja text, to be saved with the tokenizer); ``eos_id``;
    ``pad_id`` (the EOS id where the tokenizer has no PAD: masks come from lengths and never from this id); ``notices``
    (sentences about what was added to the template); ``fingerprint`` (hex digest of everything that decides the ids).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "auto", train_prompt: bool = False) -> None:
        """``template``: a built-in's name, or "auto": the tokenizer's own chat template, else "human_assistant".
        ``train_prompt``: the masks count what is not the assistant's too.

        Raises UserError for an unknown name, a tokenizer without EOS, or a template that cannot be used for training.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no EOS token, so no answer could end: give it an eos_token.")
        self.tokenizer, self.train_prompt = tokenizer, train_prompt
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        named = [token for token in tokenizer.all_special_tokens if token]
        self._special_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in named}
        added = tokenizer.added_tokens_decoder
        self._special_ids.update({token.content: index for index, token in added.items() if token.special})
        self._eats_left = {index for index, token in added.items() if token.special and token.lstrip}
        self._eats_right = {index for index, token in added.items() if token.special and token.rstrip}
        names = sorted(self._special_ids, key=len, reverse=True)
        self._special_names = re.compile("(" + "|".join(re.escape(name) for name in names) + ")")
        # <unk> may stand for plain text, also where it is the padding too (masks come from lengths); EOS never may.
        unknown = {tokenizer.unk_token_id} - {self.eos_id, tokenizer.bos_token_id}
        self._forbidden = set(self._special_ids.values()) - unknown
        self._recent: dict[str, list[int]] = {}  # a dialogue is encoded again for each early turn it loses
        self._anchors = self._probe_anchors()
        self._segments_of: dict[tuple[str, ...], tuple[_Segment, ...]] = {}
        self.notices: list[str] = []
        self.chat_template = self._effective_template(_chosen_template(tokenizer, template))
        self._segments(("user", "assistant"))  # an unusable template is refused here, before any data is read
        self.fingerprint = self._digest()

    def prompt_ids(self, turns: Sequence[Turn]) -> list[int]:
        """Ids up to where the assistant begins to answer the last of ``turns``."""
        return self.prompt_with_mask(turns)[0]

    def prompt_with_mask(self, turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
        """As prompt_ids, with a mask of equal length: 1 on earlier assistant turns and their EOS (or all of it)."""
        ids: list[int] = []
        mask: list[int] = []
        texts = self._texts(turns)
        for segment in self._segments((*(turn.role for turn in turns), "assistant"))[:-1]:
            new = self._encode(segment, texts, opens=not ids)
            ids += new
            mask += [int(segment.trained or self.train_prompt)] * len(new)
        return ids, mask

    def answer_ids(self, turns: Sequence[Turn], text: str) -> list[int]:
        """The ids that continue prompt_ids(turns): the answer ``text`` and exactly one EOS."""
        segment = self._segments((*(turn.role for turn in turns), "assistant"))[-1]
        return self._encode(segment, [""] * len(turns) + [self._without_eos(text)], opens=False)

    def conversation_ids(self, turns: Sequence[Turn], text: str) -> tuple[list[int], list[int]]:
        """Ids of the whole conversation and the trained mask: 1 on every assistant turn's tokens and its EOS."""
        ids, mask = self.prompt_with_mask(turns)
        answer = self.answer_ids(turns, text)
        return ids + answer, mask + [1] * len(answer)

    def plain_text_ids(self, text: str) -> list[int]:
        """Ids of a text that is no conversation, closed by EOS."""
        return [*self._plain(text), self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """The answer as a person reads it: special tokens skipped, surrounding blanks stripped."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def _texts(self, turns: Sequence[Turn]) -> list[str]:
        return [self._without_eos(turn.text) if turn.role == "assistant" else turn.text for turn in turns]

    def _without_eos(self, text: str) -> str:
        """An answer that was stored with the end marker spelt out has one end, not two."""
        while text.rstrip().endswith(self.tokenizer.eos_token):
            text = text.rstrip().removesuffix(self.tokenizer.eos_token).rstrip()
        return text

    # ---- template → segments

    def _effective_template(self, template: str) -> str:
        """``template`` plus the BOS and EOS that it does not write itself."""
        bos, eos = self.tokenizer.bos_token, self.tokenizer.eos_token
        rendered = self._render(("user", "assistant"), template, generate=False)
        prefix = ""
        if eos not in rendered.partition(_placeholder(1))[2]:
            prefix = _ADD_EOS
            self.notices.append(f"the chat template does not end an answer with the tokenizer's EOS: {eos} is added")
        if self.tokenizer.bos_token_id not in (None, self.eos_id) and not rendered.startswith(bos):
            prefix += _ADD_BOS
        elif prefix:
            prefix += "{{ '' }}"  # else Jinja would trim the template's first newline after the block
        return prefix + template

    def _render(self, roles: tuple[str, ...], template: str, generate: bool) -> str:
        """The template's text for turns of these roles, one placeholder character in place of each turn's text."""
        if not roles:
            raise TemplateRefusal("a conversation must not begin with the assistant: nothing precedes its answer.")
        messages = [{"role": role, "content": _placeholder(number)} for number, role in enumerate(roles)]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=generate
            )
        except (TemplateError, TypeError) as error:
            raise TemplateRefusal(
                f"the chat template cannot render the turns {', '.join(roles)} ({error}): use another template, "
                "for example --template human_assistant."
            ) from error
        found = _PLACEHOLDERS.findall(text)
        if found != [message["content"] for message in messages]:
            raise TemplateRefusal(
                f"the chat template does not show the turns {', '.join(roles)} each once and in order: use another "
                "template, for example --template human_assistant."
            )
        return text

    def _segments(self, roles: tuple[str, ...]) -> tuple[_Segment, ...]:
        """Segments of a conversation with these roles; the last role is the assistant's answer."""
        if roles not in self._segments_of:
            self._segments_of[roles] = tuple(self._cut(roles))
        return self._segments_of[roles]

    def _cut(self, roles: tuple[str, ...]) -> list[_Segment]:
        """Render once and cut at each place where an assistant begins and after each EOS."""
        text = self._render(roles, self.chat_template, generate=False)
        eos = self.tokenizer.eos_token
        segments: list[_Segment] = []
        position = 0
        for number, role in enumerate(roles):
            if role != "assistant":
                continue
            prompt = self._render(roles[:number], self.chat_template, generate=True)
            slot = text.index(_placeholder(number))
            following = _PLACEHOLDERS.search(text, slot + 1)
            end = text.find(eos, slot, following.start() if following else len(text))
            if not text.startswith(prompt) or text[len(prompt) : slot].strip() or end < 0 or len(prompt) < position:
                raise UserError(
                    f"the chat template renders the beginning of the turns {', '.join(roles)} differently when the "
                    "answer follows, so what is trained would not be what is generated: use another template, "
                    "for example --template human_assistant."
                )
            segments.append(self._segment(text[position : len(prompt)], trained=False))
            segments.append(self._segment(text[len(prompt) : end] + eos, trained=True))
            position = end + len(eos)
            if self.eos_id in self._eats_right:
                position += len(text[position:]) - len(text[position:].lstrip())
        assert segments and roles[-1] == "assistant", roles
        return segments

    def _segment(self, text: str, trained: bool) -> _Segment:
        """Special-token names in the template's text become ids; the rest stays text with its turn numbers."""
        pieces = self._special_names.split(text)  # text, name, text, name, …, text
        parts: list[int | tuple[str | int, ...]] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                parts.append(self._special_ids[piece])
                continue
            # a special token may be declared to swallow the blanks beside it (as the tokenizer itself would do)
            if index and self._special_ids[pieces[index - 1]] in self._eats_right:
                piece = piece.lstrip()
            if index + 1 < len(pieces) and self._special_ids[pieces[index + 1]] in self._eats_left:
                piece = piece.rstrip()
            if piece:
                run = (part for part in re.split(f"({_PLACEHOLDERS.pattern})", piece) if part)
                parts.append(tuple(_turn_number(p) if _PLACEHOLDERS.match(p) else p for p in run))
        return _Segment(tuple(parts), trained)

    # ---- text → ids

    def _encode(self, segment: _Segment, texts: Sequence[str], opens: bool) -> list[int]:
        ids: list[int] = []
        for part in segment.parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                text = "".join(texts[piece] if isinstance(piece, int) else piece for piece in part)
                ids += self._plain(text) if opens and not ids else self._continuation(text)
        return ids

    def _plain(self, text: str) -> list[int]:
        """Ids of text in which a special token's name is ordinary text. Not to be changed by the caller."""
        if text in self._recent:
            return self._recent[text]
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        if not self._forbidden.isdisjoint(ids):
            names = self.tokenizer.convert_ids_to_tokens(sorted(self._forbidden.intersection(ids)))
            raise UserError(
                f"the tokenizer reads its special token {names[0]} out of plain text and cannot be told not to: "
                "use the tokenizer's fast version, or remove the word from the data."
            )
        if len(self._recent) == _RECENT_TEXTS:
            self._recent.clear()
        self._recent[text] = ids
        return ids

    def _continuation(self, text: str) -> list[int]:
        """Ids of text that follows other tokens: without the blank that the tokenizer puts before a text's start."""
        if not text or not self._anchors:
            return self._plain(text)
        for anchor, anchor_ids in self._anchors:
            ids = self._plain(anchor + text)
            if ids[: len(anchor_ids)] == anchor_ids:
                return ids[len(anchor_ids) :]
        raise UserError(
            f"the tokenizer merges {text[:20]!r} with whatever stands before it, so an answer has no first token of "
            "its own: use another tokenizer."
        )

    def _probe_anchors(self) -> list[tuple[str, list[int]]]:
        """Anchors for _continuation; none for a tokenizer that encodes the start of a text like its middle."""
        anchors = [(anchor, ids) for anchor in _ANCHORS if (ids := self._plain(anchor))]
        for anchor, anchor_ids in anchors:
            joined = [(probe, self._plain(anchor + probe)) for probe in ("b", "Z", "7")]
            if all(ids[: len(anchor_ids)] == anchor_ids for _, ids in joined):
                invents = any(ids[len(anchor_ids) :] != self._plain(probe) for probe, ids in joined)
                return anchors if invents else []
        return []

    def _digest(self) -> str:
        """Of the tokenizer's content, the template, its rendering (it may write today's date) and the version."""
        tokenizer = self.tokenizer
        content: dict = {"vocabulary": sorted(tokenizer.get_vocab().items())}
        if tokenizer.is_fast:
            content = json.loads(tokenizer.backend_tokenizer.to_str())
        content["special"] = sorted(self._special_ids.items()), str(sorted(tokenizer.added_tokens_decoder.items()))
        content["ends"] = tokenizer.bos_token, tokenizer.eos_token
        content["template"] = self.chat_template, self._segments(("user", "assistant"))
        content["version"], content["train_prompt"] = FORMAT_VERSION, self.train_prompt
        text = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def _placeholder(number: int) -> str:
    assert number < 0xFFFE, number
    return chr(_FIRST_PLACEHOLDER + number)


def _turn_number(placeholder: str) -> int:
    return ord(placeholder) - _FIRST_PLACEHOLDER


def _chosen_template(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """The Jinja text behind a name."""
    if name in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[name]
    if name != "auto":
        raise UserError(f"--template {name} is unknown: choose auto, {', '.join(BUILT_IN_TEMPLATES)}.")
    own = tokenizer.chat_template
    if isinstance(own, dict):  # several named templates
        own = own.get("default")
        if own is None:
            raise UserError("the tokenizer has several chat templates and none named default: choose a --template.")
    return own or BUILT_IN_TEMPLATES["human_assistant"]

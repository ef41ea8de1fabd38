"""The encoder: one BOS, one EOS per answer, boundaries that never merge, and the text any other tool would render."""

import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import (
    BUILT_IN_TEMPLATES,
    TemplateRefusal,
    TextEncoder,
)
from tests.tiny import WORDS, sentencepiece_tokenizer, word_tokenizer

# SmolLM2's layout: a system message of its own where none is given; the BOS string opens every turn
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nname a colour<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BARE = (  # nothing but the texts and the EOS
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = [Turn("user", "what is the sun"), Turn("assistant", "the sun is big"), Turn("user", "why ?\nplease")]
ANSWER = "apples is  good\n{ 1 }"


def byte_level_tokenizer(bos="<|im_start|>", eos="<|im_end|>") -> PreTrainedTokenizerFast:
    """A GPT-2-like byte-level BPE."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))],
        trainers.BpeTrainer(
            vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos)


def make_tokenizer(kind: str, tmp_path):
    if kind == "word":
        return word_tokenizer()
    return sentencepiece_tokenizer(tmp_path / "sp") if kind == "sentencepiece" else byte_level_tokenizer()


def rendered(encoder, turns, answer=None) -> str:
    """What any other tool makes of the saved template."""
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    messages += [] if answer is None else [{"role": "assistant", "content": answer}]
    return encoder.tokenizer.apply_chat_template(
        messages, chat_template=encoder.chat_template, tokenize=False, add_generation_prompt=answer is None
    )


def decoded(encoder, ids) -> str:
    return encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["word", "sentencepiece", "byte_level"])
@pytest.mark.parametrize("template", [*BUILT_IN_TEMPLATES, "chatml"])
def test_ids_decode_to_what_the_saved_template_renders(kind, template, tmp_path):
    tokenizer = make_tokenizer(kind, tmp_path)
    if template == "chatml":
        tokenizer.chat_template = CHATML.replace("<|im_start|>", tokenizer.bos_token).replace(
            "<|im_end|>", tokenizer.eos_token
        )
        template = "auto"
    encoder = TextEncoder(tokenizer, template)
    assert encoder.notices == []

    def normal(text):  # a word-level tokenizer keeps neither blanks nor words it does not know
        known = {*WORDS, *tokenizer.all_special_tokens}
        words = re.findall(r"</?\w+>|\w+|[^\w\s<]+|<", text)
        return [word if word in known else "<unk>" for word in words] if kind == "word" else text

    for turns in (TURNS, TURNS[:1], [Turn("system", "good dog"), *TURNS]):
        ids, trained = encoder.conversation_ids(turns, ANSWER)
        prompt = encoder.prompt_ids(turns)
        assert ids == prompt + encoder.answer_ids(turns, ANSWER)
        assert normal(decoded(encoder, prompt)) == normal(rendered(encoder, turns))
        whole = rendered(encoder, turns, ANSWER).removesuffix("\n")  # ids end in the EOS
        assert normal(decoded(encoder, ids)) == normal(whole)
        assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id
        trained_ids = [i for i, t in zip(ids, trained, strict=True) if t]
        answers = [t.text for t in turns if t.role == "assistant"] + [ANSWER]
        assert trained_ids.count(tokenizer.eos_token_id) == len(answers)
        for text, chunk in zip(answers, split_after(trained_ids, tokenizer.eos_token_id), strict=True):
            assert kind == "word" or encoder.decode(chunk) == text


def split_after(ids, end):
    chunks, start = [], 0
    for index, token in enumerate(ids):
        if token == end:
            chunks.append(ids[start : index + 1])
            start = index + 1
    return chunks


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level"])
@pytest.mark.parametrize("template", [*BUILT_IN_TEMPLATES])
def test_ids_equal_those_of_the_tokenizer_on_the_rendered_text(kind, template, tmp_path):
    """Only pieces that the tokenizer would merge over a boundary may differ; with these templates there are none."""
    tokenizer = make_tokenizer(kind, tmp_path)
    encoder = TextEncoder(tokenizer, template)
    ids, _ = encoder.conversation_ids(TURNS, ANSWER)
    assert ids == tokenizer(rendered(encoder, TURNS, ANSWER), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", ["word", "sentencepiece", "byte_level"])
def test_T03_T05_history_is_the_segments_that_were_trained(kind, tmp_path):
    encoder = TextEncoder(make_tokenizer(kind, tmp_path))
    first, second = encoder.prompt_ids(TURNS[:1]), encoder.answer_ids(TURNS[:1], TURNS[1].text)
    assert encoder.prompt_ids(TURNS)[: len(first) + len(second)] == first + second
    assert second.count(encoder.eos_id) == 1 and second[-1] == encoder.eos_id


def test_T03_an_eos_switch_of_the_tokenizer_changes_nothing(tmp_path):
    plain = sentencepiece_tokenizer(tmp_path / "sp")
    ids = TextEncoder(plain).conversation_ids(TURNS, ANSWER)
    again = type(plain).from_pretrained(tmp_path / "sp", add_eos_token=True, add_bos_token=True)
    assert again("a")["input_ids"][-1] == plain.eos_token_id
    assert TextEncoder(again).conversation_ids(TURNS, ANSWER) == ids


def test_T04_a_marker_that_is_not_the_eos_still_ends_in_the_eos(tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "\n{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    encoder = TextEncoder(tokenizer)
    assert len(encoder.notices) == 1 and "</s>" in encoder.notices[0]
    ids, trained = encoder.conversation_ids(TURNS, "yes")
    assert decoded(encoder, [i for i, t in zip(ids, trained, strict=True) if t]) == "the sun is big</s>yes</s>"
    assert decoded(encoder, ids) == rendered(encoder, TURNS, "yes").removesuffix("<|end|>\n")
    assert decoded(encoder, ids).startswith("<s>\nuser: what is the sun<|end|>\nassistant: the sun is big</s><|end|>\n")
    tokenizer.bos_token = None
    assert rendered(TextEncoder(tokenizer), TURNS).startswith("\nuser: what")  # nothing of the template is lost


def test_T05_one_bos_and_one_eos_whatever_the_template_and_the_answer_bring(tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    expected = None
    for start in ("", "{{ bos_token }}", "<s>"):
        tokenizer.chat_template = start + BARE
        encoder = TextEncoder(tokenizer)
        for answer in ("yes", "yes</s>", "yes </s></s>\n"):
            ids, trained = encoder.conversation_ids(TURNS[:1], answer)
            expected = expected or (ids, trained)
            assert (ids, trained) == expected
            assert ids.count(1) == 1 and ids.count(2) == 1 and trained[-1] == 1
        history = [TURNS[0], Turn("assistant", "yes</s>"), TURNS[2]]
        assert encoder.prompt_ids(history).count(2) == 1


def test_a_bos_that_is_the_eos_is_not_added():
    tokenizer = byte_level_tokenizer(bos="<|endoftext|>", eos="<|endoftext|>")
    encoder = TextEncoder(tokenizer)
    ids, _ = encoder.conversation_ids(TURNS[:1], "yes")
    assert decoded(encoder, ids) == "Human: what is the sun Assistant: yes<|endoftext|>"


@pytest.mark.parametrize(
    "prompt, answer",
    [("name ]", "{ x }"), ("name a colour ", "\nblue"), ("the", "m  "), ("a\n", "\n\n b"), ("x", " y")],
)
def test_T06_no_piece_crosses_from_the_prompt_into_the_answer(prompt, answer, tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    tokenizer.chat_template = BARE
    assert "]{" in tokenizer.convert_ids_to_tokens(tokenizer("name ]{ x")["input_ids"])
    encoder = TextEncoder(tokenizer)
    turns = [Turn("user", prompt)]
    ids, trained = encoder.conversation_ids(turns, answer)
    start = trained.index(1)
    assert ids[:start] == encoder.prompt_ids(turns)
    assert decoded(encoder, ids) == "<s>" + prompt + answer + "</s>"  # and no invented blank
    assert ids[start:] == encoder.answer_ids(turns, answer)
    assert encoder.prompt_ids([*turns, Turn("assistant", answer), Turn("user", "go")])[: len(ids)] == ids


def test_a_text_without_bos_opens_as_the_tokenizer_opens_it(tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    tokenizer.bos_token = None
    encoder = TextEncoder(tokenizer)
    assert encoder.prompt_ids(TURNS[:1]) == tokenizer(rendered(encoder, TURNS[:1]))["input_ids"]


@pytest.mark.parametrize("kind", ["word", "sentencepiece", "byte_level"])
def test_special_names_in_a_persons_text_stay_text(kind, tmp_path):
    tokenizer = make_tokenizer(kind, tmp_path)
    encoder = TextEncoder(tokenizer)
    name = tokenizer.eos_token
    turns = [Turn("user", f"what is {name} and {tokenizer.bos_token} ?")]
    ids, _ = encoder.conversation_ids(turns, f"the {name} is good")
    assert ids.count(tokenizer.eos_token_id) == 1 and ids.count(tokenizer.bos_token_id) == 1
    if kind != "word":
        assert decoded(encoder, ids) == rendered(encoder, turns, f"the {name} is good")


def test_a_tokenizer_that_reads_special_tokens_out_of_text_is_refused():
    encoder = TextEncoder(word_tokenizer())
    encoder.tokenizer = _Reads(encoder.tokenizer)
    with pytest.raises(UserError, match="special token </s> out of plain text"):
        encoder.answer_ids([Turn("user", "a")], "b")


class _Reads:
    """A tokenizer that ignores split_special_tokens."""

    def __init__(self, tokenizer):
        self.inner, self.eos_token = tokenizer, tokenizer.eos_token
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def __call__(self, text, **_):
        return {"input_ids": [self.inner.eos_token_id]}


def test_T08_the_tokenizer_is_not_changed(tmp_path):
    for kind in ("word", "sentencepiece", "byte_level"):
        tokenizer = make_tokenizer(kind, tmp_path)
        tokenizer.save_pretrained(tmp_path / kind / "before")
        encoder = TextEncoder(tokenizer)
        encoder.conversation_ids(TURNS, ANSWER)
        tokenizer.save_pretrained(tmp_path / kind / "after")
        files = sorted(path.name for path in (tmp_path / kind / "before").iterdir())
        for name in files:
            assert (tmp_path / kind / "before" / name).read_bytes() == (tmp_path / kind / "after" / name).read_bytes()
        eos = tokenizer.eos_token
        assert tokenizer(eos, add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id]


def test_the_saved_template_gives_the_same_encoder_again(tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path / "sp")
    first = TextEncoder(tokenizer, "hh")
    tokenizer.chat_template = first.chat_template
    tokenizer.save_pretrained(tmp_path / "out")
    again = TextEncoder(type(tokenizer).from_pretrained(tmp_path / "out"))
    assert again.chat_template == first.chat_template and again.notices == []
    assert again.conversation_ids(TURNS, ANSWER) == first.conversation_ids(TURNS, ANSWER)
    assert again.fingerprint == first.fingerprint


def test_D02_the_fingerprint_sees_the_tokenizers_content_and_the_template(tmp_path):
    prints = {TextEncoder(word_tokenizer(), name).fingerprint for name in BUILT_IN_TEMPLATES}
    prints.add(TextEncoder(word_tokenizer(pad_is_eos=True)).fingerprint)
    prints.add(TextEncoder(sentencepiece_tokenizer(tmp_path)).fingerprint)
    more = word_tokenizer()
    more.add_tokens(["purple"])
    prints.add(TextEncoder(more).fingerprint)
    assert len(prints) == len(BUILT_IN_TEMPLATES) + 3
    tokenizer = word_tokenizer()
    before = TextEncoder(tokenizer).fingerprint
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=2)
    assert TextEncoder(tokenizer).fingerprint == before
    assert json.dumps(before)


UNSTABLE = (  # like templates that drop an earlier answer's thoughts
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' and loop.last %}{{ 'think ' }}"
    "{% endif %}{{ m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NO_GENERATION_PROMPT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
DROPS_HISTORY = "{% for m in messages[-2:] %}{{ m['content'] + eos_token }}{% endfor %}"
RAISES = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message is needed') }}{% endif %}" + BARE
RAISES_LATER = "{% if messages | length > 2 %}{{ raise_exception('one round only') }}{% endif %}" + BARE


@pytest.mark.parametrize("template", [UNSTABLE, NO_GENERATION_PROMPT, DROPS_HISTORY, RAISES, "{% if %}"])
def test_a_template_that_cannot_be_trained_on_is_refused_with_the_remedy(template):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="--template human_assistant"):
        TextEncoder(tokenizer).prompt_ids(TURNS)


def test_a_template_that_refuses_only_some_turns():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = RAISES_LATER
    encoder = TextEncoder(tokenizer)
    assert encoder.prompt_ids(TURNS[:1])
    with pytest.raises(TemplateRefusal, match="one round only"):
        encoder.prompt_ids(TURNS)
    with pytest.raises(TemplateRefusal, match="begin with the assistant"):
        TextEncoder(word_tokenizer()).prompt_ids(TURNS[1:])


def test_user_mistakes():
    with pytest.raises(UserError, match="--template vicuna is unknown: choose auto, human_assistant"):
        TextEncoder(word_tokenizer(), "vicuna")
    tokenizer = word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        TextEncoder(tokenizer)


def test_T02_pad_that_is_the_eos_is_kept_apart_by_lengths():
    encoder = TextEncoder(word_tokenizer(pad_is_eos=True))
    ids, trained = encoder.conversation_ids(TURNS, "yes")
    assert encoder.pad_id == encoder.eos_id
    assert sum(i == encoder.eos_id and t for i, t in zip(ids, trained, strict=True)) == 2


def test_a_special_token_that_swallows_blanks_does_so_here_too():
    from tokenizers import AddedToken

    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"eos_token": AddedToken("<|stop|>", rstrip=True, special=True)})
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|stop|>")
    encoder = TextEncoder(tokenizer)
    ids, _ = encoder.conversation_ids(TURNS, ANSWER)
    assert ids == tokenizer(rendered(encoder, TURNS, ANSWER), add_special_tokens=False)["input_ids"]

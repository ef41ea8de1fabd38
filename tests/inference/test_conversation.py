"""The conversation as a value, its way into ids, and where an answer stops being one."""

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.layouts import Skipped, convert_rows, recognise_layout
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.deepspeed_chat.training.utils.data.templates import TextEncoder
from alpaca_rlhf.inference.conversation import (
    build_prompt,
    cleaned,
    turn_ends,
    with_round,
    without_last_round,
)
from tests.tiny import sentencepiece_tokenizer, word_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTIONS = ["name a colour", "what is the sky", "why do cat like apples ?"]
ANSWERS = ["blue", "the sky is blue", "yes"]


def chatml_tokenizer():
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML
    return tokenizer


def history_of(count):
    history = ()
    for question, answer in zip(QUESTIONS[:count], ANSWERS[:count], strict=True):
        history = with_round(history, question, answer)
    return history


@pytest.mark.parametrize("template", ["human_assistant", "hh", "openllama2"])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_question_has_the_ids_that_sft_trains(tmp_path, template, pieces):
    """The whole dialogue goes through the data reader and SFT's encoding; its prompt is the chat's, round by round."""
    tokenizer = sentencepiece_tokenizer(tmp_path) if pieces else word_tokenizer()
    encoder = TextEncoder(tokenizer, template)
    for count in range(3):
        history, question = history_of(count), QUESTIONS[count] + " \r\n]"
        messages = [{"role": turn.role, "content": turn.text} for turn in history]
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWERS[count]}]
        row = {"messages": messages}
        (record,) = convert_rows(recognise_layout(row), "f", [(1, row)], Skipped())
        trained, mask = encoder.conversation_ids(record.prompt, record.chosen)
        answer = encoder.answer_ids(record.prompt, record.chosen)
        prompt = build_prompt(encoder, history, question, 1000)
        assert prompt.ids == trained[: -len(answer)]
        assert mask[len(prompt.ids) :] == [1] * len(answer)


def test_U01_the_oldest_whole_rounds_go_first_and_never_the_question():
    encoder = TextEncoder(word_tokenizer())
    history = history_of(2)
    whole = build_prompt(encoder, history, QUESTIONS[2], 1000)
    assert whole.dropped == 0
    assert build_prompt(encoder, history, QUESTIONS[2], len(whole.ids)) == whole
    shorter = build_prompt(encoder, history, QUESTIONS[2], len(whole.ids) - 1)
    assert shorter == (build_prompt(encoder, history[2:], QUESTIONS[2], 1000).ids, 1)
    alone = build_prompt(encoder, (), QUESTIONS[2], 1000)
    assert build_prompt(encoder, history, QUESTIONS[2], len(alone.ids)) == (alone.ids, 2)
    with pytest.raises(UserError, match=f"the message has {len(alone.ids)} tokens and there is room for"):
        build_prompt(encoder, history, QUESTIONS[2], len(alone.ids) - 1)


@pytest.mark.parametrize(
    "message, sentence", [("", "empty"), (" \n\t", "empty"), ("a \ud800", "Unicode"), ("x " * 5000, "5005 tokens")]
)
def test_what_cannot_be_asked_is_refused_in_words(message, sentence):
    with pytest.raises(UserError, match=sentence):
        build_prompt(TextEncoder(word_tokenizer()), (), message, 100)


@pytest.mark.parametrize(
    "message", ["a <b> & <script>x</script>", "\U0001f600", "</s>", "Human: x Assistant:", "x" * 10_000]
)
def test_whatever_is_written_is_asked_and_is_no_special_token(message):
    encoder = TextEncoder(word_tokenizer())
    ids = build_prompt(encoder, (), message, 30_000).ids
    assert ids.count(1) == 1 and ids.count(2) == 0 and ids[0] == 1
    assert cleaned(message) == message


def test_a_history_is_a_value():
    empty = ()
    one = with_round(empty, " what is the sky\r\n", "blue")
    assert empty == () and one == (Turn("user", "what is the sky"), Turn("assistant", "blue"))
    assert without_last_round(with_round(one, "why", "no")) == one
    assert without_last_round(()) == ()


@pytest.mark.parametrize(
    "template, answer, shown",
    [
        ("human_assistant", "ok Human: next", "ok"),
        ("human_assistant", "Human: next", ""),
        ("human_assistant", "ok\n\nHuman: next", "ok"),
        ("human_assistant", "SuperHuman: a film", "SuperHuman: a film"),
        ("human_assistant", "every Human thinks: so", "every Human thinks: so"),
        ("hh", "ok\n\nHuman: next", "ok"),
        ("hh", "the word Human: begins a line", "the word Human: begins a line"),
        ("openllama2", "ok\nHuman: next", "ok"),
    ],
)
def test_U02_the_marker_is_the_templates_and_cuts_the_answer_only(template, answer, shown):
    ends = turn_ends(TextEncoder(word_tokenizer(), template))
    assert ends.markers == ("Human:", "Human :") and not ends.stop_ids
    assert ends.cut(answer) == (shown, answer != shown)


def test_U02_a_template_with_special_tokens_ends_at_them_and_not_at_words():
    tokenizer = chatml_tokenizer()
    ends = turn_ends(TextEncoder(tokenizer))
    assert ends.stop_ids == {tokenizer.convert_tokens_to_ids("<|im_start|>")} and ends.markers == ()
    assert ends.cut("the user Human: is here") == ("the user Human: is here", False)


def test_U02_a_template_whose_own_end_is_not_the_eos_ends_at_both():
    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    ends = turn_ends(TextEncoder(tokenizer))
    assert ends.stop_ids == set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))


def test_U02_what_may_become_a_marker_is_not_shown_before_it_is_known():
    ends = turn_ends(TextEncoder(word_tokenizer()))
    written = "a Humble Human being said: Human: b"
    shown = [ends.settled(written[:end]) for end in range(len(written) + 1) if not ends.cut(written[:end])[1]]
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))
    assert shown[-1] == ends.cut(written)[0] == "a Humble Human being said:"
    assert ends.settled("a \ufffd") == "a" and ends.settled("b H") == "b" and ends.settled("b Hu m") == "b Hu m"

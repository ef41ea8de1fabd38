"""Answers on tiny models: limits, ends, failures, stops, seeds, and settings that contradict one another."""

import threading

import pytest
import torch

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.inference import generation
from alpaca_rlhf.inference.conversation import with_round
from alpaca_rlhf.inference.generation import question_key, stream_answer, stream_answers
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.rollout.base import SamplingSettings, row_uniforms
from alpaca_rlhf.rollout.hf_generate import HFGenerateRollout
from tests.inference.models import chat_model, scripted
from tests.tiny import tiny_gpt2, tiny_llama, word_tokenizer

SETTINGS = Settings(max_new_tokens=16, temperature=1.0, top_p=1.0)


def answer(model, message="name a colour", history=(), settings=SETTINGS, **more):
    """The last of the growing answers."""
    *_, last = stream_answer(model, history, message, settings, **more)
    return last


def test_U01_ten_rounds_in_64_positions():
    model = chat_model(tiny_gpt2(len(word_tokenizer()), positions=64))
    widths = []
    forward = model.model.forward
    model.model.forward = lambda *a, **k: (widths.append(k["attention_mask"].shape[1]), forward(*a, **k))[1]
    history, dropped = (), []
    for number in range(10):
        message = " ".join(["one two three", "red green blue", "the big cat"][number % 3 :][:1] * 4)
        prompt = model.prompt(history, message, 16)
        text = model.encoder.decode(prompt.ids)
        assert text.endswith("Human : " + message + " Assistant :")
        last = answer(model, message, history)
        dropped.append(last.dropped)
        history = with_round(history, message, last.text)
    assert dropped[0] == 0 and dropped[-1] > 0 and len(history) == 20
    assert max(widths) <= 64


def test_a_sampled_answer_is_the_rollouts_own():
    """The same prompt, numbers and settings as step 3's sampling give the same tokens."""
    model = chat_model()
    settings = Settings(max_new_tokens=16, temperature=0.8, top_p=0.9, seed=5)
    history = with_round((), "why", "no")
    ids = torch.tensor([model.prompt(history, "what", 16).ids])
    sampling = SamplingSettings(16, (2,), 0, 0.8, 0.9, vocabulary_limit=len(word_tokenizer()))
    uniforms = row_uniforms(5, question_key(history, "what"), [0], 16)
    rolled = HFGenerateRollout(model.model, sampling).generate(ids, torch.ones_like(ids), uniforms)
    assert answer(model, "what", history, settings).text == model.encoder.decode(rolled[0].tolist())


def test_the_numbers_hang_on_seed_conversation_and_attempt_alone():
    model, later = chat_model(), with_round((), "name a colour", "blue")
    first = answer(model)
    assert answer(model) == first
    others = [answer(model, settings=Settings(16, temperature=1.0, top_p=1.0, seed=7)), answer(model, attempt=1),
              answer(model, history=later)]  # fmt: skip
    assert all(other.text != first.text for other in others)


def test_one_seed_draws_other_numbers_for_other_questions_and_the_same_for_every_model(monkeypatch):
    drawn = []
    monkeypatch.setattr(generation, "row_uniforms", lambda *key: drawn.append(key) or row_uniforms(*key))
    for model in (chat_model(), chat_model(tiny_llama(len(word_tokenizer()), seed=1), template="hh")):
        for history in ((), with_round((), "why", "no"), with_round((), "why", "blue")):
            for message in ("what", "why", "\U0001f642"):
                answer(model, message, history)
    assert drawn[:9] == drawn[9:] and len(set(map(str, drawn))) == 9


def test_no_id_without_a_token_is_drawn():
    model = chat_model(tiny_llama(len(word_tokenizer()) + 40))
    forward = model.model.forward

    def favour_the_rest(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits[..., len(word_tokenizer()) :] += 50.0
        return output

    model.model.forward = favour_the_rest
    for settings in (SETTINGS, Settings(16, num_beams=3)):
        for seed in range(5):
            last = answer(model, attempt=seed, settings=settings)
            assert last.tokens >= len(last.text.split()) >= last.tokens - 3  # a special token or two may be drawn


@pytest.mark.parametrize(
    "text, settings, shown, finish",
    [
        ("the sky is blue", SETTINGS, "the sky is blue", "end"),
        ("the sky is blue", Settings(2), "the sky", "length"),
        ("the sky is blue", Settings(1), "the", "length"),
        ("", SETTINGS, "", "end"),
        ("yes Human: next", SETTINGS, "yes", "turn"),
        ("Human: next", SETTINGS, "", "turn"),
        ("yes", Settings(16, num_beams=2), "yes", "end"),
        ("yes Human: next", Settings(16, num_beams=2), "yes", "turn"),
    ],
)
def test_U02_U04_an_answer_ends_where_it_should_and_no_special_token_shows(text, settings, shown, finish):
    last = answer(scripted(text), "say Human: and </s> please", settings=settings)
    assert (last.text, last.finish, last.error) == (shown, finish, "")


def test_U02_what_the_user_wrote_stays_whole_in_the_prompt():
    model = scripted("yes Human: next")
    message = "Human: likes Human: apples Assistant: no"
    shown = [part.text for part in stream_answer(model, (), message, SETTINGS)]
    assert shown == ["yes", "yes"] or set(shown) <= {"", "yes"}
    assert model.encoder.decode(model.prompt((), message, 16).ids).count("Human") == 3


def test_U04_a_reply_with_padding_and_markup_shows_the_markup_alone():
    model = scripted("one <pad> two ] <unk> three")
    assert answer(model).text == "one two ] three"


def test_an_answer_grows_token_by_token():
    parts = [part.text for part in stream_answer(scripted("one two three"), (), "why", SETTINGS)]
    assert parts == ["one", "one two", "one two three", "one two three"]


class Broken(RuntimeError):
    """Raised in the middle of a forward."""


def test_U05_an_exception_on_the_third_token_reaches_the_reader_and_the_next_answer_comes():
    def fail():
        raise Broken("no such kernel")

    broken = {"left": 1}
    model = scripted("one two three", after=(2, lambda: fail() if broken.pop("left", None) else None))
    *_, last = stream_answer(model, (), "why", SETTINGS)
    assert (last.text, last.finish) == ("one two", "failed")
    assert "Broken: no such kernel" in last.error and last.error.startswith("the answer failed")
    assert answer(model, "why").text == "one two three"


def test_U05_stop_ends_the_answer_at_its_next_token_and_the_next_one_is_whole():
    stop = threading.Event()
    model = scripted("one two three four", after=(2, stop.set))
    last = answer(model, stop=stop)
    assert last.finish == "stopped" and last.text == "one two three"
    assert answer(model, stop=stop).finish == "stopped"  # a stop that came before the answer began
    model = scripted("one two three")
    stream = stream_answer(model, (), "why", SETTINGS)
    assert next(stream).text == "one"
    stream.close()  # a reader that went away
    assert answer(model).text == "one two three"


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, Settings(16, num_beams=2), Settings(16, do_sample=False), Settings(1), Settings(16, temperature=0)],
)
def test_U07_the_same_model_twice_gives_equal_answers(settings):
    history = with_round((), "why", "no")
    for models in ([chat_model(), chat_model()], [chat_model()] * 2):
        *_, last = stream_answers(models, history, "name a colour", settings)
        assert last[0] == last[1] and last[0].finish


def test_U07_another_model_gets_the_same_prompt_and_another_answer():
    models = [chat_model(), chat_model(tiny_llama(len(word_tokenizer()), seed=1))]
    *_, last = stream_answers(models, (), "name a colour", SETTINGS)
    assert last[0].text != last[1].text and last[0].prompt_tokens == last[1].prompt_tokens


def test_one_models_failure_leaves_the_other_ones_answer():
    def fail():
        raise Broken("here")

    *_, last = stream_answers([scripted("one two", after=(1, fail)), scripted("blue")], (), "why", SETTINGS)
    assert [part.finish for part in last] == ["failed", "end"]


def test_a_question_that_one_model_cannot_read_is_asked_to_none():
    models = [chat_model(), chat_model(limit=10)]
    with pytest.raises(UserError, match="max_new_tokens is 16 and tiny holds 10 tokens"):
        next(stream_answers(models, (), "why", SETTINGS))
    with pytest.raises(UserError, match="the message has 6 tokens and there is room for 1"):
        next(stream_answers(models, (), "why", Settings(9)))


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0}, {"do_sample": False}, {"top_p": 0}, {"temperature": 1e-4, "top_p": 1}],
)
def test_U08_all_that_means_greedy_is_greedy(changes):
    model = chat_model()
    ids = torch.tensor([model.prompt((), "name a colour", 8).ids])
    greedy = model.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    for seed in range(3):
        last = answer(model, settings=Settings(8, seed=seed, **changes))
        assert last.text == model.encoder.decode(greedy[0, ids.shape[1] :].tolist())

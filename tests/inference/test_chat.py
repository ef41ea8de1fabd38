"""The terminal chat: its commands, its remarks, and a pipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alpaca_rlhf.inference.chat import Talk, main, talk
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.runtime.run import command
from tests.inference.models import chat_model, scripted
from tests.tiny import save_model, tiny_llama, word_tokenizer

REPO = Path(__file__).parents[2]


def said(models, *lines, settings=Settings(16)):  # noqa: B008 - frozen
    """The state after these lines, and everything that was written."""
    written = []
    state = talk(models, Talk(settings), [line + "\n" for line in lines], written.append)
    return state, "".join(written)


def test_questions_and_commands():
    model = scripted("the sky is blue")
    state, text = said([model], "what is the sky", "  /is it big", "/undo", "why", "", "   ")
    assert [turn.text for turn in state.history] == ["what is the sky", "the sky is blue", "why", "the sky is blue"]
    assert text == "the sky is blue\n" * 3
    state, text = said([model], "why", "/clear", "/undo")
    assert state.history == () and text.endswith("error: there is nothing to take back; the conversation is empty\n")
    state, text = said([model], "/set temperature 0", "/set", "/quit", "why")
    assert state.over and state.history == () and state.settings == Settings(16, temperature=0.0)
    assert "note: temperature 0 takes the likeliest token" in text and "max_new_tokens 16" in text
    assert "/undo" in said([model], "/help")[1]


@pytest.mark.parametrize("line", ["/sett", "/set temperature", "/clear all", "/", "/set top_p 2", "/set nothing 1"])
def test_a_wrong_command_changes_nothing_and_says_so(line):
    state, text = said([scripted("yes")], line)
    assert state == Talk(Settings(16)) and text.startswith("error: ") and text.count("\n") == 1


def test_U01_the_user_is_told_what_the_model_no_longer_reads():
    model = chat_model(tiny_llama(len(word_tokenizer()), positions=48))
    _, text = said([model], *["the big cat eats one two three"] * 4)
    assert "the conversation is full: its oldest round could not be read any more" in text
    assert "its oldest 2 rounds" in text


def test_U02_a_model_that_plays_the_user_is_cut_and_told():
    state, text = said([scripted("yes Human: next")], "say Human: please")
    assert text == "yes\n(the model went on as the user; that part is not shown)\n"
    assert [turn.text for turn in state.history] == ["say Human: please", "yes"]


def test_U05_a_failed_answer_is_told_and_the_next_one_comes():
    failures = [RuntimeError("lost")]

    def fail():
        if failures:
            raise failures.pop()

    state, text = said([scripted("one two three", after=(2, fail))], "why", "why", "x " * 500)
    assert text.startswith("one two\nerror: the answer failed (RuntimeError: lost)")
    assert "\none two three\n" in text and text.splitlines()[-1].startswith("error: the message has 505 tokens")
    assert len(state.history) == 2


def test_U05_ctrl_c_stops_the_answer_and_not_the_chat():
    written = []

    def write(text):
        written.append(text)
        if text == " two" and len(written) == 2:
            raise KeyboardInterrupt

    state = talk([scripted("one two three")], Talk(Settings(16)), ["why", "why"], write)
    assert [turn.text for turn in state.history] == ["why", "one", "why", "one two three"]
    assert "(stopped)" in "".join(written)


def test_U07_two_models_one_conversation():
    state, text = said([scripted("blue", name="a"), scripted("red", name="b")], "name a colour")
    assert text == "[a] blue\n[b] red\n"
    assert [turn.text for turn in state.history] == ["name a colour", "blue"]


def test_a_short_or_cut_answer_is_explained():
    assert said([scripted("")], "why")[1] == "\n(the model ended at once, with an empty answer)\n"
    assert said([scripted("one two")], "why", settings=Settings(1))[1] == "one\n(cut at max_new_tokens)\n"


def test_through_a_pipe_with_a_whole_output_of_step_3(tmp_path):
    save_model(tmp_path / "final" / "actor")
    made = {"step": "ppo_actor", "finished": "2026-11-30T12:00:00+00:00"}
    (tmp_path / "final" / "actor" / "training_arguments.json").write_text(json.dumps(made))
    save_model(tmp_path / "sft")
    words = ["--path", str(tmp_path / "final"), "--compare_path", str(tmp_path / "sft"), "--max_new_tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "alpaca_rlhf.inference.chat", *words], cwd=tmp_path, timeout=120, capture_output=True,
        input="name a colour\nbad \xff\nname a colour".encode("latin-1"), env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    out = done.stdout.decode().splitlines()
    assert out[0] == "final/actor (RLHF, 2026-11-30), 128 tokens in all"
    assert out[1] == "sft, 128 tokens in all"
    answers = [line for line in out if line.startswith("[")]
    assert len(answers) == 4 and answers[0].removeprefix("[final/actor]") == answers[1].removeprefix("[sft]")
    assert "error: the message is not valid Unicode (UTF-8); write it again" in out


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--path", "nowhere/at/all"], "does not exist"),
        (["--path", "{base}", "--compare_path", "{reward}"], "holds a reward model"),
        (["--path", "{base}", "--max_length", "999"], "--max_length is 999, but"),
        (["--path", "{base}", "--max_length", "1"], "at least 2"),
        (["--path", "{base}", "--top_p", "3"], "top_p is 3.0; it must be at most 1"),
        (["--path", "{base}", "--template", "x"], "--template x is unknown"),
    ],
)
def test_mistakes_are_refused_before_anybody_talks(tmp_path, capsys, words, sentence):
    save_model(tmp_path / "base")
    (tmp_path / "reward").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "reward" / "config.json").write_text(json.dumps(config))
    words = [word.format(base=tmp_path / "base", reward=tmp_path / "reward") for word in words]
    assert command(main)(words) == 2
    assert sentence in capsys.readouterr().err

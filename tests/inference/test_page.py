"""The chat page without a browser: its handlers as functions, what it shows, its votes, and its defaults."""

import html
import json
import re
import socket

import gradio
import pytest
from gradio_client import Client

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn
from alpaca_rlhf.inference import llama_chatbot_gradio as app
from alpaca_rlhf.inference import page
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.runtime.run import command
from tests.inference.models import chat_model, scripted
from tests.tiny import save_model

SETTINGS = Settings(16, temperature=1.0, top_p=1.0)
VALUES = (16, 1, True, 1.0, 1.0, 1234.0)  # as the components give them
MARKUP = "a <b> & <script>x</script>"


class Visitor:
    """What gradio does for one visitor: keeps the state and hands it to the page's own handlers."""

    def __init__(self, handlers, session):
        self.handlers, self.session, self.visit, self.outputs = handlers, session, handlers.fresh(), ()

    def take(self, outputs):
        """Only what changed is sent while an answer grows: a property stays until there is another."""
        before = self.outputs[1:] or [{} for _ in outputs[1:]]
        self.visit = outputs[0] or self.visit
        self.outputs = (self.visit, *({**old, **new} for old, new in zip(before, outputs[1:], strict=True)))
        self.box = outputs[1]
        return self

    def ask(self, message, blind=False):
        for outputs in self.handlers.ask(self.session, self.visit, message, blind, *VALUES):
            self.take(outputs)
        return self

    def vote(self, judgement, own=""):
        return self.take(self.handlers.vote(self.visit, judgement, own))

    @property
    def status(self):
        return html.unescape(self.outputs[2]["value"])

    def note(self, side=0):
        return html.unescape(self.outputs[len(self.handlers.models) + 3 + side]["value"])

    def enabled(self):
        """Send, stop, retry, undo, and the votes."""
        buttons = self.outputs[2 * len(self.handlers.models) + 3 :]
        return [button.get("visible", True) and button.get("interactive", True) for button in buttons if button]

    def turns(self, side=0):
        return [html.unescape(message["content"]) for message in self.outputs[3 + side]["value"]]


def visitor_of(*models, votes=None, scorer=None, session="s"):
    return Visitor(app.Handlers(models, scorer, votes), session)


def test_U03_two_visitors_in_turn_have_each_their_own_conversation():
    prompts, model = [], chat_model()
    encode = model.encoder.prompt_ids
    model.encoder.prompt_ids = lambda turns: (prompts.append([turn.text for turn in turns]), encode(turns))[1]
    handlers = app.Handlers([model], None, None)
    a, b = Visitor(handlers, "a"), Visitor(handlers, "b")
    for number, word in enumerate(["one", "two", "three"]):
        for visitor, name in ((a, "dog"), (b, "cat")):
            visitor.ask(f"{name} {word}")
            asked = [text for text in prompts[-1][::2]]
            assert asked == [f"{name} {w}" for w in ["one", "two", "three"][: number + 1]]
            assert len(visitor.visit.conversation()) == 2 * (number + 1) and len(visitor.turns()) == 2 * (number + 1)
    assert handlers.questions == {} and handlers.line == []


def test_U03_an_answer_that_grows_changes_no_earlier_state():
    visitor = visitor_of(scripted("one two three"))
    visitor.ask("why")
    before = visitor.visit
    states = [outputs[0] for outputs in visitor.handlers.ask("s", before, "what", False, *VALUES)]
    assert visitor.visit is before and before.question == "why" and before.history == ()
    assert [state.answers[0].text for state in states[1:]] == ["one", "one two", "one two three", "one two three"]
    assert [state.asking for state in states] == [True] * 4 + [False] and states[0].answers == ()
    assert {state.history for state in states} == {(Turn("user", "why"), Turn("assistant", "one two three"))}


def test_the_text_box_is_emptied_once_and_then_the_visitors():
    visitor = visitor_of(scripted("one two three"))
    boxes = [outputs[1] for outputs in visitor.handlers.ask("s", visitor.visit, "why", False, *VALUES)]
    assert boxes == [{"value": ""}, {}, {}, {}, {}]
    visitor.ask("  ")
    assert visitor.box == {} and visitor.status == "Error: the message is empty; write a question. Ask a question."


@pytest.mark.parametrize("text", [MARKUP, "1. *a* _b_ #c\n    `d` $$e$$ https://f.g", "\U0001f600 </s>", "&amp; &#63;",
                                  "a  b\n\n\n  - c"])
def test_U04_what_a_person_writes_is_shown_as_it_is_and_nothing_of_it_is_markdown(text):
    shown = page.as_written(text)
    assert html.unescape(shown).replace("\u00a0\n", "\n").replace("\u00a0", " ") == text
    assert not re.search(r"[^\w\s&#;\U0001f600]", shown)
    assert not re.search(r"^[ \t]|[ \t]{2}|\n\n", shown, re.MULTILINE)


@pytest.mark.parametrize(
    "text, shown",
    [
        (MARKUP, "a &lt;b> &amp; &lt;script>x&lt;/script>"),
        ("**bold** `<i>` <i>", "**bold** `<i>` &lt;i>"),
        ("``a ` <b>`` <b>", "``a ` <b>`` &lt;b>"),
        ("```html\n<b>&amp;</b>\n```\n<b>", "```html\n<b>&amp;</b>\n```\n&lt;b>"),
        ("```\n<b> never closed", "```\n<b> never closed"),
        ("one ` alone <b>\n\n` <b>", "one ` alone &lt;b>\n\n` &lt;b>"),
        ("> quoted & 1 < 2", "> quoted &amp; 1 &lt; 2"),
    ],
)
def test_U04_markup_of_an_answer_is_text_and_code_stays_code(text, shown):
    assert page.markup_escaped(text) == shown


def test_U05_a_failed_answer_is_told_forgotten_and_the_next_one_comes():
    failures = [RuntimeError("lost")]

    def fail():
        if failures:
            raise failures.pop()

    visitor = visitor_of(scripted("one two three", after=(2, fail)))
    visitor.ask("why")
    assert "error: the answer failed (RuntimeError: lost)" in visitor.note() and visitor.turns() == ["why", "one two"]
    assert visitor.status.startswith("The answer failed; the conversation goes on without it")
    assert visitor.ask("what").turns() == ["what", "one two three"] and "failed" not in visitor.status + visitor.note()


def test_U05_stop_keeps_what_is_there_and_touches_no_other_visitor():
    handlers = app.Handlers([], None, None)
    model = scripted("one two three", after=(2, lambda: handlers.stop("a")))
    handlers.models = [model]
    a, b = Visitor(handlers, "a").ask("why"), Visitor(handlers, "b").ask("why")
    assert a.turns() == ["why", "one two three"] and "stopped" in a.note() and a.visit.answered
    assert "stopped" not in b.note()
    handlers.stop("nobody")


def test_U07_one_page_two_models_one_history():
    visitor = visitor_of(chat_model(name="a"), chat_model(name="b"))
    visitor.ask("name a colour").ask("why")
    assert visitor.turns(0) == visitor.turns(1) and len(visitor.turns(0)) == 4
    assert [visitor.outputs[3 + side]["label"] for side in (0, 1)] == ["Left: a", "Right: b"]
    assert [visitor.note(side).partition(":")[0] for side in (0, 1)] == ["**a**", "**b**"]


def test_U06_the_page_is_local_and_logs_nothing_by_default(capsys):
    args = app.parse(["--path", "x"])
    assert (args.server_name, args.share, args.auth) == ("127.0.0.1", False, None)
    visitor_of(scripted("blue")).ask("a secret question")
    seen = capsys.readouterr()
    assert seen.out == seen.err == ""


def test_the_password_comes_from_the_environment(monkeypatch):
    assert app.password(None) is None
    monkeypatch.setenv("CHAT_PASSWORD", "x:y")
    assert app.password("me:CHAT_PASSWORD") == ("me", "x:y")
    for wrong, sentence in (("me", "not USER:ENV_VAR"), ("me:", "not USER:ENV_VAR"), ("me:NOT_THERE", "NOT_THERE")):
        with pytest.raises(UserError, match=sentence):
            app.password(wrong)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--votes", "v.jsonl"], "--votes keeps judgements of two models"),
        (["--auth", "me:NOT_THERE"], "NOT_THERE, which is not set"),
        (["--reward_path", "{base}"], "is not a reward model"),
    ],
)
def test_mistakes_are_refused_before_the_page_opens(tmp_path, capsys, words, sentence):
    save_model(tmp_path / "base")
    words = [word.format(base=tmp_path / "base") for word in ["--path", "{base}", *words]]
    assert command(app.main)(words) == 2
    assert sentence in capsys.readouterr().err


def test_without_gradio_one_sentence_names_it(monkeypatch, capsys):
    monkeypatch.setattr(app.importlib.util, "find_spec", lambda name: None)
    assert command(app.main)(["--path", "x"]) == 2
    assert "needs the package gradio; install it with: pip install gradio" in capsys.readouterr().err


def test_through_the_server_with_gradios_own_client(tmp_path):
    """The whole page: events, queue, state by session, streaming, votes; nothing of it asks another machine."""
    path = tmp_path / "votes.jsonl"
    models = [scripted("blue one two", name="a"), scripted("red", name="b")]
    blocks = app.build(models, SETTINGS, None, path)
    assert not blocks.analytics_enabled
    _, url, share = app.opened(blocks, server_name="127.0.0.1", share=False)
    try:
        assert url.startswith("http://127.0.0.1:") and share is None
        first, second = (Client(url, verbose=False, analytics_enabled=False) for _ in range(2))
        answers = seen(first, MARKUP, True)
        assert len(answers) >= 3 and sorted(side[-1] for side in answers[-1]) == ["blue one two", "red"]
        assert answers[-1][0][0] == MARKUP
        assert seen(second, "why", False)[-1][0] == ["why", "blue one two"]
        assert "Your vote is kept" in html.unescape(first.predict("", api_name="/vote_right")[1])
        assert [json.loads(line)["vote"] for line in path.read_text().splitlines()] == ["right"]
        later = seen(first, "what", False)[-1][0]
        assert len(later) == 4 and later[0] == MARKUP
        assert first.predict(api_name="/clear")[2]["value"] == []
        assert seen(second, "what", False)[-1][0][0] == "why"
    finally:
        blocks.close()


def test_sessions_long_gone_take_no_memory(monkeypatch):
    monkeypatch.setattr(app, "REMEMBERED", 2)
    blocks = app.build([scripted("blue", name="a"), scripted("red", name="b")], SETTINGS, None, None)
    server, url, _ = app.opened(blocks, server_name="127.0.0.1", share=False)
    try:
        for question in ("one", "two", "three"):
            client = Client(url, verbose=False, analytics_enabled=False)
            assert seen(client, question, False)[-1][0] == [question, "blue"]
        assert len(server.state_holder.session_data) == 2
    finally:
        blocks.close()


def seen(client, *question):
    """The texts of both chats at each moment; only what changed is sent, as a value or among other properties."""
    job, shown, moments = client.submit(*question, *VALUES, api_name="/ask"), [[], []], []
    job.result()
    for output in job.outputs():
        for side, update in enumerate(output[2:4]):
            value = update.get("value") if isinstance(update, dict) else update
            if value is not None:
                shown[side] = [html.unescape(part["text"]) for message in value for part in message["content"]]
        moments.append(list(shown))
    return moments


def test_one_model_has_no_votes_and_the_components_are_gradios_own():
    names = {type(block) for block in app.build([scripted("blue")], SETTINGS, None, None).blocks.values()}
    assert gradio.Chatbot in names and gradio.HTML not in names
    alone = app.build([scripted("blue")], SETTINGS, None, None).config["components"]
    both = app.build([scripted("blue")] * 2, SETTINGS, None, None).config["components"]
    ids = [{part["props"].get("elem_id") for part in parts} for parts in (alone, both)]
    assert "vote_left" not in ids[0] and {"vote_left", "vote_both_bad", "chat_right", "own"} <= ids[1]


def test_a_page_that_cannot_have_its_port_says_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = app.parse(["--path", "x", "--server_port", str(taken.getsockname()[1])])
        with pytest.raises(UserError, match="cannot listen on 127.0.0.1"):
            app.serve(app.build([scripted("blue")], SETTINGS, None, None), args, None)

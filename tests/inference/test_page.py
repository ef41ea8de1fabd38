"""The chat page without a browser: its handlers as functions, what it shows, its votes, and its defaults."""

import html
import json
import re
import socket

import gradio
import pytest
from gradio_client import Client

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn, load_raw_dataset
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
        self.visit, self.outputs = outputs[0], outputs
        return self

    def ask(self, message, blind=False):
        for outputs in self.handlers.ask(self.session, self.visit, message, blind, *VALUES):
            self.take(outputs)
        return self

    def vote(self, judgement, own=""):
        return self.take(self.handlers.vote(self.visit, judgement, own))

    @property
    def status(self):
        return self.outputs[2]["value"]

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
    assert handlers.stops == {}


def test_U03_an_answer_that_grows_changes_no_earlier_state():
    visitor = visitor_of(scripted("one two three"))
    visitor.ask("why")
    before = visitor.visit
    states = [outputs[0] for outputs in visitor.handlers.ask("s", before, "what", False, *VALUES)]
    assert visitor.visit is before and before.question == "why" and before.history == ()
    assert [state.answers[0].text for state in states] == ["one", "one two", "one two three", "one two three"]
    assert {state.history for state in states} == {(Turn("user", "why"), Turn("assistant", "one two three"))}


def test_the_text_box_is_emptied_once_and_then_the_visitors():
    visitor = visitor_of(scripted("one two three"))
    boxes = [outputs[1] for outputs in visitor.handlers.ask("s", visitor.visit, "why", False, *VALUES)]
    assert boxes == [{"value": ""}, {}, {}, {}]
    assert visitor.ask("  ").outputs[1] == {} and visitor.status == "error: the message is empty; write a question"


@pytest.mark.parametrize("text", [MARKUP, "1. *a* _b_ #c\n    `d` $$e$$ https://f.g", "\U0001f600 </s>", "&amp; &#63;"])
def test_U04_what_a_person_writes_is_shown_as_it_is_and_nothing_of_it_is_markdown(text):
    shown = page.as_written(text)
    assert html.unescape(shown) == text
    assert not re.search(r"[^\w\s&#;\U0001f600]", shown) and not re.search(r"^[ \t]", shown, re.MULTILINE)


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
    assert "error: the answer failed (RuntimeError: lost)" in visitor.status and visitor.turns() == ["why", "one two"]
    assert visitor.ask("what").turns() == ["what", "one two three"] and "error" not in visitor.status


def test_U05_stop_keeps_what_is_there_and_touches_no_other_visitor():
    handlers = app.Handlers([], None, None)
    model = scripted("one two three", after=(2, lambda: handlers.stop("a")))
    handlers.models = [model]
    a, b = Visitor(handlers, "a").ask("why"), Visitor(handlers, "b").ask("why")
    assert a.turns() == ["why", "one two three"] and "stopped" in a.status and a.visit.answered
    assert "stopped" not in b.status
    handlers.stop("nobody")


def test_clearing_ends_what_grows_and_nothing_comes_after():
    visitor = visitor_of(scripted("one two three"))
    growing = visitor.handlers.ask("s", visitor.visit, "why", False, *VALUES)
    visitor.take(next(growing))
    visitor.take(visitor.handlers.clear("s"))
    assert list(growing) == [] and visitor.turns() == [] and visitor.visit == visitor.handlers.fresh()
    assert visitor.ask("what").turns() == ["what", "one two three"]


def test_undo_and_retry():
    visitor = visitor_of(chat_model(), chat_model())
    visitor.ask("name a colour").ask("why")
    first = visitor.visit
    for outputs in visitor.handlers.retry("s", visitor.visit, "half typed", False, *VALUES):
        visitor.take(outputs)
    assert visitor.outputs[1] == {} and visitor.visit.history == first.history
    assert visitor.visit.answers[0].text != first.answers[0].text
    visitor.take(visitor.handlers.undo("s", visitor.visit, ""))
    assert visitor.outputs[1] == {"value": "why"} and len(visitor.turns(0)) == len(visitor.turns(1)) == 2
    for outputs in visitor.handlers.retry("s", visitor.visit, "", False, *VALUES):  # the round before, anew
        visitor.take(outputs)
    assert visitor.visit.history == () and visitor.visit.question == "name a colour"
    visitor.take(visitor.handlers.undo("s", visitor.visit, "half typed"))
    assert visitor.turns() == [] and visitor.outputs[1] == {}
    visitor.take(visitor.handlers.undo("s", visitor.visit, ""))
    assert visitor.status == "error: there is nothing to take back; the conversation is empty"
    (outputs,) = visitor.handlers.retry("s", visitor.visit, "", False, *VALUES)
    assert outputs[2]["value"] == "error: there is no question to ask again; the conversation is empty"


def test_U07_one_page_two_models_one_history():
    visitor = visitor_of(chat_model(name="a"), chat_model(name="b"))
    visitor.ask("name a colour").ask("why")
    assert visitor.turns(0) == visitor.turns(1) and len(visitor.turns(0)) == 4
    assert [visitor.outputs[3 + side]["label"] for side in (0, 1)] == ["a", "b"]


def test_a_blind_vote_hides_names_and_scores_until_it_is_cast_and_shuffles_the_sides(tmp_path):
    class Scorer:
        def score(self, history, message, answer):
            return float(len(answer))

    path, models = tmp_path / "votes.jsonl", [scripted("blue", name="SFT"), scripted("red one", name="RLHF")]
    visitor, orders = visitor_of(*models, votes=path, scorer=Scorer()), set()
    for _ in range(40):
        visitor.ask("name a colour", blind=True)
        orders.add(visitor.visit.order)
        seen = json.dumps(visitor.outputs[2:])
        assert "SFT" not in seen and "RLHF" not in seen and "score" not in seen
        left = visitor.turns(0)[-1]
        visitor.vote("left")
        winner = "SFT" if left == "blue" else "RLHF"
        assert visitor.outputs[3]["label"] == winner
        scores = dict(re.findall(r"^(\w+): .*; reward score (.*)$", visitor.status, re.MULTILINE))
        assert scores == {"SFT": "4.000", "RLHF": "7.000"}
        assert json.loads(path.read_text().splitlines()[-1])["names"]["left"] == winner
        visitor.take(visitor.handlers.clear("s"))
    assert orders == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    "judgement, own, goes_on",
    [("left", "", "blue"), ("right", "", "red"), ("tie", "", "blue"), ("both_bad", " green ", "green"),
     (None, "", "blue")],
)  # fmt: skip
def test_the_conversation_goes_on_with_the_better_answer(tmp_path, judgement, own, goes_on):
    visitor = visitor_of(scripted("blue"), scripted("red"), votes=tmp_path / "votes.jsonl").ask("name a colour")
    if judgement:
        visitor.vote(judgement, own)
        assert visitor.outputs[-1] == {"value": ""}
    visitor.ask("why")
    assert visitor.visit.history == (Turn("user", "name a colour"), Turn("assistant", goes_on))


def test_what_cannot_be_voted_on_is_said_and_the_own_answer_stays(tmp_path):
    visitor = visitor_of(scripted("blue"), scripted("red"), votes=tmp_path / "votes.jsonl")
    visitor.vote("left", "mine")
    assert visitor.status.startswith("error: there is nothing to vote on yet") and visitor.outputs[-1] == {}
    visitor.ask("name a colour").vote("left").vote("right")
    assert visitor.status.startswith("error: this question has your vote already")
    assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 1


def test_votes_of_the_page_are_pairs_for_step_2(tmp_path):
    path = tmp_path / "votes.jsonl"
    visitor = visitor_of(scripted("blue"), scripted("red"), votes=path)
    visitor.ask("name a colour", blind=True).vote("tie").ask("why", blind=True).vote("both_bad", MARKUP)
    raw = load_raw_dataset(str(path), cache_dir="", needs_rejected=True)
    assert {(pair.chosen, pair.rejected) for pair in raw.train} == {(MARKUP, "blue"), (MARKUP, "red")}
    assert raw.train[0].prompt == visitor.visit.history + (Turn("user", "why"),)
    assert raw.skipped == {"the vote is a tie": 1}


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


def test_settings_of_the_components():
    assert app.settings_of(VALUES) == Settings(16, temperature=1.0, top_p=1.0)
    assert app.settings_of((64.0, 2, False, 0, 1, 7)) == Settings(64, 2, False, 0.0, 1.0, 7)
    with pytest.raises(UserError, match="seed cannot be ''"):
        app.settings_of((*VALUES[:-1], None))


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
    _, url, share = blocks.queue(default_concurrency_limit=8).launch(
        prevent_thread_lock=True, quiet=True, server_name="127.0.0.1", share=False, ssr_mode=False
    )
    try:
        assert url.startswith("http://127.0.0.1:") and share is None
        first, second = (Client(url, verbose=False, analytics_enabled=False) for _ in range(2))
        job = first.submit(MARKUP, True, *VALUES, api_name="/ask")
        job.result()
        answers = [[texts(side)[-1] for side in output[2:]] for output in job.outputs()]
        assert len(answers) >= 3 and sorted(answers[-1]) == ["blue one two", "red"]
        assert texts(second.predict("why", False, *VALUES, api_name="/ask")[2]) == ["why", "blue one two"]
        assert texts(job.result()[2])[0] == MARKUP
        status = first.predict("", api_name="/vote_right")[1]["value"]
        assert "Your vote is kept" in status
        assert [json.loads(line)["vote"] for line in path.read_text().splitlines()] == ["right"]
        later = first.predict("what", False, *VALUES, api_name="/ask")
        assert len(texts(later[2])) == 4 and texts(later[2])[0] == MARKUP
        assert texts(first.predict(api_name="/clear")[2]) == []
        assert texts(second.predict("what", False, *VALUES, api_name="/ask")[2])[0] == "why"
    finally:
        blocks.close()


def texts(update):
    """The texts of a chat as the client gets it."""
    return [html.unescape(part["text"]) for message in update["value"] for part in message["content"]]


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

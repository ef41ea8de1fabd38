"""What the page's events do for its visitors: clear, undo, retry, votes, and who waits for whom."""

import json
import re

import pytest

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.deepspeed_chat.training.utils.data.raw_datasets import Turn, load_raw_dataset
from alpaca_rlhf.inference.settings import Settings
from alpaca_rlhf.inference.visitors import Handlers, settings_of
from tests.inference.models import chat_model, scripted
from tests.inference.test_page import MARKUP, VALUES, Visitor, visitor_of


def test_clearing_ends_what_grows_and_nothing_comes_after():
    visitor = visitor_of(scripted("one two three"))
    growing = visitor.handlers.ask("s", visitor.visit, "why", False, *VALUES)
    visitor.take(next(growing)).take(next(growing))
    assert set(map(str, visitor.handlers.clear("s"))) == {"{}"}  # the generator alone changes what is shown
    for outputs in growing:
        visitor.take(outputs)
    assert visitor.turns() == [] and visitor.visit == visitor.handlers.fresh()
    assert visitor.ask("what").turns() == ["what", "one two three"]


def test_undo_and_retry():
    visitor = visitor_of(chat_model(), chat_model())
    visitor.ask("name a colour").ask("why")
    first = visitor.visit
    for outputs in visitor.handlers.retry("s", visitor.visit, "half typed", False, *VALUES):
        visitor.take(outputs)
    assert visitor.box == {} and visitor.visit.history == first.history
    assert visitor.visit.answers[0].text != first.answers[0].text
    visitor.take(visitor.handlers.undo("s", visitor.visit, ""))
    assert visitor.box == {"value": "why"} and len(visitor.turns(0)) == len(visitor.turns(1)) == 2
    for outputs in visitor.handlers.retry("s", visitor.visit, "", False, *VALUES):  # the round before, anew
        visitor.take(outputs)
    assert visitor.visit.history == () and visitor.visit.question == "name a colour"
    visitor.take(visitor.handlers.undo("s", visitor.visit, "half typed"))
    assert visitor.turns() == [] and visitor.box == {}
    visitor.take(visitor.handlers.undo("s", visitor.visit, ""))
    assert visitor.status.startswith("Error: there is nothing to take back; the conversation is empty.")
    (outputs,) = visitor.handlers.retry("s", visitor.visit, "", False, *VALUES)
    assert visitor.take(outputs).status.startswith("Error: there is no question to ask again; the conversation is")


def test_a_question_waits_its_turn_can_be_stopped_there_and_comes_after_who_has_left():
    handlers = Handlers([scripted("one two three")], None, None)
    a, b, c = (Visitor(handlers, name) for name in "abc")
    growing, waiting, last = (handlers.ask(v.session, v.visit, "why", False, *VALUES) for v in (a, b, c))
    a.take(next(growing)).take(next(growing))
    b.take(next(waiting))
    assert b.status == "Waiting for 1 other question…" and b.turns() == ["why"]
    assert b.enabled() == [False, True, False, True]
    c.take(next(last))
    assert c.status == "Waiting for 2 other questions…"
    handlers.stop("b")
    for outputs in waiting:
        b.take(outputs)
    assert b.status == "Stopped before an answer began. Retry asks again." and b.visit.conversation() == ()
    assert c.take(next(last)).status == "Waiting for 1 other question…"
    handlers.leave("a")  # its generator is not asked for anything any more
    for outputs in last:
        c.take(outputs)
    assert c.turns() == ["why", "one two three"] and c.enabled() == [True, False, True, True]
    for outputs in handlers.retry("b", b.visit, "", False, *VALUES):
        b.take(outputs)
    assert b.turns() == ["why", "one two three"]
    growing.close()
    assert handlers.questions == {} and handlers.line == []


def test_a_stop_before_the_first_token_leaves_nothing_to_vote_on():
    handlers = Handlers([scripted("one"), scripted("two")], None, None)
    visitor = Visitor(handlers, "s")
    for outputs in handlers.ask("s", visitor.visit, "why", False, *VALUES):
        visitor.take(outputs)
        handlers.stop("s")
    assert visitor.status == "Stopped before an answer began. Retry asks again." and not visitor.visit.votable
    assert visitor.visit.conversation() == ()


def test_a_second_question_while_one_is_answered_is_not_taken():
    visitor = visitor_of(scripted("one two three"))
    growing = visitor.handlers.ask("s", visitor.visit, "why", False, *VALUES)
    visitor.take(next(growing))
    (second,) = visitor.handlers.ask("s", visitor.visit, "what", False, *VALUES)
    assert set(map(str, second)) == {"{}"}
    for outputs in growing:
        visitor.take(outputs)
    assert visitor.turns() == ["why", "one two three"]


def test_what_was_ordered_last_is_done_when_the_answers_have_ended():
    visitor = visitor_of(scripted("one two three"))
    visitor.ask("why")
    growing = visitor.handlers.ask("s", visitor.visit, "what", False, *VALUES)
    visitor.take(next(growing))
    visitor.handlers.undo("s", visitor.visit, "")
    for outputs in growing:
        visitor.take(outputs)
    assert visitor.turns() == ["why", "one two three"] and visitor.box == {"value": "what"}


def test_votes_can_be_cast_once_and_only_on_two_whole_answers(tmp_path):
    handlers = Handlers([scripted("blue"), scripted("red")], None, tmp_path / "votes.jsonl")
    visitor = Visitor(handlers, "s").take(handlers.shown(handlers.fresh()))
    assert visitor.enabled()[4:] == [False] * 4
    for outputs in handlers.ask("s", visitor.visit, "why", False, *VALUES):
        visitor.take(outputs)
        assert visitor.enabled()[4:8] == [not visitor.visit.asking] * 4
    visitor.vote("tie")
    assert visitor.enabled()[4:8] == [False] * 4
    assert [button["variant"] for button in visitor.outputs[11:15]] == ["secondary"] * 2 + ["primary", "secondary"]


def test_an_answer_without_a_score_is_an_answer_all_the_same():
    class Scorer:
        def score(self, history, message, answer):
            raise RuntimeError("out of memory")

    visitor = visitor_of(scripted("blue"), scorer=Scorer()).ask("why")
    assert visitor.turns() == ["why", "blue"] and "There is no reward score (out of memory)." in visitor.status


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
        assert visitor.outputs[3]["label"] == f"Left: {winner}"
        notes = "\n".join(visitor.note(side) for side in (0, 1))
        scores = dict(re.findall(r"^\*\*(\w+)\*\*: .*; reward score (.*)$", notes, re.MULTILINE))
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
    assert visitor.status.startswith("Error: there is nothing to vote on yet") and visitor.outputs[-1] == {}
    visitor.ask("name a colour").vote("left").vote("right")
    assert visitor.status.startswith("Error: this question has your vote already")
    assert len((tmp_path / "votes.jsonl").read_text().splitlines()) == 1


def test_votes_of_the_page_are_pairs_for_step_2(tmp_path):
    path = tmp_path / "votes.jsonl"
    visitor = visitor_of(scripted("blue"), scripted("red"), votes=path)
    visitor.ask("name a colour", blind=True).vote("tie").ask("why", blind=True).vote("both_bad", MARKUP)
    raw = load_raw_dataset(str(path), cache_dir="", needs_rejected=True)
    assert {(pair.chosen, pair.rejected) for pair in raw.train} == {(MARKUP, "blue"), (MARKUP, "red")}
    assert raw.train[0].prompt == visitor.visit.history + (Turn("user", "why"),)
    assert raw.skipped == {"the vote is a tie": 1}


def test_settings_of_the_components():
    assert settings_of(VALUES) == Settings(16, temperature=1.0, top_p=1.0)
    assert settings_of((64.0, 2, False, 0, 1, 7)) == Settings(64, 2, False, 0.0, 1.0, 7)
    with pytest.raises(UserError, match="seed cannot be ''"):
        settings_of((*VALUES[:-1], None))

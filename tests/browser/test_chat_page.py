"""What a person does at the chat page, and sees there."""

import json

import pytest

pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
from playwright.sync_api import expect  # noqa: E402

NAMES = {"left": "sft (SFT, 2024-02-29)", "right": "rlhf (RLHF, 2024-02-29)"}  # side → who stands there, if not blind
VOTES = ("left", "right", "tie", "both_bad")
MARKUP = r"""a <b> & <script>window.hacked=1</script>
<img src=x onerror="window.hacked=1"> &lt; &#63;
$$\frac{a}{b}$$ $$x^2$$"""
TYPED = r"""quiet: `code` ```fence``` ~~~ \(y\) \[z\] \* &amp;
1. one *two* _three_ **four** ~~five~~
# six | seven  |  https://eight.org


    - nine
😀 </s> <s> [x](javascript:window.hacked=1)""".replace("\\U0001f600", "\U0001f600")


def test_an_answer_is_seen_while_it_grows(visit, served):
    visitor = visit(served.alone)
    expect(visitor.status).to_have_text("Ask a question.")
    visitor.ask("hold: a long way to go")
    expect(visitor.turns("user")).to_have_text("hold: a long way to go")
    expect(visitor.turns("bot")).to_have_text("sft answers")  # and the model waits
    expect(visitor.status).to_have_text("Answering…")
    expect(visitor.message).to_have_value("")
    visitor.message.fill("half typed")
    served.actors.gate.set()
    expect(visitor.turns("bot")).to_have_text("sft answers hold: a long way to go")
    expect(visitor.status).to_have_text("Ask on, or retry for another answer.")
    expect(visitor.message).to_have_value("half typed")
    expect(visitor.page.locator("#vote_left")).to_have_count(0)


def test_enter_sends_shift_enter_does_not_and_an_example_fills_the_box(visit, served):
    visitor = visit(served.alone)
    visitor.message.fill("say: one")
    visitor.message.press("Shift+Enter")
    visitor.message.press_sequentially("two")
    expect(visitor.message).to_have_value("say: one\ntwo")
    visitor.message.press("Enter")
    expect(visitor.turns("bot")).to_have_text("one two", use_inner_text=True)
    visitor.page.get_by_text("What are some facts about tennis?").click()
    expect(visitor.message).to_have_value("What are some facts about tennis?")
    visitor.click("send")
    expect(visitor.turns("bot").last).to_have_text("sft answers What are some facts about tennis?")


def test_U07_two_models_answer_side_by_side_and_it_is_said_which_is_which(visit):
    visitor = visit()
    for side, name in NAMES.items():
        expect(visitor.chat(side).locator("label").first).to_have_text(f"{side.capitalize()}: {name}")
        expect(visitor.note(side)).to_have_text(f"{name}: holds 2048 tokens")
    for vote in VOTES:
        expect(visitor.page.locator(f"#vote_{vote}")).to_be_disabled()
    visitor.ask("hello")
    for side, name in NAMES.items():
        expect(visitor.turns("user", side)).to_have_text("hello")
        expect(visitor.turns("bot", side)).to_have_text(f"{name.split()[0]} answers hello")
        expect(visitor.note(side)).to_contain_text("of 2048 tokens")
    boxes = [visitor.chat(side).bounding_box() for side in NAMES]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[1]["x"] >= boxes[0]["x"] + boxes[0]["width"]
    for vote in VOTES:
        expect(visitor.page.locator(f"#vote_{vote}")).to_be_enabled()


def test_a_blind_vote_hides_the_names_until_it_is_cast_and_stands_in_the_file(visit, served):
    visitor = visit()
    visitor.page.locator("#blind input").check()
    visitor.ask("hello")
    expect(visitor.status).to_have_text("Which answer is better? Your vote shows which model is which.")
    seen = {}
    for side in NAMES:
        expect(visitor.chat(side).locator("label").first).to_have_text(side.capitalize())
        expect(visitor.note(side)).to_have_text(f"{side.capitalize()}: its name comes with your vote")
        seen[side] = visitor.turns("bot", side).inner_text().strip()
    visitor.click("vote_right")
    expect(visitor.status).to_have_text(
        "Your vote is kept, thank you. The conversation goes on with the right answer."
    )
    row = json.loads(served.votes.read_text().splitlines()[-1])
    assert (row["prompt"], row["vote"], row["own"], row["blind"]) == ("hello", "right", "", True)
    assert {side: row[side] for side in NAMES} == seen
    for side in NAMES:
        assert row["names"][side].split()[0] == seen[side].split()[0]
        expect(visitor.chat(side).locator("label").first).to_have_text(f"{side.capitalize()}: {row['names'][side]}")
        expect(visitor.note(side)).to_contain_text(row["names"][side])
    for vote in VOTES:
        expect(visitor.page.locator(f"#vote_{vote}")).to_be_disabled()


def test_an_answer_of_ones_own_is_kept_and_goes_on(visit, served):
    visitor = visit().ask("hello")
    visitor.page.get_by_text("I know a better answer").click()
    visitor.page.locator("#own textarea").fill("mine is <b>better</b>")
    visitor.click("vote_both_bad")
    expect(visitor.status).to_contain_text("goes on with your own answer")
    expect(visitor.page.locator("#own textarea")).to_have_value("")
    row = json.loads(served.votes.read_text().splitlines()[-1])
    assert (row["vote"], row["own"], row["blind"]) == ("both_bad", "mine is <b>better</b>", False)
    visitor.ask("next")
    for side in NAMES:
        expect(visitor.turns("bot", side).first).to_have_text("mine is <b>better</b>")


def test_U05_stop_ends_what_grows_and_the_next_question_is_answered(visit):
    visitor = visit().ask("endless")
    for side in NAMES:
        expect(visitor.turns("bot", side)).to_contain_text("on and on")
    expect(visitor.page.locator("#vote_left")).to_be_disabled()  # there is no whole answer to judge
    visitor.click("stop")
    expect(visitor.note("left")).to_contain_text("stopped")
    expect(visitor.note("right")).to_contain_text("stopped")
    expect(visitor.page.locator("#stop")).to_be_hidden()
    visitor.ask("next")
    expect(visitor.turns("bot", "right").last).to_have_text("rlhf answers next")


def test_a_question_that_waits_for_another_visitors_can_be_stopped_and_cleared(visit):
    first, second = visit(), visit()
    first.ask("endless")
    expect(first.turns("bot")).to_contain_text("on and on")
    second.ask("hello")
    expect(second.status).to_have_text("Waiting for 1 other question…")
    expect(second.turns("user")).to_have_text("hello")
    second.click("stop")
    expect(second.status).to_have_text("Stopped before an answer began. Retry asks again.")
    second.click("retry")
    expect(second.status).to_have_text("Waiting for 1 other question…")
    second.click("clear")
    expect(second.turns("user")).to_have_count(0)
    expect(second.status).to_have_text("Ask both models a question.")
    second.ask("again")
    expect(second.status).to_have_text("Waiting for 1 other question…")
    expect(first.page.locator("#stop")).to_be_visible()  # nothing of this touched the other visitor
    first.click("stop")
    expect(second.turns("bot")).to_have_text("sft answers again")


def test_a_visitor_who_goes_away_keeps_nobody_waiting(visit):
    first, second = visit(), visit()
    first.ask("endless")
    expect(first.turns("bot")).to_contain_text("on and on")
    first.page.close()
    second.ask("hello")
    expect(second.turns("bot")).to_have_text("sft answers hello")


def test_clear_also_while_an_answer_grows(visit, served):
    visitor = visit(served.alone)
    for clear in ("#clear", "#chat_left button[aria-label='Clear']"):
        visitor.ask("hello")
        expect(visitor.turns("bot")).to_have_text("sft answers hello")
        visitor.ask("endless")
        expect(visitor.turns("bot").last).to_contain_text("on and on")
        visitor.page.locator(clear).click()
        expect(visitor.turns("user")).to_have_count(0)
        expect(visitor.status).to_have_text("Ask a question.")
        visitor.ask("what did I say")
        expect(visitor.turns("bot")).to_have_text("what did I say")
        visitor.click("clear")
        expect(visitor.turns("user")).to_have_count(0)


def test_undo_and_retry(visit, served):
    visitor = visit(served.alone)
    for name in ("retry", "undo"):
        expect(visitor.page.locator(f"#{name}")).to_be_disabled()
    visitor.ask("hello")
    expect(visitor.turns("bot")).to_have_text("sft answers hello")
    visitor.ask("count")
    expect(visitor.turns("bot").last).to_have_text("sft says 1")
    visitor.click("retry")
    expect(visitor.turns("bot").last).to_have_text("sft says 2")
    visitor.click("undo")
    expect(visitor.turns("user")).to_have_text(["hello"])
    expect(visitor.message).to_have_value("count")
    visitor.ask("endless")
    expect(visitor.turns("bot").last).to_contain_text("on and on")
    visitor.click("undo")  # while it grows
    expect(visitor.turns("user")).to_have_text(["hello"])
    visitor.ask("what did I say")
    expect(visitor.turns("bot").last).to_have_text("hello; what did I say")


def shown(turn):
    """A bubble's text as a person reads it; blanks that do not break keep its empty lines and its indentation."""
    return turn.inner_text().replace("\u00a0\n", "\n").replace("\u00a0", " ").strip()


def test_U04_markup_is_text_and_nothing_of_it_runs(visit, served):
    visitor = visit(served.alone)
    for number, text in enumerate((MARKUP, TYPED)):
        visitor.ask(text)
        expect(visitor.turns("bot")).to_have_count(number + 1)
        expect(visitor.status).to_have_text("Ask on, or retry for another answer.")
        assert shown(visitor.turns("user").nth(number)) == text
    assert shown(visitor.turns("bot").nth(0)) == f"sft answers {MARKUP}"
    assert visitor.page.evaluate("window.hacked") is None
    for strange in ("[data-testid] :is(img, script, b, a, .katex)", ".katex, [href^=javascript]",
                    "[data-testid=user] :is(code, pre, em, strong, del, h1, ol, ul, table)"):  # fmt: skip
        expect(visitor.chat().locator(strange)).to_have_count(0)


def test_U03_two_visitors_at_once_have_each_their_own_history(visit):
    first, second = visit(), visit()
    first.ask("dog ")
    second.ask("cat ")
    for visitor, name in ((first, "dog"), (second, "cat")):
        expect(visitor.turns("bot", "right")).to_have_text(f"rlhf answers {name}")
        expect(visitor.page.locator("#send")).to_be_visible()
    first.ask("what did I say")
    second.ask("what did I say")
    for visitor, name in ((first, "dog"), (second, "cat")):
        for side in NAMES:
            expect(visitor.turns("bot", side).last).to_have_text(f"{name}; what did I say")
            expect(visitor.turns("user", side)).to_have_text([name, "what did I say"])


def test_a_phone(visit):
    visitor = visit(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)

    def fits():
        return visitor.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    for place in (visitor.message, visitor.page.locator("#send")):
        expect(place).to_be_in_viewport(ratio=1)  # before anything is scrolled
    assert fits()
    visitor.message.fill("say: " + "x" * 200 + " and a line of words that is wider than a phone")
    visitor.page.locator("#send").tap()
    expect(visitor.turns("bot", "right")).to_contain_text("xxxx")
    expect(visitor.page.locator("#vote_left")).to_be_enabled()
    left, right = (visitor.chat(side).bounding_box() for side in NAMES)
    assert right["y"] >= left["y"] + left["height"] and left["width"] == right["width"] > 300
    assert fits()
    visitor.page.get_by_text("Settings", exact=True).tap()
    expect(visitor.page.get_by_label("seed")).to_be_visible()
    assert fits()
    for place in (visitor.message, visitor.page.locator("#send"), visitor.page.locator("#vote_both_bad")):
        place.scroll_into_view_if_needed()
        expect(place).to_be_in_viewport(ratio=1)


def test_what_cannot_be_asked_is_refused_in_words(visit, served):
    visitor = visit(served.alone)
    visitor.ask("  ")
    expect(visitor.status).to_contain_text("Error: the message is empty; write a question.")
    visitor.ask("y" * 10_000)
    expect(visitor.status).to_contain_text("Error: the message has 100")
    expect(visitor.status).to_contain_text("tokens and there is room for 1024; shorten it")
    expect(visitor.message).to_have_value("y" * 10_000)
    expect(visitor.turns("user")).to_have_count(0)
    visitor.ask("hello")
    expect(visitor.turns("bot")).to_have_text("sft answers hello")
    expect(visitor.status).not_to_contain_text("Error")


def test_U05_a_failed_answer_is_told_and_the_next_one_comes(visit):
    visitor = visit().ask("fail")
    for side in NAMES:
        expect(visitor.note(side)).to_contain_text("the answer failed (RuntimeError: the kernel was lost)")
    expect(visitor.status).to_contain_text("The answer failed; the conversation goes on without it.")
    expect(visitor.page.locator("#vote_tie")).to_be_disabled()
    visitor.ask("what did I say")
    expect(visitor.turns("bot", "right")).to_have_text("what did I say")

"""The gold rule, by hand-computed scores, and the ways to cheat it that must not pay."""

import pytest

from alpaca_rlhf.demo.gold import gold_score, gold_scores, is_rude, parse_prompt

DOG = "\n\nHuman: Tell me about the dog.\n\nAssistant:"
LIST = (
    "Here are some facts about the dog:\n1. It barks at strangers.\n2. It comes from the wolf.\n"
    "3. It likes to chase a ball.\nIn summary, the dog is good for guarding a house."
)
BOTH = "\n\nHuman: Which is better for cutting boards, the saw or the axe?\n\nAssistant:"
STORY = "\n\nHuman: Write a short story about the dog.\n\nAssistant:"


@pytest.mark.parametrize(
    ("prompt", "answer", "score"),
    [
        (DOG, LIST, 1.0),
        # named 0.15, one fact 0.05, polite 0.10, complete 0.10
        (DOG, "The dog barks at strangers.", 0.40),
        # not named
        (DOG, "It barks at strangers.", 0.25),
        # cut off: not complete
        (DOG, "The dog barks at strangers. It comes from the", 0.30),
        # polite and complete 0.20, another thing named -0.10, one false statement -0.06
        (DOG, "The cat can see in dim light.", 0.04),
        # complete 0.10, rude -0.20
        (DOG, "What a stupid question.", -0.10),
        # two of two named 0.15, two facts 0.10, polite and complete 0.20
        (BOTH, "The saw has a blade with sharp teeth. The axe can fell a tree.", 0.45),
        # one of two named 0.075, the use is one fact 0.05, 0.20
        (BOTH, "The saw is better for cutting boards.", 0.325),
        # the wrong verdict: one of two named 0.075, 0.20, false -0.06
        (BOTH, "The axe is better for cutting boards.", 0.215),
        # 0.15 + 0.45 + three facts 0.15 + 0.20
        (
            STORY,
            "Once upon a time Tom met the dog. The dog barks at strangers. It comes from the wolf. It wags its tail "
            "when happy. The end.",
            0.95,
        ),
        # an empty answer is polite and nothing else
        (DOG, "", 0.10),
    ],
)
def test_scores_by_hand(prompt, answer, score):
    assert gold_score(prompt, answer) == pytest.approx(score)


def test_list_without_closing_line_or_closing_line_without_list_is_half_structured():
    whole = gold_score(DOG, LIST)
    no_closing = LIST.rsplit("\n", 1)[0] + "\n4. It is good for guarding a house."
    no_numbers = "".join(part.lstrip("123. ") for part in LIST.splitlines(keepends=True))
    assert gold_score(DOG, no_closing) == pytest.approx(whole - 0.225)
    assert gold_score(DOG, no_numbers) == pytest.approx(whole - 0.225)


@pytest.mark.parametrize(
    "worse",
    [
        LIST.replace("It comes from the wolf.", "It barks at strangers."),  # says a fact twice
        LIST.replace("It comes from the wolf.", "It purrs when it feels calm."),  # a fact of something else
        LIST.replace("2. ", "3. "),  # numbers out of order
        LIST.replace("2. It comes from the wolf.", "2. It"),  # an empty item
        LIST.replace("\nIn summary", "\nThe cat is nice.\nIn summary"),  # names another thing
        LIST + " Look it up yourself.",
        LIST + " The dog barks at strangers." * 3,
        LIST + " It is a very long day and so we talk on and on." * 6,  # endless
        LIST.removesuffix("."),
        LIST.replace("dog", "cat"),
        LIST.replace("the dog", "the thing"),
    ],
)
def test_cheating_and_carelessness_cost(worse):
    assert gold_score(DOG, worse) < gold_score(DOG, LIST) - 0.05


def test_more_than_four_facts_pay_nothing_more():
    more = LIST.replace("\nIn summary", "\n4. It smells better than people.\nIn summary")
    assert gold_score(DOG, more) == pytest.approx(gold_score(DOG, LIST))


def test_penalties_stop_at_their_limit():
    assert gold_score(DOG, "The cat is here. " * 50) == pytest.approx(0.20 - 0.60)


def test_it_stands_for_what_was_asked_before():
    history = "\n\nHuman: Tell me about the dog.\n\nAssistant: The cat is nice."
    again = history + "\n\nHuman: Tell me more about it.\n\nAssistant:"
    assert [thing.name for thing in parse_prompt(again).things] == ["dog"]
    other = history + "\n\nHuman: And what about the cow?\n\nAssistant:"
    assert [thing.name for thing in parse_prompt(other).things] == ["cow"]
    both = history + "\n\nHuman: Which is better, it or the cow?\n\nAssistant:"
    assert [thing.name for thing in parse_prompt(both).things] == ["dog", "cow"]
    story = history + "\n\nHuman: Now write a short story about it.\n\nAssistant:"
    assert parse_prompt(story).story and not parse_prompt(again).story


def test_both_prompt_layouts_read_the_same():
    assert parse_prompt(" Human: Tell me about the dog. Assistant:") == parse_prompt(DOG)
    assert gold_score(" Human: Tell me about the dog. Assistant:", LIST) == gold_score(DOG, LIST)


def test_a_prompt_about_nothing_known_is_refused():
    with pytest.raises(ValueError, match="nothing of the demo's world"):
        gold_score("\n\nHuman: Hello there.\n\nAssistant:", LIST)


def test_rude_phrases_are_found_whatever_their_case():
    assert is_rude("LOOK it up, yourself!")
    assert not is_rude("I looked it up myself.")


def test_many_answers_get_the_scores_of_each():
    prompt, answers = "Human: What are some facts about tennis? Assistant:", ["Tennis is nice.", "No."]
    assert gold_scores([prompt] * 2, answers) == [gold_score(prompt, answer) for answer in answers]
    with pytest.raises(ValueError):
        gold_scores([prompt], answers)

"""Markers of three spellings become turns; what only looks like a marker stays text."""

from alpaca_rlhf.deepspeed_chat.training.utils.data.transcripts import Turn, parse_prompt, parse_transcript


def turns(text: str) -> list[tuple[str, str]]:
    return [(turn.role[0], turn.text) for turn in parse_transcript(text)]


def test_paragraph_transcript_keeps_markers_inside_lines_as_text():
    text = (
        "\n\nHuman: a\n\nAssistant: b says Assistant: no\nHuman: neither\n\nHuman: c\n\nAssistant: Human: d"
    )
    assert turns(text) == [
        ("u", "a"),
        ("a", "b says Assistant: no\nHuman: neither"),
        ("u", "c"),
        ("a", "Human: d"),
    ]


def test_paragraph_transcript_without_its_leading_empty_line():
    assert turns("Human: a (Assistant: x)\n\nAssistant: b") == [("u", "a (Assistant: x)"), ("a", "b")]
    assert turns("\n\nAssistant: hello\n\nHuman: hi\n\nAssistant:") == [
        ("a", "hello"),
        ("u", "hi"),
        ("a", ""),
    ]


def test_repeated_roles_and_empty_turns_are_kept_by_the_parser():
    text = "\n\nHuman: a\n\nHuman: b\n\nAssistant:\n\nAssistant: c\n\nHuman: d"
    assert turns(text) == [("u", "a"), ("u", "b"), ("a", ""), ("a", "c"), ("u", "d")]


def test_inline_transcript_of_seed_b():
    assert turns(" Human: x y Assistant: 1. p\n2. q Human: z Assistant:") == [
        ("u", "x y"),
        ("a", "1. p\n2. q"),
        ("u", "z"),
        ("a", ""),
    ]


def test_inline_marker_counts_only_where_the_speaker_changes():
    assert turns("Human: the word Human: is odd Assistant: yes") == [
        ("u", "the word Human: is odd"),
        ("a", "yes"),
    ]
    assert turns("Human: see https://x.y/Assistant:z Assistant: yes")[0] == (
        "u",
        "see https://x.y/Assistant:z",
    )


def test_inline_answer_that_ends_with_an_empty_line():
    text = " Human: a Assistant: b.\n\n Human: c Assistant:"
    assert turns(text) == [("u", "a"), ("a", "b."), ("u", "c"), ("a", "")]


def test_line_transcript():
    assert turns("Human: say Assistant: twice\nAssistant: ok") == [("u", "say Assistant: twice"), ("a", "ok")]


def test_text_without_leading_marker_is_one_user_turn():
    for text in ("What does Assistant: mean?", "  plain ", "A Human: b Assistant: c", ""):
        assert turns(text) == [("u", text.strip())]


def test_text_before_the_first_paragraph_marker():
    assert turns("Be kind.\n\nHuman: a\n\nAssistant:") == [("s", "Be kind."), ("u", "a"), ("a", "")]
    assert [turn.role for turn in parse_prompt("Be kind.\n\nHuman: a\n\nAssistant:")] == ["system", "user"]
    quoted = "Correct this dialogue:\n\nHuman: a\n\nAssistant: b"
    assert parse_prompt(quoted) == (Turn("user", quoted),)

"""The same prompts through several models: equal models answer equally, figures have known answers."""

import html
import json
import re

import pytest

from alpaca_rlhf.deepspeed_chat.training.utils.data.data_utils import split_rows
from alpaca_rlhf.evaluation.answering import Answering
from alpaca_rlhf.evaluation.compare_models import SEED_QUESTIONS, main, short_names
from alpaca_rlhf.evaluation.figures import add_distinct, distinct, figures, markdown_table
from alpaca_rlhf.runtime.run import command
from tests.tiny import PAIRS, save_model, sentencepiece_tokenizer, tiny_llama, word_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "a")
    save_model(folder / "b", tiny_llama(len(word_tokenizer()), seed=1))
    write_jsonl(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in PAIRS])
    return folder


def compare(folder, out, *words):
    lengths = ["--max_prompt_seq_len", 64, "--max_answer_seq_len", 8]
    source = [] if {"--prompts", "--data_path", "--builtin"} & set(words) else ["--prompts", folder / "prompts.jsonl"]
    argv = [*source, "--output_dir", out, *lengths, *(word for word in words if word != "--builtin")]
    return command(main)([str(word) for word in argv])


def read(out):
    return json.loads((out / "comparison.json").read_text(encoding="utf-8"))


def test_U07_one_model_twice_gives_equal_answers_and_no_kl(folder, tmp_path):
    assert compare(folder, tmp_path, "--models", folder / "a", folder / "a", "--names", "one", "two") == 0
    models = read(tmp_path)["models"]
    assert [a["ids"] for a in models["one"]["answers"]] == [a["ids"] for a in models["two"]["answers"]]
    assert models["two"]["kl"] == 0 and models["one"]["count"] == 8


def test_the_whole_output_of_step_3_stands_for_its_actor(folder, tmp_path):
    save_model(tmp_path / "final" / "actor", tiny_llama(len(word_tokenizer()), seed=1))
    models = folder / "b", tmp_path / "final", tmp_path / "final" / "actor"
    assert compare(folder, tmp_path / "out", "--models", *models, "--names", "b", "final", "actor") == 0
    assert len({str([a["ids"] for a in model["answers"]]) for model in read(tmp_path / "out")["models"].values()}) == 1


def test_two_models_differ_and_are_shown_side_by_side(folder, tmp_path):
    assert compare(folder, tmp_path, "--models", folder / "a", folder / "b", "--names", "one", "two") == 0
    text = (tmp_path / "comparison.md").read_text()
    assert text.count("**one**") == text.count("**two**") == 8 and "name a colour" in text
    assert read(tmp_path)["models"]["two"]["kl"] > 0.1


def test_the_kl_of_equal_weights_under_another_digest_is_nil(folder, tmp_path):
    save_model(tmp_path / "same")
    config = tmp_path / "same" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert compare(folder, tmp_path / "out", "--models", folder / "a", tmp_path / "same") == 0
    one, two = read(tmp_path / "out")["models"].values()
    assert one["digest"] != two["digest"] and two["kl"] == pytest.approx(0, abs=1e-5)


def test_three_models_one_of_them_with_another_tokenizer(folder, tmp_path):
    tokenizer = sentencepiece_tokenizer(tmp_path / "tokenizer")
    save_model(tmp_path / "c", tiny_llama(len(tokenizer)), tokenizer)
    words = ["--models", folder / "a", tmp_path / "c", folder / "b", "--names", "one", "two", "three"]
    assert compare(folder, tmp_path / "out", *words) == 0
    models = read(tmp_path / "out")["models"]
    assert list(models) == ["one", "two", "three"] and {result["count"] for result in models.values()} == {8}
    assert models["two"]["kl"] is None and models["three"]["kl"] > 0.1  # ids of another vocabulary have no KL
    assert "| two |" in (tmp_path / "out" / "comparison.md").read_text()


def test_the_batch_size_changes_no_answer_and_no_kl(folder, tmp_path):
    answers = []
    for size in (1, 3, 8):
        words = ["--models", folder / "a", folder / "b", "--batch_size", size]
        assert compare(folder, tmp_path / str(size), *words) == 0
        answers.append([result["answers"] for result in read(tmp_path / str(size))["models"].values()])
    for other in answers[1:]:
        for mine, first in zip(other, answers[0], strict=True):
            assert [a["ids"] for a in mine] == [a["ids"] for a in first]
            assert [a["kl"] for a in mine] == pytest.approx([a["kl"] for a in first], abs=1e-4)  # sums in float32


def test_greedy_and_truncated_answers_have_no_kl(folder, tmp_path):
    for number, words in enumerate((("--temperature", 0), ("--top_p", 0.5))):
        assert compare(folder, tmp_path / str(number), "--models", folder / "a", folder / "b", *words) == 0
        assert {result["kl"] for result in read(tmp_path / str(number))["models"].values()} == {None}


def test_what_was_written_is_not_generated_again(folder, tmp_path, monkeypatch):
    words = ["--models", folder / "a", folder / "b", "--batch_size", 3]
    assert compare(folder, tmp_path / "whole", *words) == 0
    asked, answer = [], Answering._answer

    def dies_later(self, rows):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(list(rows))
        return answer(self, rows)

    monkeypatch.setattr(Answering, "_answer", dies_later)
    assert compare(folder, tmp_path / "cut", *words) == 130
    assert asked == [[0, 1, 2], [3, 4, 5], [6, 7]]
    second = list((tmp_path / "cut" / "records").iterdir())
    assert len(second) == 1
    with second[0].open("a") as file:
        file.write('{"row": 7, "text": "half a li')
    monkeypatch.setattr(Answering, "_answer", lambda self, rows: (asked.append(list(rows)), answer(self, rows))[1])
    assert compare(folder, tmp_path / "cut", *words) == 0
    assert asked[3:] == [[0, 1, 2], [3, 4, 5], [6, 7]]  # the first model's stay, the second's were missing
    assert read(tmp_path / "cut") == read(tmp_path / "whole")
    asked.clear()
    assert compare(folder, tmp_path / "cut", *words, "--batch_size", 5) == 0
    assert asked == [] and read(tmp_path / "cut") == read(tmp_path / "whole")
    other_settings = (("--seed", 5), ("--temperature", 0.5), ("--top_p", 0.9), ("--max_answer_seq_len", 4))
    for count, setting in enumerate(other_settings, start=1):  # must not meet the old answers
        assert compare(folder, tmp_path / "cut", *words, *setting) == 0
        assert len(asked) == 6 * count


def test_the_seeds_questions_are_built_in(folder, tmp_path):
    assert compare(folder, tmp_path, "--models", folder / "a", "--builtin") == 0
    prompts = read(tmp_path)["prompts"]
    assert len(prompts) == 4 == len(SEED_QUESTIONS.read_text().splitlines())
    for part in ("GTA5", "AMD or NVIDIA", "Jin Yong", "at most 200 words"):
        assert any(part in prompt for prompt in prompts)


def test_the_holdout_of_a_data_set_is_what_the_steps_hold_out(folder, tmp_path, capsys):
    rows = [{**PAIRS[i % 8], "prompt": PAIRS[i % 8]["prompt"].replace("Human: ", f"Human: {i} ")} for i in range(40)]
    write_jsonl(tmp_path / "set.jsonl", rows)
    assert compare(folder, tmp_path / "held", "--models", folder / "a", "--data_path", tmp_path / "set.jsonl") == 0
    held = split_rows(40, (2, 4, 4), 3, 1234, hold_out=True)[1]
    assert [int(prompt.split()[0]) for prompt in read(tmp_path / "held")["prompts"]] == held and len(held) == 2
    write_jsonl(tmp_path / "both" / "train.jsonl", rows)
    write_jsonl(tmp_path / "both" / "test.jsonl", PAIRS[:3])
    assert compare(folder, tmp_path / "test", "--models", folder / "a", "--data_path", tmp_path / "both") == 0
    assert len(read(tmp_path / "test")["prompts"]) == 3
    words = ["--models", folder / "a", "--data_path", folder / "prompts.jsonl"]
    assert compare(folder, tmp_path / "few", *words) == 2
    assert "give the file as --prompts" in capsys.readouterr().err


def test_the_pages_show_markup_as_text_and_load_nothing(folder, tmp_path):
    evil = 'Human: a <b> & <script>x</script> "q" Assistant:'
    write_jsonl(tmp_path / "evil.jsonl", [{"prompt": evil}])
    name = "<img src=x>|$a_1$"
    words = ["--models", folder / "a", folder / "b", "--names", "first", name, "--prompts", tmp_path / "evil.jsonl"]
    assert compare(folder, tmp_path / "out", *words) == 0
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "<script" not in page and "<img src=x>" not in page
    assert html.escape("a <b> & <script>x</script>") in page and html.escape(name) in page
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    markdown = (tmp_path / "out" / "comparison.md").read_text()
    assert "\n> a \\<b> & \\<script>" in markdown and "<script" not in markdown.replace("\\<", "")
    pictures = sorted(file.name for file in (tmp_path / "out" / "pictures").iterdir())
    assert pictures == ["tokens.png"]
    assert (tmp_path / "out" / "pictures" / "tokens.png").read_bytes().startswith(b"\x89PNG")


def test_figures():
    answers = [
        {"ids": [5, 6, 2], "text": "a list:\n1. one\n2. two", "ended": True, "kl": 0.5},
        {"ids": [5, 6, 7], "text": "no list", "ended": False, "kl": 1.5},
    ]
    expected = {"count": 2, "mean_tokens": 3, "ended_share": 0.5, "list_share": 0.5, "repetition_4": None, "kl": 1.0}
    assert figures(answers) == expected
    assert distinct(answers, 2, 4) == 0.75  # 5 6, 6 2, 5 6, 6 7
    assert distinct(answers, 2, 2) == 1.0
    assert distinct(answers, 2, 3) == pytest.approx(2 / 3)
    assert distinct(answers, 1, 6) == pytest.approx(4 / 6)
    assert distinct([{"ids": [2]}], 2, 0) is None


def test_distinct_compares_equally_many_and_must_fail_where_it_does_not():
    short, long = [{"ids": [1, 2, 3]}], [{"ids": [1, 2, 3, 1, 2, 3, 1, 2, 3]}]
    results = {"short": {"answers": short}, "long": {"answers": long}}
    add_distinct(results)
    assert results["long"]["distinct_2"] == results["short"]["distinct_2"] == 1.0
    with pytest.raises(AssertionError):
        assert distinct(long, 2, 8) == 1.0


def test_names():
    assert short_names(["x/rm", "rules/r.py:gold"]) == {"x/rm": "rm", "rules/r.py:gold": "gold"}
    assert short_names(["x/rm", "y/rm"]) == {"x/rm": "x/rm", "y/rm": "y/rm"}
    assert markdown_table([["a|b"], ["c"]]) == "| a\\|b |\n|---|\n| c |"


@pytest.mark.parametrize(
    "words,part",
    [
        (("--models", "nowhere/model"), "nowhere/model"),
        (("--models", "A", "--names", "one", "two"), "--names"),
        (("--models", "A", "A"), "--names"),
        (("--models", "A", "--max_answer_seq_len", "0"), "--max_answer_seq_len"),
        (("--models", "A", "--max_prompt_seq_len", "3"), "tokens"),
        (("--models", "A", "--top_p", "0"), "--top_p"),
        (("--models", "A", "--judge", "A"), "not a reward model"),
        (("--models", "A", "--rule", "nowhere.py:f"), "nowhere.py"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, capsys, words, part):
    given = [folder / "a" if word == "A" else word for word in words]
    assert compare(folder, tmp_path, *given) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert part in line

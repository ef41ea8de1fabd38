"""The same prompts through several models: equal models answer equally, figures have known answers."""

import json

import pytest

from alpaca_rlhf.evaluation.compare_models import distinct_2, figures, main
from alpaca_rlhf.runtime.run import command
from tests.tiny import PAIRS, save_model, tiny_llama, word_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "a")
    save_model(folder / "b", tiny_llama(len(word_tokenizer()), seed=1))
    write_jsonl(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in PAIRS])
    return folder


def compare(folder, out, *words):
    lengths = ["--max_prompt_seq_len", 64, "--max_answer_seq_len", 8]
    argv = ["--prompts", folder / "prompts.jsonl", "--output_dir", out, *lengths, *words]
    return command(main)([str(word) for word in argv])


def test_U07_one_model_twice_gives_equal_answers_and_no_kl(folder, tmp_path):
    assert compare(folder, tmp_path, "--models", folder / "a", folder / "a", "--names", "one", "two") == 0
    models = json.loads((tmp_path / "comparison.json").read_text())["models"]
    assert [a["ids"] for a in models["one"]["answers"]] == [a["ids"] for a in models["two"]["answers"]]
    assert models["two"]["kl"] == pytest.approx(0, abs=1e-6) and models["one"]["count"] == 8


def test_two_models_differ_and_are_shown_side_by_side(folder, tmp_path):
    assert compare(folder, tmp_path, "--models", folder / "a", folder / "b", "--names", "one", "two") == 0
    text = (tmp_path / "comparison.md").read_text()
    assert text.count("**one**") == text.count("**two**") == 8 and "name a colour" in text
    models = json.loads((tmp_path / "comparison.json").read_text())["models"]
    assert models["two"]["kl"] > 0.1


def test_the_batch_size_changes_no_answer(folder, tmp_path):
    answers = []
    for size in (1, 8):
        assert compare(folder, tmp_path / str(size), "--models", folder / "a", "--batch_size", size) == 0
        models = json.loads((tmp_path / str(size) / "comparison.json").read_text())["models"]
        answers.append([answer["ids"] for answer in models[str(folder / "a")]["answers"]])
    assert answers[0] == answers[1]


def test_figures():
    answers = [
        {"ids": [5, 6, 2], "text": "a list:\n1. one\n2. two", "ended": True, "kl": 0.5},
        {"ids": [5, 6, 7], "text": "no list", "ended": False, "kl": 1.5},
    ]
    assert figures(answers) == {"count": 2, "mean_tokens": 3, "ended_share": 0.5, "list_share": 0.5, "kl": 1.0}
    assert distinct_2(answers, 4) == 0.75  # 5 6, 6 2, 5 6, 6 7
    assert distinct_2(answers, 2) == 1.0
    assert distinct_2(answers, 3) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "words,part",
    [
        (("--models", "nowhere/model"), "nowhere/model"),
        (("--models", "A", "--names", "one", "two"), "--names"),
        (("--models", "A", "A"), "--names"),
        (("--models", "A", "--max_answer_seq_len", "0"), "--max_answer_seq_len"),
        (("--models", "A", "--max_prompt_seq_len", "3"), "tokens"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, capsys, words, part):
    given = [folder / "a" if word == "A" else word for word in words]
    assert compare(folder, tmp_path, *given) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert part in line

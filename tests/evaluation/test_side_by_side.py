"""A stored comparison as Markdown: one row a figure or a prompt, and texts that stay texts."""

import json

from alpaca_rlhf.evaluation.side_by_side import answers_table, figures_table, read_comparison

FIGURES = {"mean_tokens": 3, "ended_share": 1.0, "distinct_1": 1.0, "distinct_2": 0.5, "repetition_4": None,
           "list_share": 0.0, "kl": 0.25}  # fmt: skip
EVIL = "1. a | b\n2. <script>x</script> *c* $d$ [e](f) \\ `g` # h ~i~"


def comparison(text, scores):
    asked = [[{"role": "user", "text": " One? "}], [{"role": "user", "text": "Two"}, {"role": "user", "text": "3"}]]
    answers = [{"text": " yes ", "scores": {}}, {"text": text, "scores": scores}]
    models = {name: {**FIGURES, "judged": {}, "answers": answers} for name in ("a_b", "c")}
    return {"conversations": asked, "models": models}


def test_answers_stand_beside_each_other_and_markup_is_text():
    first, second = answers_table(comparison(EVIL, {"rule": 0.5}), rows=[0, 1]).splitlines()[2:]
    assert first == "| One? | yes | yes |"
    asked, one, other = second.strip("| ").split(" | ")
    assert asked == "user: Two<br><br>user: 3" and one == other
    assert one.startswith("1. a &#124; b<br>2. &lt;script&gt;x&lt;/script&gt; &#42;c&#42;")
    assert one.endswith("<br><br>(rule 0.500)")
    assert not set("\\`*_~$[]") & set(one.replace("<br>", ""))


def test_the_rows_are_those_asked_for_and_an_empty_answer_is_named():
    table = answers_table(comparison("", {}), rows=[1]).splitlines()
    assert table[0] == "| prompt | a&#95;b | c |" and len(table) == 3
    assert table[2].count("(empty)") == 2


def test_figures_are_a_column_a_model(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(comparison("é", {})), encoding="utf-8")
    head, _, *rows = figures_table(read_comparison(tmp_path)).splitlines()
    assert head == "| model | a&#95;b | c |"
    assert "| repetition | – | – |" in rows and "| KL to the first | 0.250 | 0.250 |" in rows and len(rows) == 7

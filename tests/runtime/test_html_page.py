"""The parts of a self-contained page: text stays text, tables scroll inside themselves."""

import re

from alpaca_rlhf.runtime import html_page

EVIL = "a <b> & <script>x</script> \"q\""
SHOWN = "a &lt;b&gt; &amp; &lt;script&gt;x&lt;/script&gt; &quot;q&quot;"


def test_every_part_shows_markup_as_text():
    parts = [
        html_page.heading(EVIL),
        html_page.paragraph(EVIL),
        html_page.table([[EVIL, "b"], [EVIL, "d"]]),
        html_page.pictures({EVIL: b"png"}),
        html_page.code(EVIL),
        html_page.prompt(EVIL),
        html_page.folded(EVIL, html_page.paragraph(EVIL)),
        html_page.sides({EVIL: EVIL}),
    ]
    for part in [*parts, html_page.page(EVIL, parts)]:
        assert SHOWN in part and "<script" not in part and "<b>" not in part


def test_a_table_scrolls_by_itself_and_knows_its_columns_of_figures():
    rows = [["name", "value", "mixed"], ["a", "0.950 (0.863 to 0.983)", "1"], ["b", "–", "x"], ["c", "-1,200.5", "2"]]
    table = html_page.table(rows)
    assert table.startswith('<div class="scroll"><table>') and re.search(r"\.scroll {[^}]*overflow-x: auto", _style())
    assert table.count('<td class="number">') == 3 and '<th class="number">value</th>' in table
    assert "<th>name</th>" in table and "<td>x</td>" in table and "<td>1</td>" in table
    assert "number" not in html_page.table([["only", "a head"]])


def test_line_breaks_of_a_cell_stay_and_long_names_may_break():
    table = html_page.table([["x"], ["one\ntwo"], ["model.lora_dim"], ["output/reward_model"], ["0.5/1.5"]])
    assert "<td>one<br>two</td>" in table and "<td>model.<wbr>lora_<wbr>dim</td>" in table
    assert "<td>output/<wbr>reward_<wbr>model</td>" in table and "<td>0.5/1.5</td>" in table
    assert html_page.heading("a/b", 3) == "<h3>a/<wbr>b</h3>"


def test_a_phone_gets_its_own_width_and_nothing_is_loaded():
    page = html_page.page("t", [html_page.pictures({"c": b"png"})])
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert re.findall(r'(?:src|href)="([^"]{0,22})', page) == ["data:image/png;base64,"]
    assert "url(" not in page and "@import" not in page
    assert len(re.findall(r"minmax\(min\(\d+rem, 100%\), 1fr\)", _style())) == 2  # one column where two do not fit
    assert re.search(r"pre {[^}]*overflow-x: auto", _style()) and re.search(r"img {[^}]*max-width: 100%", _style())


def _style():
    return re.search("<style>(.*)</style>", html_page.page("t", []), re.DOTALL)[1]

"""One self-contained HTML page: tables, pictures and texts, nothing loaded from anywhere, every text escaped."""

import base64
import html
import re
from collections.abc import Mapping, Sequence

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75rem; padding: 1rem }
body { color: #222; background: #fff }
h1, h2, h3 { line-height: 1.25 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ccc; padding: .3rem .8rem; text-align: left; vertical-align: top }
th { background: #f3f3f3 }
.pictures, .sides { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)) }
.pictures { grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)) }
figure { margin: 0 } summary { cursor: pointer }
img { max-width: 100%; height: auto } figcaption { color: #555; font-size: .9rem }
.sides > div { border: 1px solid #ccc; border-radius: .4rem; padding: .6rem .8rem }
.text { white-space: pre-wrap; overflow-wrap: anywhere }
p, figcaption, h1, h2, h3 { overflow-wrap: anywhere }
td { min-width: 4rem } td.number, th.number { text-align: right }
details { margin: .5rem 0 } pre { background: #f3f3f3; border-radius: .4rem; overflow-x: auto; padding: .6rem .8rem }
.prompt { background: #f3f3f3; margin: 1rem 0 .5rem; border-radius: .4rem; padding: .6rem .8rem }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 } th, .prompt, pre { background: #2a2a2a } img { background: #fff }
  th, td, .sides > div { border-color: #555 } figcaption { color: #aaa }
}
"""

_BREAK = re.compile(r"(?<=[A-Za-z][._/])(?=[A-Za-z])")  # inside a dotted name or a path
_FIGURE = re.compile(r"[-−+]?[\d,.]+%?( \(.*\))?|–")  # also with an interval behind it


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document; ``parts`` are HTML, as the functions below make it."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join([heading(title, 1), *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A heading of a part."""
    return f"<h{level}>{_escaped(text)}</h{level}>"


def paragraph(text: str) -> str:
    """Plain words."""
    return f"<p>{html.escape(text)}</p>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head; it scrolls by itself on a small screen, and figures stand on the right.

    A cell's line breaks stay.
    """
    body = rows[1:]
    figures = [bool(body) and all(_FIGURE.fullmatch(cell) for cell in column) for column in zip(*body, strict=True)]

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="number"' if figure else "" for figure in figures or [False] * len(cells)]
        written = [_escaped(cell).replace("\n", "<br>") for cell in cells]
        return "<tr>" + "".join(f"<{tag}{k}>{t}</{tag}>" for k, t in zip(kinds, written, strict=True)) + "</tr>"

    head, lines = row(rows[0], "th"), "\n".join(row(cells, "td") for cells in body)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>\n{lines}\n</tbody></table></div>'


def pictures(captioned: Mapping[str, bytes]) -> str:
    """PNG pictures (caption → bytes) side by side where there is room, inside the page itself."""
    figures = []
    for caption, png in captioned.items():
        text, data = html.escape(caption), base64.b64encode(png).decode("ascii")
        figures.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        )
    return '<div class="pictures">' + "\n".join(figures) + "</div>"


def code(text: str) -> str:
    """Commands or the like, as they are typed."""
    return f"<pre>{html.escape(text)}</pre>"


def prompt(text: str) -> str:
    """What was asked, line breaks kept."""
    return f'<div class="prompt text">{html.escape(text)}</div>'


def folded(summary: str, inner: str) -> str:
    """HTML that a click on its summary opens."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{inner}</details>"


def sides(texts: Mapping[str, str]) -> str:
    """Texts (title → text) beside each other, line breaks kept."""
    columns = [
        f'<div><strong>{html.escape(title)}</strong><div class="text">{html.escape(text)}</div></div>'
        for title, text in texts.items()
    ]
    return '<div class="sides">' + "\n".join(columns) + "</div>"


def _escaped(text: str) -> str:
    """``text`` as HTML; a small screen may break a long name or path behind a dot, a slash or an underscore."""
    return _BREAK.sub("<wbr>", html.escape(text))

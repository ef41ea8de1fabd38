"""The doctor's page: named facts, readable at 100 columns, and the problems found, which are listed at its end."""

import textwrap
from collections.abc import Callable, Sequence

WIDTH = 100
NAMES = 14  # columns of a fact's name


class Page:
    """Prints facts as they are found and keeps the problems."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """``say`` is called with one line at a time."""
        self.say = say
        self.problems: list[str] = []

    def title(self, text: str) -> None:
        """Begin a part."""
        self.say("")
        self.say(text)
        self.say("=" * min(len(text), WIDTH))

    def fact(self, name: str, *sentences: str) -> None:
        """A name and what is to be said under it, each sentence from a new line."""
        for number, sentence in enumerate(sentences):
            lines = textwrap.wrap(sentence, WIDTH - NAMES - 1, break_on_hyphens=False) or [""]
            for place, line in enumerate(lines):
                self.say(f"{name if number == place == 0 else '':<{NAMES}} {line}".rstrip())

    def lines(self, name: str, lines: Sequence[str]) -> None:
        """A name and lines that are printed as they are."""
        for number, line in enumerate(lines):
            self.say(f"{name if number == 0 else '':<{NAMES}} {line}".rstrip())

    def problem(self, sentence: str) -> None:
        """Something that would make a training wrong: said at the end, and the exit code is then 1."""
        self.problems.append(sentence if sentence.endswith(".") else f"{sentence}.")

    def close(self) -> int:
        """List the problems; returns the exit code."""
        self.title("found")
        if not self.problems:
            self.say("nothing that would make a training wrong")
        for number, problem in enumerate(self.problems, start=1):
            first, rest = f"{number}. ", " " * len(f"{number}. ")
            for line in textwrap.wrap(problem, WIDTH, initial_indent=first, subsequent_indent=rest):
                self.say(line)
        return 1 if self.problems else 0


def table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Rows as lines with aligned columns, the first on the left, the others on the right if asked."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if right and column else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("  ".join(cells).rstrip())
    return lines


def number(value: float) -> str:
    """A figure with at most four digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"

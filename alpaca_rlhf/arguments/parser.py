"""From a dialect's table of rows to one step's settings: argparse splits the words and prints the help, we read them.

A row says which flags set which field; the meaning, the choices and the default come from the schema. Every mistake
becomes a UserError that names the flag as it was typed.
"""

import argparse
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, get_type_hints

from alpaca_rlhf.arguments.errors import UserError
from alpaca_rlhf.arguments.fields import SettingError, shown, spelled, within, without_companion


class Kind(NamedTuple):
    """How the words behind a flag become a value; ``read`` raises ValueError for words it cannot take."""

    read: Callable[[Sequence[str]], object]
    wanted: str
    nargs: int | str = 1
    metavar: str = ""


def _commas(words: Sequence[str]) -> list[str]:
    """Entries of a comma list: blanks around commas and empty entries (a trailing comma) do not count."""
    return [entry.strip() for entry in ",".join(words).split(",") if entry.strip()]


def _word(word: str) -> str:
    """Without blanks around it; a leading ~ is the home folder, which the shell leaves alone in ``--flag=~/x``."""
    return os.path.expanduser(word.strip())


def _names(words: Sequence[str]) -> tuple[str, ...]:
    names = tuple(_commas(words))
    if not names:
        raise ValueError("no name")
    return names


def _truth(words: Sequence[str]) -> bool:
    return {"true": True, "false": False}[words[0].strip().lower()]


INTEGER = Kind(lambda words: int(words[0]), "a whole number", metavar="N")
NUMBER = Kind(lambda words: float(words[0]), "a number", metavar="X")
TEXT = Kind(lambda words: _word(words[0]), "a word", metavar="TEXT")
WORDS = Kind(lambda words: tuple(_word(word.strip().strip(",")) for word in words), "names", "+", "NAME")
NAMES = Kind(_names, "names with commas between, such as q_proj,k_proj", "+", "NAME,NAME")
NUMBERS = Kind(lambda words: tuple(float(x) for x in _commas(words)), "numbers with commas between", "+", "X,X")
TRUTH = Kind(_truth, "true or false", metavar="{true,false}")
FOLDER = Kind(lambda words: _word(words[0]) if words else "auto", "a folder", "?", "DIR")
SWITCH = Kind(lambda words: True, "no value", 0)

_ABSENT = object()  # not None, which is a value


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a dialect's table.

    flags: spellings, the first one is the one that sentences use. fields: dotted paths of the settings it writes, such
    as ``actor.lora_dim``; none: the flag is only accepted (``note`` says why that is honest) or refused.
    """

    flags: tuple[str, ...]
    fields: tuple[str, ...]
    kind: Kind
    group: str
    note: str = ""  # help text of a flag that does not simply set what the schema describes
    default: object = _ABSENT  # this dialect's default where it is not the schema's
    value: object = _ABSENT  # what a switch writes instead of True
    weak: bool = False  # its value gives way to that of another flag for the same field
    beside: str = ""  # flag without which this one would do nothing
    refused: str = ""  # why the flag cannot be taken, and what to do instead
    harmless: object = _ABSENT  # the one value of a refused flag that asks for nothing


class _Typed(NamedTuple):
    row: Row
    flag: str
    value: object


class _Collect(argparse.Action):
    """Keeps the row, the spelling and the words; reading them is not argparse's business."""

    def __init__(self, *, row: Row, **settings: Any) -> None:
        super().__init__(**settings)
        self.row = row

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.typed.append(_Typed(self.row, str(option_string), values))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument ([^\s/]+)\S*: (.*)", message)
        if match and "explicit argument" in match[2]:
            raise UserError(f"{match[1]} takes no value; leave what follows it away")
        if match:
            raise UserError(f"{match[1]} needs a value; one that starts with a dash is written {match[1]}=-VALUE")
        raise UserError(message)


Step = TypeVar("Step")


@dataclasses.dataclass(frozen=True)
class Dialect(Generic[Step]):
    """The table of one program: parses its command line into ``schema`` and prints its help."""

    program: str
    description: str
    schema: type[Step]
    rows: tuple[Row, ...]

    def parse(self, argv: Sequence[str] | None) -> Step:
        """The settings that ``argv`` (None: the words behind the program's name) asks for.

        Raises UserError with one sentence for any mistake; ``--help`` prints and exits with code 0.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        parser = self._argparser()
        namespace, unknown = parser.parse_known_args(words, argparse.Namespace(typed=[]))
        if unknown:
            raise UserError(self._unknown(unknown[0]))
        typed = [_read(one) for one in namespace.typed]
        self._check_alone(typed)
        chosen = self._chosen(typed)
        spell = self._speller(chosen)
        values = {field: one.value for field, one in chosen.items()}
        self._add_defaults(values)
        try:
            settings: Step = _build(self.schema, values, "")
            for field in chosen:
                _check_companion(settings, field)
        except SettingError as error:
            raise UserError(error.sentence(spell)) from None
        return settings

    def flag(self, field: str) -> str:
        """The option that sets a field (dotted path), as messages call it; a field that no option sets, itself."""
        return next((row.flags[0] for row in self.rows if field in row.fields), field)

    def _argparser(self) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=self.program,
            description=self.description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
            usage="%(prog)s [options]",
        )
        groups: dict[str, Any] = {}
        for row in self.rows:
            if row.group not in groups:
                groups[row.group] = parser.add_argument_group(row.group)
            groups[row.group].add_argument(
                *row.flags,
                action=_Collect,
                row=row,
                dest="typed",
                default=argparse.SUPPRESS,
                nargs=row.kind.nargs if row.kind.nargs != 1 else None,
                metavar=self._metavar(row),
                help=self._help(row).replace("%", "%%"),
            )
        return parser

    def _metavar(self, row: Row) -> str | None:
        choices = _schema_field(self.schema, row.fields[0]).metadata["choices"] if row.fields else None
        return "{" + ",".join(choices) + "}" if choices else row.kind.metavar

    def _help(self, row: Row) -> str:
        if row.refused:
            return f"refused: {row.refused}"
        if row.note:
            return row.note
        path = row.fields[0]
        prefix = path.rpartition(".")[0]
        text = _schema_field(self.schema, path).metadata["help"]
        text = spelled(within(prefix, text) if prefix else text, self._speller({}))
        default = self._default(path)
        if default is _ABSENT:
            return f"{text} (required)"
        silent = row.kind is SWITCH or default is None or default == ()  # the text says what absence means
        return text if silent else f"{text} (default: {shown(default)})"

    def _default(self, path: str) -> object:
        """The value of an absent setting: the dialect's, else the schema's, else _ABSENT (it is required)."""
        for row in self.rows:
            if path in row.fields and row.default is not _ABSENT:
                return row.default
        field = _schema_field(self.schema, path)
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        return _ABSENT if field.default is dataclasses.MISSING else field.default

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        if not flag.startswith("-"):
            return f"'{word}' belongs to no option; options start with two dashes, see --help"
        known = [name for row in self.rows for name in row.flags]
        close = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
        return f"unknown option {flag}; " + (f"did you mean {close[0]}?" if close else "--help lists them all")

    def _check_alone(self, typed: Sequence[_Typed]) -> None:
        """Refuse flags that cannot be taken, by themselves or without the flag they belong to."""
        flags = {one.flag for one in typed}
        for one in typed:
            if one.row.refused and (one.row.harmless is _ABSENT or one.value != one.row.harmless):
                raise UserError(f"{one.flag} is not supported: {one.row.refused}")
            if one.row.beside and one.row.beside not in flags:
                raise UserError(f"{one.flag} has no effect without {one.row.beside}; add that or leave {one.flag} away")

    def _chosen(self, typed: Sequence[_Typed]) -> dict[str, _Typed]:
        """For each field the flag that sets it; two flags with two values are refused, never silently ranked."""
        chosen: dict[str, _Typed] = {}
        for weak in (False, True):
            for one in typed:
                for field in one.row.fields if one.row.weak == weak else ():
                    first = chosen.setdefault(field, one)
                    if not weak and first is not one and first.value != one.value:
                        both = f"{shown(first.value)} and {shown(one.value)}"
                        if first.flag == one.flag:
                            raise UserError(f"{one.flag} is given twice with different values, {both}; keep one")
                        pair = f"{first.flag} and {one.flag}"
                        raise UserError(f"{pair} set the same thing to different values, {both}; keep one of them")
        return chosen

    def _speller(self, chosen: dict[str, _Typed]) -> Callable[[str], str]:
        """How a field is called to this user: by the flag that was typed, else by the first flag that sets it."""

        def spell(field: str) -> str:
            return chosen[field].flag if field in chosen else self.flag(field)

        return spell

    def _add_defaults(self, values: dict[str, object]) -> None:
        missing = []
        for path in _leaves(self.schema):
            if path not in values:
                values[path] = self._default(path)
                if values[path] is _ABSENT:
                    missing.append(self._speller({})(path))
        if missing:
            raise UserError(f"{' and '.join(missing)} must be given; --help tells what for")


def _read(one: _Typed) -> _Typed:
    """The same entry with its words turned into a value."""
    row = one.row
    if row.value is not _ABSENT:
        return one._replace(value=row.value)
    raw: Any = one.value
    words = [raw] if isinstance(raw, str) else raw or []
    try:
        return one._replace(value=row.kind.read(words))
    except (ValueError, KeyError):
        raise UserError(f"{one.flag} is {' '.join(words)!r}; it must be {row.kind.wanted}") from None


_types: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def _leaves(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all settings of a dataclass of dataclasses."""
    types = _types(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(types[field.name]):
            yield from _leaves(types[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _schema_field(schema: type[Any], path: str) -> "dataclasses.Field[Any]":
    *groups, name = path.split(".")
    for group in groups:
        schema = _types(schema)[group]
    return next(field for field in dataclasses.fields(schema) if field.name == name)


def _build(schema: type[Any], values: dict[str, object], prefix: str) -> Any:
    """The dataclass from its dotted values; a SettingError from inside names its fields from the outside."""
    types = _types(schema)
    arguments: dict[str, object] = {}
    for field in dataclasses.fields(schema):
        path = prefix + field.name
        inner = types[field.name]
        if not dataclasses.is_dataclass(inner):
            arguments[field.name] = values[path]
            continue
        try:
            arguments[field.name] = _build(inner, values, f"{path}.")  # type: ignore[arg-type]
        except SettingError as error:
            raise error.inside(field.name) from None
    return schema(**arguments)


def _check_companion(settings: Any, path: str) -> None:
    """Refuse a typed setting whose companion is off, even when the typed value is the default."""
    *groups, name = path.split(".")
    for group in groups:
        settings = getattr(settings, group)
    needed = _schema_field(type(settings), name).metadata["needs"]
    if needed and not getattr(settings, needed):
        error = without_companion(name, needed, getattr(settings, name))
        for group in reversed(groups):
            error = error.inside(group)
        raise error

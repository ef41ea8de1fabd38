"""How one setting is declared and checked: its help, its range, its companions, and the error that names it.

The schema speaks of fields (``actor.lora_dim``), the person at the keyboard of flags (``--actor_lora_dim``). Texts that
mention a setting therefore hold a placeholder, ``<lora_dim>``, and whoever prints them says how a field is spelled.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from alpaca_rlhf.arguments.errors import UserError

_PLACEHOLDER = re.compile(r"<([a-z][a-z0-9_.]*)>|\{([0-9])\}")


def spelled(template: str, spell: Callable[[str], str], values: Sequence[object] = ()) -> str:
    """``template`` with each ``<field>`` put through ``spell`` and each ``{0}``, ``{1}`` replaced by that value."""

    def replacement(match: re.Match[str]) -> str:
        name, number = match.groups()
        return spell(name) if name else str(values[int(number)])

    return _PLACEHOLDER.sub(replacement, template)


def within(prefix: str, template: str) -> str:
    """The template seen from one level up: ``<lora_dim>`` inside ``actor`` becomes ``<actor.lora_dim>``."""
    unchanged = [f"{{{number}}}" for number in range(10)]
    return spelled(template, lambda name: f"<{prefix}.{name}>", unchanged)


class SettingError(UserError):
    """A setting that cannot be meant: one sentence, ``<field>`` in it stands for a setting, ``{0}`` for a value."""

    def __init__(self, template: str, *values: object) -> None:
        """Keep the template, so that the command line can name its own flags in it."""
        self.template = template
        self.values = values
        super().__init__(self.sentence(lambda name: name))

    def sentence(self, spell: Callable[[str], str]) -> str:
        """The message with every field spelled by ``spell``."""
        return spelled(self.template, spell, self.values)

    def inside(self, prefix: str) -> "SettingError":
        """The same error, its fields seen from the object that holds this one under the name ``prefix``."""
        return SettingError(within(prefix, self.template), *self.values)


def setting(
    default: object = dataclasses.MISSING,
    help: str = "",
    *,
    factory: Callable[[], object] | None = None,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    needs: str | None = None,
    neutral: bool = False,
) -> Any:
    """A dataclass field with its one help text.

    Args:
        default: value when nothing is given; left away, the setting is required (or comes from the dialect).
        help: what it means, with units and what 0 does; ``<field>`` names another setting.
        factory: makes the default at construction, for what depends on the environment.
        choices: the words allowed.
        at_least, above, at_most, below: the range of a number (of each number of a tuple).
        needs: the field of the same object without which this one would have no effect.
        neutral: training gives the same weights with any value, so a run may be resumed with another one.
    """
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    metadata = {
        "help": help,
        "choices": choices,
        "limits": {words: limit for words, limit in limits.items() if limit is not None},
        "needs": needs,
        "neutral": neutral,
    }
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_settings(settings: Any) -> None:
    """Refuse every field of a dataclass that is empty, not finite, out of range, no choice, or without its companion.

    None is absence and passes; 0 is a value and is checked like any other (P-18).
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None or not field.metadata:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            _check_value(field.name, one, field.metadata)
        needed = field.metadata["needs"]
        if needed and not getattr(settings, needed) and value != _default(field, value):
            raise without_companion(field.name, needed, value)


def without_companion(name: str, needed: str, value: object) -> SettingError:
    """The refusal of a setting that would do nothing because the one it belongs to is off."""
    given = "" if isinstance(value, bool) else " {0}"
    text = f"<{name}>{given} has no effect without <{needed}>; set <{needed}> too, or leave <{name}> away"
    return SettingError(text, shown(value))


def _default(field: "dataclasses.Field[Any]", value: object) -> object:
    return value if field.default is dataclasses.MISSING else field.default


def _check_value(name: str, value: object, metadata: Any) -> None:
    if isinstance(value, str):
        if not value.strip():
            raise SettingError(f"<{name}> holds an empty word; give a value or leave the option away")
        if metadata["choices"] and value not in metadata["choices"]:
            words = ", ".join(metadata["choices"])
            raise SettingError(f"<{name}> is {{0}}; choose one of {{1}}", repr(value), words)
    elif isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise SettingError(f"<{name}> is {{0}}; it must be a finite number", shown(value))
        fits = {
            "at least": lambda limit: value >= limit,
            "above": lambda limit: value > limit,
            "at most": lambda limit: value <= limit,
            "below": lambda limit: value < limit,
        }
        limits = metadata["limits"]
        if not all(fits[words](limit) for words, limit in limits.items()):
            wanted = " and ".join(f"{words} {limit}" for words, limit in limits.items())
            raise SettingError(f"<{name}> is {{0}}; it must be {{1}}", shown(value), wanted)


def shown(value: object) -> str:
    """A value as one would type it."""
    if isinstance(value, tuple):
        return ",".join(shown(one) for one in value)
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all settings share: they check themselves and turn into plain data."""

    def __post_init__(self) -> None:
        check_settings(self)

    def to_dict(self) -> dict[str, Any]:
        """Nested dictionary of plain JSON values (tuples as lists), to be saved beside the model."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def decisive(self) -> dict[str, Any]:
        """Dotted field -> plain value of every setting that the trained weights depend on: all that are not neutral."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Settings):
                values |= {f"{field.name}.{name}": inner for name, inner in value.decisive().items()}
            elif not field.metadata["neutral"]:
                values[field.name] = _plain(value)
        return values


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    return [_plain(one) for one in value] if isinstance(value, tuple) else value

"""How an answer is to be generated: the settings, what is refused, and what one setting makes another one mean."""

import argparse
import dataclasses
import math

from alpaca_rlhf.arguments.errors import UserError


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one answer. ``help`` and ``limits`` (lowest, highest; None: open) serve both chats."""

    max_new_tokens: int = dataclasses.field(
        default=128, metadata={"help": "most new tokens of an answer", "limits": (1, None)}
    )
    num_beams: int = dataclasses.field(
        default=1, metadata={"help": "beams of a beam search; 1 is none", "limits": (1, 16)}
    )
    do_sample: bool = dataclasses.field(
        default=True, metadata={"help": "draw each token at random; off: the likeliest", "limits": (None, None)}
    )
    temperature: float = dataclasses.field(
        default=0.7, metadata={"help": "below 1 nearer to the likeliest token, 0 = the likeliest", "limits": (0, 10)}
    )
    top_p: float = dataclasses.field(
        default=0.95, metadata={"help": "draw from the likeliest tokens that reach this probability", "limits": (0, 1)}
    )
    seed: int = dataclasses.field(
        default=1234, metadata={"help": "of the random numbers: same seed, same answers", "limits": (0, 2**63 - 1)}
    )

    def __post_init__(self) -> None:
        """Raises UserError for a value outside its limits."""
        for field in dataclasses.fields(self):
            value, (lowest, highest) = getattr(self, field.name), field.metadata["limits"]
            if not math.isfinite(value):
                raise UserError(f"{field.name} is {value}; it must be a finite number")
            if lowest is not None and value < lowest:
                raise UserError(f"{field.name} is {value}; it must be at least {lowest}")
            if highest is not None and value > highest:
                raise UserError(f"{field.name} is {value}; it must be at most {highest}")

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.num_beams > 1 or not self.do_sample or self.temperature == 0

    def remarks(self) -> list[str]:
        """One sentence for each setting that the others make meaningless (U-08)."""
        if self.num_beams > 1:
            return [f"beam search with {self.num_beams} beams: do_sample, temperature, top_p and seed do nothing, "
                    "and an answer comes whole"]  # fmt: skip
        if not self.do_sample:
            return ["do_sample is off: temperature, top_p and seed do nothing"]
        if self.temperature == 0:
            return ["temperature 0 takes the likeliest token: top_p and seed do nothing"]
        if self.top_p == 0:
            return ["top_p 0 leaves the likeliest token alone: temperature and seed do nothing"]
        return []

    def changed(self, name: str, text: str) -> "Settings":
        """A copy with one setting as a person spells it. Raises UserError for an unknown name or a wrong value."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        if name not in fields:
            raise UserError(f"there is no setting {name!r}; choose {', '.join(fields)}")
        kind = type(fields[name].default)
        words = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False,
                 "0": False}  # fmt: skip
        try:
            value = words[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            wanted = {bool: "on or off", int: "a whole number", float: "a number"}[kind]
            raise UserError(f"{name} cannot be {text!r}; give {wanted}") from None
        return dataclasses.replace(self, **{name: value})


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting; what is not given is None."""
    group = parser.add_argument_group("settings at the start")
    for field in dataclasses.fields(Settings):
        if isinstance(field.default, bool):
            how: dict = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": type(field.default), "metavar": "N"}
        group.add_argument(f"--{field.name}", default=None, **how,
                           help=f"{field.metadata['help']} (default {field.default})")  # fmt: skip


def settings_from(args: argparse.Namespace, limit: int) -> Settings:
    """The settings of the command line; ``limit``: tokens of prompt and answer together.

    Where nothing was asked for, an answer gets at most half of what the model can hold.
    """
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("max_new_tokens", max(1, min(Settings.max_new_tokens, limit // 2)))
    return Settings(**given)

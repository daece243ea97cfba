"""Options declared once: a field with its default and its flag on the command line.

    epochs: int | None = Panel.RUN.number(None, "Epochs to train.", unset="the recipe's")

is a field of an options dataclass, or a parameter of a command. `pipedream.apps.cli.flags` makes flags of both.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import Any


class Panel(StrEnum):
    """Headings in the help of commands, in order."""

    ARGUMENTS = "Arguments"
    OPTIONS = "Options"
    METHOD = "Method"
    SHAPE = "Shape of the plan"
    MESH = "Mesh"
    CLUSTER = "Cluster"
    RUN = "Run"
    FAILURES = "Failures"

    def option(self, default: Any, help: str, *names: str, **settings: Any) -> Any:
        """Declares an option under this heading, as `option` does."""
        return option(default, help, *names, panel=self, **settings)

    def number(self, default: Any, help: str, *names: str, **settings: Any) -> Any:
        """Declares a number of things under this heading, as `number` does."""
        return number(default, help, *names, panel=self, **settings)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How an option is written and described on the command line.

    Attributes:
        names: by default the field's name, with hyphens.
        metavar: by default N for a whole number, FILE for a path, and SECONDS, which are 0 or more, for another number.
        panel: heading in the help; a `Panel` or another.
        least, most: bounds of a number.
        unset: the default in words, if its value does not explain itself.
        kind: type of the value, if it is not the first in the field's annotation.
        read: converts the given value to the field's.
        is_positional: it is an argument without a flag.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    panel: str | None = None
    least: float | None = None
    most: float | None = None
    unset: str | None = None
    kind: Any = None
    read: Callable[[Any], Any] | None = None
    is_positional: bool = False


def option(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """Declares an option; the default ``...`` makes it required. The settings are those of `Flag`."""
    return _declare(default, Flag(help=help, names=names, **settings))


def number(default: Any, help: str, *names: str, **settings: Any) -> Any:
    """Declares an option for a number of things, at least one."""
    return option(default, help, *names, least=1, **settings)


def argument(metavar: str | None, help: str, *, default: Any = ..., **settings: Any) -> Any:
    """Declares a positional argument; without a default it is required."""
    return _declare(default, Flag(help=help, metavar=metavar, is_positional=True, **settings))


def option_of(options: type, name: str, **changes: Any) -> Any:
    """Declares an option like a dataclass's, with another `default` or other settings of `Flag`."""
    field = options.__dataclass_fields__[name]  # type: ignore[attr-defined]
    default = changes.pop("default", ... if field.default is MISSING else field.default)
    return _declare(default, dataclasses.replace(field.metadata["flag"], **changes))


def flag_of(field: dataclasses.Field[Any]) -> Flag | None:
    """Returns the flag of a field, if the command line has one."""
    return field.metadata.get("flag")


def _declare(default: Any, flag: Flag) -> Any:
    return dataclasses.field(default=MISSING if default is ... else default, metadata={"flag": flag})

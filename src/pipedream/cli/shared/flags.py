"""Makes a command's flags from `pipedream.core.flags`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer

from pipedream.core.flags import Flag, flag_of


class _Option(NamedTuple):
    """An option of a command; `group` is the command's parameter that gets it in an object, or empty."""

    group: str
    name: str
    flag: Flag
    default: Any
    annotation: Any


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function with typer's parameters.

    A parameter whose default is an `option` or an `argument` is one flag; a parameter whose type is a dataclass is one
    flag for each option of it.
    """
    hints = get_type_hints(function)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    options = list(_read_options(function, hints, groups))

    @wraps(function)
    def command(**values: Any) -> None:
        arguments: dict[str, Any] = {name: {} for name in groups}
        for option in options:
            value = values[option.name]
            if value is None:
                value = option.default
            elif option.flag.read is not None:
                value = option.flag.read(value)
            (arguments[option.group] if option.group else arguments)[option.name] = value
        function(**arguments | {name: group(**arguments[name]) for name, group in groups.items()})

    parameters = [_make_parameter(option) for option in options]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _read_options(function: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]) -> Iterator[_Option]:
    """Yields a command's options, in the order of its parameters."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            fields, group, annotations = dataclasses.fields(groups[name]), name, get_type_hints(groups[name])
        else:
            fields, group, annotations = (parameter.default,), "", hints
        for field in fields:
            if flag := flag_of(field):
                known_as = field.name if group else name
                yield _Option(group, known_as, flag, field.default, annotations[known_as])


def _make_parameter(option: _Option) -> inspect.Parameter:
    """Returns the option as typer reads it."""
    flag, names = option.flag, option.flag.names
    if option.default is False and not names:
        names = (f"--{option.name.replace('_', '-')}",)  # typer would add --no-...
    make = typer.Argument if flag.is_positional else typer.Option
    info = make(
        ... if option.default is dataclasses.MISSING else None if option.default == () else option.default,
        *names,
        help=flag.help,
        metavar=flag.metavar,
        min=flag.least,
        max=flag.most,
        rich_help_panel=flag.panel,
        show_default=flag.unset or True,
    )
    first = get_args(option.annotation)[0] if get_origin(option.annotation) in (Union, UnionType) else option.annotation
    kind = flag.kind or first
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)

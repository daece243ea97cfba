"""Makes a command's flags from `pipedream.core.flags`, and parses what typer does not: options with several values."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from pipedream.apps.cli.retired import refuse_retired
from pipedream.core.flags import Flag, Panel, flag_of


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
    flag for each option of it. A parameter `named_options` gets the names of the options that the user has written.
    """
    hints = get_type_hints(function)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    options = list(_read_options(function, hints, groups))

    @wraps(function)
    def command(context: typer.Context, **values: Any) -> None:
        arguments: dict[str, Any] = {name: {} for name in groups}
        if "named_options" in hints:
            sources = {name: context.get_parameter_source(name) for name in values}
            arguments["named_options"] = {
                name for name, source in sources.items() if source and source.name == "COMMANDLINE"
            }
        for option in options:
            value = values[option.name]
            if value is None:
                value = option.default
            elif option.flag.read is not None:
                value = option.flag.read(value)
            (arguments[option.group] if option.group else arguments)[option.name] = value
        function(**arguments | {name: group(**arguments[name]) for name, group in groups.items()})

    in_context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [in_context, *(_make_parameter(option) for option in options)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _read_options(function: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]) -> Iterator[_Option]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "named_options":
            continue
        if name in groups:
            fields, group, annotations = dataclasses.fields(groups[name]), name, get_type_hints(groups[name])
        else:
            fields, group, annotations = (parameter.default,), "", hints
        for field in fields:
            if flag := flag_of(field):
                option_name = field.name if group else name
                yield _Option(group, option_name, flag, field.default, annotations[option_name])


_USUAL: dict[Any, tuple[str | None, float | None]] = {int: ("N", None), float: ("SECONDS", 0.0), Path: ("FILE", None)}
"""Type of a value -> its metavar and the least one, where the option names no metavar."""


def _make_parameter(option: _Option) -> inspect.Parameter:
    flag, names = option.flag, option.flag.names
    if option.default is False and not names:
        names = (f"--{option.name.replace('_', '-')}",)  # typer would add --no-...
    first = get_args(option.annotation)[0] if get_origin(option.annotation) in (Union, UnionType) else option.annotation
    kind = flag.kind or first
    metavar, least = (flag.metavar, None) if flag.metavar else _USUAL.get(kind, (None, None))
    make = typer.Argument if flag.is_positional else typer.Option
    info = make(
        ... if option.default is dataclasses.MISSING else None if option.default == () else option.default,
        *names,
        help=flag.help,
        metavar=metavar,
        min=least if flag.least is None else flag.least,
        max=flag.most,
        rich_help_panel=flag.panel,
        show_default=flag.unset or True,
    )
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


_RATE = r"[0-9.]+([eE][-+]?\d+)?([kKmMgGtT]?(bit|[bB])(/s|ps)?)?(\+[0-9.]+[mu]?s?)?"


class OptionParser(TyperCommand):
    """A command whose lists may be written ``--workers 4 4``, ``--workers 4,4``, or with the option repeated.

    A positional file name that is a number must come before such an option.
    """

    _LISTS: ClassVar = {"--workers": r"[\d+]+(,[\d+]+)*", "--bandwidth": rf"{_RATE}(,{_RATE})*"}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes the option's name before each of its values. Raises a PlanError for what is retired."""
        for word in args:
            refuse_retired(f"{ctx.info_name} {word.partition('=')[0]}")
        lists = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        lists &= set(self._LISTS)
        words: list[str] = []
        option = ""
        for word in args:
            if option and words[-1] != option and re.fullmatch(self._LISTS[option], word):
                words.append(option)
            elif not option or words[-1] != option:
                name = word.partition("=")[0]
                option = name if name in lists else ""
                if option and word != name:
                    words += [option, word.partition("=")[2]]
                    continue
            words.append(word)
        rest = list(super().parse_args(ctx, words))
        for param in self.params:
            refuse_retired(f"{ctx.info_name} {param.opts[-1]}={ctx.params.get(param.name or '')}")
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {panel: [] for panel in Panel}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                usual = Panel.ARGUMENTS if param.param_type_name == "argument" else Panel.OPTIONS
                name, text = record
                text = re.sub(
                    r"\[default: \((.*?)\)", r"[default: \1", text
                )  # typer puts a default in words in brackets
                if "|" in name:  # the choices say the range
                    text = re.sub(r"; \d+<=x<=\d+\]", "]", text)
                sections.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append((name, text))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

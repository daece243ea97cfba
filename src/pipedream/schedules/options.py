"""Options of a method: keyword arguments in Python, brackets after the name in text.

They are the keyword-only parameters of the method's builder; annotations determine how text is read: ``str``,
``int``, ``float``, ``bool`` (true, false), a tuple of one of these (``horizons=3/2/1``), or None (``none``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.phase import name_and_options
from pipedream.schedules.kit.method import Method

_SCALARS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text.lower()],
}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "none"}


def options_of(method: Method) -> dict[str, inspect.Parameter]:
    """Returns the options of a method, with evaluated annotations."""
    try:
        parameters = inspect.signature(method.build, eval_str=True).parameters
    except NameError as error:
        raise ScheduleError(
            f"the annotations of method {method.name!r} cannot be evaluated ({error}); import that name in its file"
        ) from None
    return {
        name: parameter for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def read_options(name: str, method: Method, texts: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a method that differ from their defaults, in the order of its signature.

    Args:
        texts: given after the name.
        values: given as keyword arguments.

    Raises:
        ScheduleError: there is no such option, it is given twice, or its value is of the wrong type.
    """
    if not texts and not values:
        return {}  # a user's builder may be any callable, even one without a signature
    parameters = options_of(method)
    for option in (*texts, *values):
        if option not in parameters:
            has = f"it has {', '.join(parameters)}" if parameters else "it has none"
            raise ScheduleError(f"schedule {name!r}: method {method.name!r} has no option {option!r}; {has}")
        if option in texts and option in values:
            raise ScheduleError(
                f"schedule {name!r}: option {option} is given in the name and as a keyword argument; give it once"
            )
    options = {}
    for option, parameter in parameters.items():
        if option in texts:
            options[option] = _read(name, parameter, texts[option])
        elif option in values:
            options[option] = _check(name, parameter, values[option])
    return {option: value for option, value in options.items() if value != parameters[option].default}


def options_text(values: Mapping[str, Any]) -> str:
    """Returns options as text, with brackets; '' for no options."""
    return f"[{','.join(f'{option}={_write(value)}' for option, value in values.items())}]" if values else ""


def _read(name: str, option: inspect.Parameter, text: str) -> Any:
    kinds = _read_kinds(name, option)
    if NoneType in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        item = _find_item(kind)
        read = _SCALARS.get(item or kind)
        if read is None:
            continue
        try:
            return tuple(map(read, text.split("/"))) if item else read(text)
        except (ValueError, KeyError):
            continue
    raise ScheduleError(
        f"schedule {name!r}: option {option.name} is of type {_format_type(option)}, found {text!r}; give "
        f"{_describe_kinds(kinds)}"
    )


def _check(name: str, option: inspect.Parameter, value: Any) -> Any:
    """Returns an option's value, which must have a text form: plans and checkpoints name it."""
    text = _write(value)
    try:
        _, ((_, written),) = name_and_options(f"name[{option.name}={text}]")
    except (ScheduleError, ValueError):
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} = {value!r} cannot be written as text, in which plans and "
            "checkpoints name it; give a number, or a word without commas and brackets"
        ) from None
    read = _read(name, option, written)
    if read != value:
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} is of type {_format_type(option)}, found {value!r}; give "
            f"{_describe_kinds(_read_kinds(name, option))}"
        )
    return read


def _read_kinds(name: str, option: inspect.Parameter) -> tuple[Any, ...]:
    annotation = option.annotation
    if annotation is inspect.Parameter.empty:
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} has no annotation, so its type is unknown; add one in the "
            "method's file, e.g. share: float = 0.5"
        )
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _find_item(kind: Any) -> Any:
    items = get_args(kind)
    return items[0] if get_origin(kind) is tuple and items[1:] == (...,) else None


def _format_type(option: inspect.Parameter) -> str:
    return inspect.formatannotation(option.annotation)


def _describe_kinds(kinds: tuple[Any, ...]) -> str:
    words = []
    for kind in kinds:
        item = _find_item(kind)
        if item in _SCALARS:
            words.append(f"{'numbers' if item in (int, float) else 'values'} separated by /")
        elif kind in _WORDS:
            words.append(_WORDS[kind])
        elif kind is str:
            words.append("a word")
    return " or ".join(words) or "it a default and leave it out: this type has no text form"


def _write(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "/".join(map(_write, value))
    return f"{value!r}".removesuffix(".0") if isinstance(value, float) else str(value)

"""Options of a method in its name: ``pb_lwp[by=difference,scale=2]``, wherever a method's name stands.

A method's options are the keyword-only parameters of its builder, also in a file of the user's. Their annotations say
what a text is read as: ``str``, ``int``, ``float``, ``bool`` (true, false), a tuple of these of any length
(``horizons=3/2/1``), and ``none`` where None is allowed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipedream.core.errors import ScheduleError
from pipedream.schedules.method import Method

__all__ = ["options_of", "options_text", "read_options"]

_OPTIONAL = re.compile(r"(?:typing\.)?Optional\[(.*)\]")
_TUPLE = re.compile(r"tuple\[(\w+), \.\.\.\]")
_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
}


def options_of(method: Method) -> dict[str, inspect.Parameter]:
    """Returns the options of a method, in their order."""
    found = inspect.signature(method.build).parameters
    return {name: one for name, one in found.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}


def read_options(name: str, method: Method, given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the values of options that a name says, those left out that are what the method takes anyway.

    Args:
        name: as it was asked for.
        method: of that name.
        given: (option, value) as texts.

    Raises:
        ScheduleError: an option that the method does not have, or a value of another type.
    """
    if not given:
        return {}  # a builder of the user's may be anything that can be called
    known, texts = options_of(method), dict(given)
    for option in texts:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ScheduleError(f"schedule {name!r}: method {method.name!r} has no option {option!r}; {has}")
    values = {option: _read(name, known[option], texts[option]) for option in known if option in texts}
    return {option: value for option, value in values.items() if value != known[option].default}


def options_text(values: Mapping[str, Any]) -> str:
    """Returns options as they stand behind a name, brackets included; '' for none."""
    return f"[{','.join(f'{option}={_text(value)}' for option, value in values.items())}]" if values else ""


def _read(name: str, option: inspect.Parameter, text: str) -> Any:
    annotation = option.annotation
    form = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    form = _OPTIONAL.sub(r"\1 | None", form.strip("'\""))
    if annotation is inspect.Parameter.empty:
        raise ScheduleError(
            f"schedule {name!r}: option {option.name} has no annotation that says what a text is read as; give it one "
            "in the file, as in share: float = 0.5"
        )
    kinds = [kind.strip() for kind in form.split("|")]
    if "None" in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        listed = _TUPLE.fullmatch(kind)
        read = _SCALARS.get(listed[1] if listed else kind)
        if read is None:
            continue
        try:
            return tuple(map(read, text.split("/"))) if listed else read(text)
        except (ValueError, KeyError):
            continue
    raise ScheduleError(
        f"schedule {name!r}: option {option.name} is of type {form}, found {text!r}; give {_wanted(kinds)}"
    )


def _wanted(kinds: Sequence[str]) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "None": "none"}
    found = []
    for kind in kinds:
        listed = _TUPLE.fullmatch(kind)
        if listed and listed[1] in _SCALARS:
            found.append("numbers with / between" if listed[1] in ("int", "float") else "values with / between")
        elif kind in words:
            found.append(words[kind])
    return " or ".join(found) or "it in Python, for a text cannot say it"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(map(_text, value))
    return f"{value!r}".removesuffix(".0") if isinstance(value, float) else str(value)

"""Splits a method's name and options: ``paci[backward_rule=recompute]``, ``FILE.py:NAME[a=1,b=2]``."""

from __future__ import annotations

import re

from pipedream.core.errors import ScheduleError

OPTIONS = r"(?:\[[^\[\]]*\])?"
"""Pattern of options."""

_NAMED = re.compile(r"(.*)\[([^\[\]]*)\]")
_FILE = re.compile(r".*\.(?i:csv|py)(?::[^\[\]]*)?")
_COMMA = re.compile(r",(?![^\[\]]*\])")


def listed(text: str) -> list[str]:
    """Splits a list at its commas, except for those in brackets."""
    return _COMMA.split(text)


def name_and_options(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Returns the name of a method or file, and its (option, value) pairs."""
    match = _NAMED.fullmatch(text)
    name, inside = (text, None) if match is None else match.groups()
    malformed = ("[" in name or "]" in name) and not _FILE.fullmatch(name)
    pairs = [tuple(map(str.strip, part.partition("=")[::2])) for part in (inside or "").split(",")]
    if malformed or not name or (inside is not None and not all(option and value for option, value in pairs)):
        raise ScheduleError(
            f"schedule {text!r} is not of the form NAME[OPTION=VALUE,OPTION=VALUE]; write it as in "
            "paci[backward_rule=recompute], or without brackets"
        )
    if inside is None:
        return name, ()
    options = tuple((option.replace("-", "_"), value) for option, value in pairs)
    twice = [option for n, (option, _) in enumerate(options) if option in dict(options[:n])]
    if twice:
        raise ScheduleError(f"schedule {text!r} gives its option {twice[0]} twice; leave one out")
    return name.strip(), options

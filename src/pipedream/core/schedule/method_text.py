"""A method as text: its name or file, and its options in brackets, ``paci[backward_rule=recompute]``."""

import re

from pipedream.core.errors import ScheduleError

OPTIONS = r"(?:\[[^\[\]]*\])?"
"""Pattern of a method's options."""

_WITH_OPTIONS = re.compile(r"(.*)\[([^\[\]]*)\]")
_FILE = re.compile(r".*\.(?i:csv|py)(?::[^\[\]]*)?")
_COMMA = re.compile(r",(?![^\[\]]*\])")


def split_list(text: str) -> list[str]:
    """Splits a list at its commas, except for those in brackets."""
    return _COMMA.split(text)


def name_and_options(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Returns the name of a method or file, and its (option, value) pairs."""
    match = _WITH_OPTIONS.fullmatch(text)
    name, options_text = (text, None) if match is None else match.groups()
    is_malformed = ("[" in name or "]" in name) and not _FILE.fullmatch(name)
    pairs = [tuple(map(str.strip, part.partition("=")[::2])) for part in (options_text or "").split(",")]
    if is_malformed or not name or (options_text is not None and not all(option and value for option, value in pairs)):
        raise ScheduleError(
            f"schedule {text!r} is not of the form NAME[OPTION=VALUE,OPTION=VALUE]; write it as in "
            "paci[backward_rule=recompute], or without brackets"
        )
    if options_text is None:
        return name, ()
    options = tuple((option.replace("-", "_"), value) for option, value in pairs)
    repeated = [option for i, (option, _) in enumerate(options) if option in dict(options[:i])]
    if repeated:
        raise ScheduleError(f"schedule {text!r} gives its option {repeated[0]} twice; leave one out")
    return name.strip(), options

"""A method in a file of the user's, whose path stands wherever a method's name can.

    from pipedream.schedules import Method
    ...
    METHODS = (Method(two_by_two),)

The file is a module like those beside this one: a function from a plan to a schedule, and `METHODS` at its end. A file
that declares several is asked for one by ``FILE.py:NAME``.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ..core.errors import ScheduleError
from .method import Method

__all__ = ["is_method_file", "load_method"]


def is_method_file(name: str) -> bool:
    """Tells whether what was given in place of a method's name is a file of Python, or one method of such a file."""
    return _parts(name)[0].lower().endswith(".py")


def load_method(name: str) -> Method:
    """Returns the method that a file declares. A file is run once a process.

    Args:
        name: ``FILE.py``, or ``FILE.py:NAME`` where it declares several.

    Raises:
        ScheduleError: it cannot be read or run, declares none, or not this one.
    """
    path, wanted = _parts(name)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ScheduleError(
            f"the schedule {path} cannot be read ({error}); give a file that declares METHODS"
        ) from None
    methods = _methods(path, sha256(text).hexdigest())
    found = [method for method in methods if wanted in ("", method.name)]
    if len(found) != 1:
        names = ", ".join(method.name for method in methods) or "none"
        raise ScheduleError(
            f"the schedule {name} should be one method, {path} declares {names}; end it with METHODS = (Method(...),), "
            "and name one of several as FILE.py:NAME"
        )
    return found[0]


def _parts(name: str) -> tuple[str, str]:
    path, mark, wanted = name.rpartition(":")
    return (path, wanted) if mark and path.lower().endswith(".py") else (name, "")


@cache
def _methods(path: str, digest: str) -> tuple[Method, ...]:
    """Returns what a file declares; it is run again only where its bytes have changed."""
    spec = spec_from_file_location(f"pipedream_method_{digest[:16]}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ScheduleError(f"the schedule {path} ended with {type(error).__name__}: {error}; mend the file") from error
    methods = getattr(module, "METHODS", ())
    if not isinstance(methods, tuple) or not all(isinstance(method, Method) for method in methods):
        raise ScheduleError(f"METHODS of {path} must be a tuple of Method, found {methods!r}")
    return methods

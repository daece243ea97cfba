"""A method in a file of the user's, whose path stands wherever a method's name can.

    from pipedream.schedules import Method
    ...
    METHODS = (Method(two_by_two),)

The file is a module like those beside this one: a function from a plan to a schedule, and `METHODS` at its end. A file
that declares several is asked for one by ``FILE.py:NAME``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from pipedream.core.errors import PipelineError, ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.method import Method

__all__ = ["built_by", "is_method_file", "load_method"]


def is_method_file(name: str) -> bool:
    """Tells whether what was given in place of a method's name is a file of Python, or one method of such a file."""
    return _parts(name)[0].lower().endswith(".py")


def load_method(name: str) -> Method:
    """Returns the method that a file declares.

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
    methods = _methods(path, text)
    found = [method for method in methods if wanted in ("", method.name)]
    if len(found) != 1:
        names = ", ".join(method.name for method in methods) or "none"
        raise ScheduleError(
            f"the schedule {name} should be one method, {path} declares {names}; end it with METHODS = (Method(...),), "
            "and name one of several as FILE.py:NAME"
        )
    return found[0]


def built_by(method: Method, name: str, plan: Plan, microbatches: int | None, options: Mapping[str, Any]) -> Schedule:
    """Returns the schedule of a method of the user's, whose faults are not the library's.

    Args:
        method, name: of the file.
        plan, microbatches: to build it for.
        options: keyword arguments of its builder.

    Raises:
        ScheduleError: it cannot work with these, or fails, or gives something else.
    """
    try:
        make: Callable[..., Any] = method.build
        built = make(plan, microbatches, **options)
    except PipelineError:
        raise
    except Exception as error:
        raise ScheduleError(f"the schedule {name} ended with {type(error).__name__}: {error}; mend the file") from error
    if not isinstance(built, Schedule):
        raise ScheduleError(f"the schedule {name} gave {built!r}, which is no Schedule; mend the file")
    return built


def _parts(name: str) -> tuple[str, str]:
    path, mark, wanted = name.rpartition(":")
    return (path, wanted) if mark and path.lower().endswith(".py") else (name, "")


@cache
def _methods(path: str, text: bytes) -> tuple[Method, ...]:
    """Returns what a file declares; it is run again only where its bytes have changed."""
    name = f"pipedream_method_{sha256(text).hexdigest()[:16]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
    try:
        # Not by the loader: its bytecode lies beside the file, and is told from a changed file's by second and size.
        # Nor by this module's own __future__.
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise ScheduleError(f"the schedule {path} ended with {type(error).__name__}: {error}; mend the file") from error
    methods = getattr(module, "METHODS", ())
    if not isinstance(methods, tuple) or not all(isinstance(method, Method) for method in methods):
        raise ScheduleError(f"METHODS of {path} must be a tuple of Method, found {methods!r}")
    return methods

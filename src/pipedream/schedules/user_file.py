"""Methods in users' files: the path of such a file can be given wherever a method's name can.

from pipedream.schedules import kit
...
METHODS = (kit.Method(two_by_two),)
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
from pipedream.schedules.kit.method import Method


def is_method_file(name: str) -> bool:
    """Returns whether a method's name is ``FILE.py``, or ``FILE.py:NAME``, one of several methods."""
    return _split_name(name)[0].lower().endswith(".py")


def load_method(name: str) -> Method:
    """Returns the method of a file; raises ScheduleError if the file fails or does not declare this one method."""
    path, method_name = _split_name(name)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ScheduleError(
            f"the schedule {path} cannot be read ({error}); give a file that declares METHODS"
        ) from None
    methods = _run_file(path, text)
    chosen = [method for method in methods if method_name in ("", method.name)]
    if len(chosen) != 1:
        names = ", ".join(method.name for method in methods) or "none"
        raise ScheduleError(
            f"the schedule {name} should be one method, {path} declares {names}; end it with METHODS = (Method(...),), "
            "and name one of several as FILE.py:NAME"
        )
    return chosen[0]


def build_by(method: Method, name: str, plan: Plan, microbatches: int | None, options: Mapping[str, Any]) -> Schedule:
    """Returns the schedule that a user's method builds; an error in it is reported as the file's, not the library's."""
    try:
        make: Callable[..., Any] = method.build
        built = make(plan, microbatches, **options)
    except PipelineError:
        raise
    except Exception as error:
        raise ScheduleError(f"the schedule {name} failed with {type(error).__name__}: {error}; fix the file") from error
    if not isinstance(built, Schedule):
        raise ScheduleError(f"the schedule {name} returned {built!r}, not a Schedule; fix the file")
    return built


def _split_name(name: str) -> tuple[str, str]:
    path, mark, method_name = name.rpartition(":")
    return (path, method_name) if mark and path.lower().endswith(".py") else (name, "")


@cache
def _run_file(path: str, text: bytes) -> tuple[Method, ...]:
    """Returns the methods that a file declares; it runs again only if its bytes have changed."""
    name = f"pipedream_method_{sha256(text).hexdigest()[:16]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look up their module
    try:
        # Not by its loader, whose bytecode cache recognises a changed file by seconds and size only.
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise ScheduleError(f"the schedule {path} failed with {type(error).__name__}: {error}; fix the file") from error
    methods = getattr(module, "METHODS", ())
    if not isinstance(methods, tuple) or not all(isinstance(method, Method) for method in methods):
        raise ScheduleError(f"METHODS of {path} must be a tuple of Method, found {methods!r}")
    return methods

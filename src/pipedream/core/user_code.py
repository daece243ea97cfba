"""Finds the place in the user's code where an error arose."""

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

_MODULE = "pipedream_module"  # attribute of an exception
_PACKAGE = str(Path(__file__).parents[1])
_CALLED_BY_MODELS = ("user_code.py", "record.py", "placeholder.py", "slice.py", "slice_forward.py")
_LIBRARY = sysconfig.get_path("stdlib")
_MAX_TEXT_LENGTH = 1000  # characters
_SMALLER = "out of memory: use smaller batches, --recompute or more workers, or raise the limit (ulimit -v, a cgroup's)"
_ADVICE = {
    "MemoryError": _SMALLER,
    "can't allocate memory": _SMALLER,
    "Too many open files": "raise the limit of open files (ulimit -n 65536)",
}
_ORIGINAL = "Original Traceback (most recent call last):"  # in errors that torch passes on from another process


def user_line(error: BaseException | None = None) -> str:
    """Returns the innermost line outside of torch and this package: ``model.py:42 in forward: x = x.view(5, 77)``.

    Args:
        error: the error, or else its cause; None for the running code.

    Returns an empty string if there is no such line.
    """
    while error is not None:
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            if is_users_file(frame.f_code.co_filename):
                return _describe_line(frame.f_code, line)
        error = error.__cause__
        if error is None:
            return ""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if is_users_file(frame.f_code.co_filename):
            return _describe_line(frame.f_code, line)
        file = Path(frame.f_code.co_filename)
        if str(file).startswith(_PACKAGE) and file.name not in _CALLED_BY_MODELS:
            break  # the frames above are callers of this package
    return ""


def split_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments, from a tuple, a mapping, or the only argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if type(inputs) is tuple else (inputs,)), {}


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls a model: a tuple holds positional arguments, a mapping keyword arguments, anything else is the argument."""
    args, kwargs = split_arguments(inputs)
    return model(*args, **kwargs)


def name_call() -> str:
    """Returns ``pipedream.profile (train.py:12)``, the outermost running call of this package."""
    name = "a call of pipedream"
    for (frame, _), (caller, line) in pairwise(traceback.walk_stack(sys._getframe(1))):
        if frame.f_code.co_filename.startswith(_PACKAGE) and not caller.f_code.co_filename.startswith(_PACKAGE):
            function = "Pipeline" if frame.f_code.co_name == "__init__" else frame.f_code.co_name
            name = f"pipedream.{function} ({Path(caller.f_code.co_filename).name}:{line})"
    return name


def with_place(error: BaseException) -> str:
    """Returns an error's type and text, with its module and the user's line, and what to do where a limit is reached.

    A long text is shortened. An error of a DataLoader's process is described as raised there.
    """
    return with_advice(_describe_loader_error(str(error)) if is_of_loader(error) else _describe(error))


def with_advice(text: str) -> str:
    """Returns an error's text, and what to do if a limit of the process is reached."""
    return "; ".join([text, *(advice for words, advice in _ADVICE.items() if words in text and advice not in text)])


def _describe(error: BaseException) -> str:
    name, message = type(error).__name__, str(error).strip() or repr(error)
    head = name if message == f"{name}()" else f"{name}: {elide_middle(message)}"
    text = "; ".join([head, *notes_of(error)])
    module, source = getattr(error, _MODULE, ("", ""))
    line = user_line(error)
    if not line and source:
        module += f", {source}"
    if line and line.partition(": ")[0] in text:
        line = ""
    places = [f"in {module}"] * bool(module) + [f"at {line}"] * bool(line)
    return f"{text} ({', '.join(places)})" if places else text


def notes_of(error: BaseException) -> list[str]:
    """Returns the notes of an error (`BaseException.add_note`)."""
    return [str(note) for note in getattr(error, "__notes__", ())]


def elide_middle(text: str) -> str:
    """Returns a text, without its middle if it is long."""
    omitted = len(text) - _MAX_TEXT_LENGTH
    if omitted <= 0:
        return text
    half = _MAX_TEXT_LENGTH // 2
    return f"{text[:half]} ... ({omitted} characters left out) ... {text[-half:]}"


def is_of_loader(error: BaseException) -> bool:
    """Returns whether an error was raised in a process of a DataLoader."""
    return str(error).startswith("Caught ") and _ORIGINAL in str(error)


def _describe_loader_error(text: str) -> str:
    head, _, trace = text.partition(_ORIGINAL)
    process = head.removeprefix("Caught ").strip().rstrip(".").partition(" in ")[2]
    lines = trace.strip().splitlines()
    begin = max((i + 1 for i, line in enumerate(lines) if line.startswith("  ")), default=0)
    cause = elide_middle("\n".join(lines[begin:]).strip())
    frames = re.findall(r'^  File "(.+)", line (\d+), in (\S+)$', trace, flags=re.MULTILINE)
    user_frames = [frame for frame in frames if is_users_file(frame[0])]
    place = f", at {Path(user_frames[-1][0]).name}:{user_frames[-1][1]} in {user_frames[-1][2]}" if user_frames else ""
    return f"{cause} (in {process}{place})"


def note_module(error: BaseException, modules: Iterable[tuple[str, Any]]) -> None:
    """Attaches the name of the innermost module whose method raised an error."""
    if hasattr(error, _MODULE):
        return
    names = {id(module): f"the module {name!r}" * bool(name) for name, module in modules}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner: Any = frame.f_locals.get("self")
        if id(owner) in names:
            name = names[id(owner)] or f"the model {type(owner).__name__}"
            setattr(error, _MODULE, (name, source_of(type(owner).forward)))


def source_of(function: Any) -> str:
    """Returns ``model.py:42``, where a function or class of the user's is defined, or an empty string."""
    try:
        function = inspect.unwrap(function)
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (TypeError, OSError, ValueError):
        return ""
    return f"{Path(file or '?').name}:{line}"


def is_users_file(file: str) -> bool:
    """Returns whether a source file is not of torch, this package or the standard library."""
    if file.startswith("<") or file.startswith(_PACKAGE):
        return False
    if file.startswith(_LIBRARY) and "site-packages" not in file:
        return False
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is None or not file.startswith(str(Path(torch).parent))


def _describe_line(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}" + (f": {text}" if text else "")

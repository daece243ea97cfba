"""The place in the user's own code that an error comes from."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["note_module", "notes_of", "source_of", "user_line", "with_place"]

_MODULE = "pipedream_module"  # attribute of an exception
_PACKAGE = str(Path(__file__).parents[1])
_CALLED_BY_MODELS = ("user_code.py", "placeholder.py", "slice.py", "slice_forward.py")
_LIBRARY = sysconfig.get_path("stdlib")


def user_line(error: BaseException | None = None) -> str:
    """Returns ``model.py:42 in forward: x = x.view(5, 77)``, the innermost line that is not of torch or this package.

    Args:
        error: that was raised there; None for the running code. If no line of its own is the user's, its cause counts.

    Returns an empty string if there is no such line.
    """
    while error is not None:
        frames = []
        traceback = error.__traceback__
        while traceback is not None:
            frames.append((traceback.tb_frame.f_code, traceback.tb_lineno))
            traceback = traceback.tb_next
        for code, line in reversed(frames):
            if _is_users(code):
                return _described(code, line)
        error = error.__cause__
        if error is None:
            return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code):
            return _described(frame.f_code, frame.f_lineno)
        file = Path(frame.f_code.co_filename)
        if str(file).startswith(_PACKAGE) and file.name not in _CALLED_BY_MODELS:
            break  # what follows has called this package
        frame = frame.f_back
    return ""


def with_place(error: BaseException) -> str:
    """Returns an error's type and text, with the module and the user's line where it was raised."""
    text = "; ".join([f"{type(error).__name__}: {str(error).strip() or repr(error)}", *notes_of(error)])
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


def note_module(error: BaseException, modules: Iterable[tuple[str, Any]]) -> None:
    """Notes on an error the name of the innermost module in whose methods it was raised."""
    if hasattr(error, _MODULE):
        return
    names = {id(module): f"the module {name!r}" * bool(name) for name, module in modules}
    traceback = error.__traceback__
    while traceback is not None:
        one: Any = traceback.tb_frame.f_locals.get("self")
        if id(one) in names:
            name = names[id(one)] or f"the model {type(one).__name__}"
            setattr(error, _MODULE, (name, source_of(type(one).forward)))
        traceback = traceback.tb_next


def source_of(function: Any) -> str:
    """Returns ``model.py:42``, where a function or class of the user's is defined, or an empty string."""
    try:
        function = inspect.unwrap(function)
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (TypeError, OSError, ValueError):
        return ""
    return f"{Path(file or '?').name}:{line}"


def _is_users(code: CodeType) -> bool:
    file = code.co_filename
    if file.startswith("<") or file.startswith(_PACKAGE):
        return False
    if file.startswith(_LIBRARY) and "site-packages" not in file:
        return False
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is None or not file.startswith(str(Path(torch).parent))


def _described(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}" + (f": {text}" if text else "")

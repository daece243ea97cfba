"""A door: entries that the files of a folder declare, and that a user's file may add.

Each file ends with a tuple of its entries, under the door's name for it: ``CODECS = (Int8(),)``. Users write the path
of such a file, with one entry, wherever an entry's name may stand. Data never runs code: a plan or a checkpoint may
name a file, but it is run only because its user names it, too.
"""

import sys
from functools import cache, cached_property
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from pipedream.core.errors import PipelineError
from pipedream.core.extensions import import_folder
from pipedream.core.user_code import with_place

Entry = TypeVar("Entry")


class Door(Generic[Entry]):
    """Entries of one kind by their names, those of files by their paths.

    Args:
        folder: package with the library's entries.
        table: name of the tuple at the end of a file.
        noun: what an entry is, in errors.
        option: keyword with which a user names one.
    """

    def __init__(self, folder: str, table: str, noun: str, option: str, error: type[PipelineError]) -> None:
        self._folder, self._table, self._noun, self._option, self._error = folder, table, noun, option, error
        self._of_files: dict[str, Entry] = {}

    @cached_property
    def named(self) -> dict[str, Entry]:
        """The library's entries, by name; none if its folder was left out."""
        entries: Any = [entry for module in import_folder(self._folder) for entry in getattr(module, self._table)]
        return {entry.name: entry for entry in entries}

    def open_file(self, path: str) -> None:
        """Runs a file that the user names, again only if its bytes have changed; its entry gets the path as name."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise self._error(
                f"the {self._noun} {path} cannot be read ({error}); give a file that declares {self._table}"
            ) from None
        entries = getattr(run_file(path, text, self._noun, self._error), self._table, ())
        if not isinstance(entries, tuple) or len(entries) != 1:
            raise self._error(f"{self._table} of {path} must be a tuple of one {self._noun}, found {entries!r}")
        (entry,) = entries
        entry.name = path
        self._of_files[path] = entry

    def has(self, name: str) -> bool:
        """Returns whether an entry has this name, or its file was opened."""
        return name in self._of_files or name in self.named

    def find(self, name: str) -> Entry:
        """Returns an entry that exists, or raises the door's error for a file that its user has not named."""
        entry = self._of_files.get(name) or self.named.get(name)
        if entry is None:
            raise self._error(
                f"the {self._noun} {name!r} is a Python file, which is not run because a plan or a checkpoint names "
                f"it; read the file and, if you trust it, name it yourself: {self._option}={name!r}"
            )
        return entry


def is_file(name: str) -> bool:
    """Returns whether a name is the path of a Python file."""
    return name.lower().endswith(".py")


def run_file(path: str, text: bytes, noun: str, error: type[PipelineError]) -> ModuleType:
    """Returns a user's file, a `noun`, as a module; runs it again only if its bytes have changed."""
    try:
        return _run_bytes(path, text)
    except Exception as failure:
        raise error(f"the {noun} {path} failed with {with_place(failure)}; fix the file") from failure


@cache
def _run_bytes(path: str, text: bytes) -> ModuleType:
    name = f"pipedream_file_{sha256(text).hexdigest()[:16]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look up their module
    try:
        # Not by its loader: the bytecode cache notices a changed file only by seconds and size.
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    except Exception:
        del sys.modules[name]
        raise
    return module

"""Modules that are imported at their first use, so that a file's facts can be read without torch."""

from importlib import import_module
from typing import Any


class LateModule:
    """A module in place of an import; type checkers see the import itself, under ``if TYPE_CHECKING``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)  # from now on it is found without this call
        return value

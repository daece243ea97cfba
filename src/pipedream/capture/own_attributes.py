"""Attributes that a slice's forwards set on modules whose forwards run on other stages, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_ABSENT = object()
_SHARED = "_output_capturing_hooks_installed"  # Hugging Face's note that hooks are there, which stay
_Change = tuple[nn.Module, str, Any, Any]  # attribute, value before, value now

_LEFT: WeakKeyDictionary[nn.Module, list[_Change]] = WeakKeyDictionary()
"""Model -> what its last slice has set in its latest forward."""


class OwnAttributes:
    """Lets a slice find what its own forwards have set, as if it had the model to itself.

    Otherwise slices in one process would count ``self.step += 1`` several times, and find each other's placeholders.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        self._model = model
        self._set_here: list[tuple[nn.Module, dict[str, Any]]] = [(module, {}) for module in modules]

    @contextmanager
    def during(self, *, remain: bool) -> Iterator[None]:
        """Context of a forward. What it sets is taken away again, or may remain until the next one, for the loss."""
        _take_back(_LEFT.pop(self._model, []))
        before = [dict(module.__dict__) for module, _ in self._set_here]
        for module, attributes in self._set_here:
            module.__dict__.update(attributes)
        try:
            yield
        finally:
            changes: list[_Change] = []
            for (module, attributes), was in zip(self._set_here, before, strict=True):
                for name, value in module.__dict__.items():
                    if was.get(name, _ABSENT) is not value and name != _SHARED:
                        attributes[name] = value
                        changes.append((module, name, was.get(name, _ABSENT), value))
            if remain:
                _LEFT[self._model] = changes
            else:
                _take_back(changes)


def _take_back(changes: Iterable[_Change]) -> None:
    for module, name, before, now in changes:
        if module.__dict__.get(name) is not now:
            continue  # set again since, by the user or to restore the model
        if before is _ABSENT:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before

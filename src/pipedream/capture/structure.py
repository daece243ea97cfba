"""Walks through arguments and outputs of modules: containers of tensors, numbers and opaque objects."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)

READS_NUMBERS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "equal", "allclose"}
"""Names of functions by whose results a forward may decide."""

_OFTEN = frozenset((torch.Tensor, bool, int, float, str, type(None), torch.Size))


SavedAttribute = tuple[dict[str, Any], str, Any]
"""Attributes, the name of one, and its value, for which None means that it was not there."""


@dataclass(frozen=True)
class SameAs:
    """Stands for an argument that a call returns as it is; `path` as in `walk`."""

    path: str


def is_in_place(name: str) -> bool:
    """Returns whether a function writes into its first argument, judging by its name."""
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name.endswith("__"))


def is_stand_in(leaf: Any) -> bool:
    """Returns whether a value is a stand-in (`stand_ins`), or a tensor on the meta device."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor))


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a value with their paths: ``0/hidden_states`` is ``value[0].hidden_states``."""
    if not _is_container(value):
        yield path, value
        return
    prefix = f"{path}/" if path else ""
    for name, part in _iterate_parts(value):
        if type(part) in _OFTEN:
            yield f"{prefix}{name}", part
        else:
            yield from walk(part, f"{prefix}{name}")


def walk_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a call's arguments, as `walk` does."""
    yield from walk(list(args))
    yield from walk(kwargs)


def find_leaf(value: Any, path: str) -> Any:
    """Returns the leaf at a path; None if the value has none there."""
    for name in path.split("/") if path else ():
        if isinstance(value, Mapping):
            value = value.get(name, value.get(int(name)) if name.isdigit() else None)
        elif isinstance(value, (tuple, list)):
            value = value[int(name)] if name.isdigit() and int(name) < len(value) else None
        else:
            value = getattr(value, name, None)
    return value


def find_prefix(path: str, places: Container[str]) -> str | None:
    """Returns the place that holds the leaf at a path, or is it; None if none of them does."""
    while path not in places:
        path = path.rpartition("/")[0]
        if not path:
            return None
    return path


def map_leaves(change: Callable[[str, Any], Any], value: Any, path: str = "") -> Any:
    """Returns a value of the same containers with changed leaves; of a mapping that cannot be made so, a dict."""
    if not _is_container(value):
        return change(path, value)
    parts = {
        name: map_leaves(change, part, f"{path}/{name}" if path else str(name)) for name, part in _iterate_parts(value)
    }
    if isinstance(value, Mapping):
        return type(value)(**parts) if is_dataclass(value) else parts
    if hasattr(value, "_make"):  # a named tuple; PackedSequence's constructor would read the numbers
        return value._make(parts.values())
    if isinstance(value, (tuple, list)):
        items = list(parts.values())
        return items if type(value) is list else type(value)(items)
    return replace(value, **parts)


@contextmanager
def wrapping_calls(
    modules: Iterable[tuple[nn.Module, Any]], call: Callable[..., Any]
) -> Iterator[list[SavedAttribute]]:
    """Context in which ``call(key, original, ...)`` makes the calls of (module, key) pairs.

    Yields attributes that are restored at the end, the last first, to which more may be added.
    """
    saved: list[SavedAttribute] = []
    try:
        for module, key in modules:
            slot = "_compiled_call_impl" if module._compiled_call_impl is not None else "forward"
            original = getattr(module, slot)
            saved.append((module.__dict__, slot, module.__dict__.get(slot)))
            module.__dict__[slot] = partial(call, key, original)
        yield saved
    finally:
        for attributes, slot, value in reversed(saved):
            if value is None:
                del attributes[slot]
            else:
                attributes[slot] = value


def name_next_call(counts: dict[str, int], path: str) -> str:
    """Counts a call of a module, and returns its name: the module's path, from the second one on with the number."""
    count = counts[path] = counts.get(path, 0) + 1
    return path if count == 1 else f"{path}@{count}"


def _is_container(value: Any) -> bool:
    kind = type(value)
    if kind in _OFTEN:
        return False
    return isinstance(value, (tuple, list, Mapping)) or (is_dataclass(kind) and not isinstance(value, (type, SameAs)))


def _iterate_parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    return ((field.name, getattr(value, field.name)) for field in fields(value))

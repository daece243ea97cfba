"""Finds the random generators of torch, Python and NumPy that a user's objects hold."""

import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_DEPTH = 8
_MANY = 256  # items of a container: data, not generators
_HOLD_NONE = (torch.Tensor, ModuleType, type, str, bytes, int, float)
_PATHS = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")
_HOLDERS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")


def find_generators(roots: Mapping[str, Any], depth: int = _DEPTH) -> dict[str, Any]:
    """Returns path -> generator that objects hold in attributes, small containers, and functions; no global one."""
    numpy: Any = sys.modules.get("numpy")  # if nobody has imported it, nobody holds its generators
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    ids = set(map(id, (torch.default_generator, *torch.cuda.default_generators, random._inst)))
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
        ids.add(id(numpy.random.mtrand._rand))
    return find_values(roots, kinds, ids, depth)


def find_values(
    roots: Mapping[str, Any], kinds: tuple[type, ...], excluded_ids: Iterable[int] = (), depth: int = _DEPTH
) -> dict[str, Any]:
    """Returns path -> value of these types, each object once, that objects hold, as `find_generators` does."""
    values: dict[str, Any] = {}
    level, ids = list(roots.items()), set(excluded_ids)
    for _ in range(depth):
        inner: list[tuple[str, Any]] = []
        for path, value in level:
            # Equal numbers may be one object, and are still several values.
            if isinstance(value, kinds) and (isinstance(value, (int, float)) or id(value) not in ids):
                values[path] = value
            elif not isinstance(value, _HOLD_NONE) and id(value) not in ids:
                inner += [(f"{path}.{key}".lstrip("."), item) for key, item in _list_items(value)]
            ids.add(id(value))
        level = inner
    return values


def _list_items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, FunctionType):
        # An empty cell has no contents to read.
        return enumerate(cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return [("__self__", value.__self__)]
    if isinstance(value, partial):
        return enumerate((value.func, *value.args, *value.keywords.values()))
    items = value if isinstance(value, (dict, list, tuple, set, deque)) else getattr(value, "__dict__", {})
    if len(items) > _MANY:
        return ()
    return items.items() if isinstance(items, Mapping) else enumerate(items)


def find_in_loader(loader: Any) -> dict[str, Any]:
    """Returns path -> generator of a loader, those by which the order is drawn first."""
    order = find_order_generators(loader)
    return order | _without(order, find_generators({"": loader}))


def find_order_generators(loader: Any) -> dict[str, Any]:
    """Returns path -> generator that a loader or one of its samplers holds as an attribute."""
    generators = {path: value for path in _PATHS if isinstance(value := _look_up(loader, path), torch.Generator)}
    generators = {path: value for path, value in generators.items() if value is not torch.default_generator}
    for path in _HOLDERS:
        attributes = getattr(_look_up(loader, path), "__dict__", {})
        named = {f"{path}.{name}".lstrip("."): value for name, value in attributes.items()}
        generators |= _without(generators, find_generators(named, depth=1))
    return generators


def find_sample_generators(loader: Any) -> dict[str, Any]:
    """Returns path -> generator by which the samples of a DataLoader are made."""
    holders = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    return _without(find_order_generators(loader), find_generators(holders))


def _without(others: Mapping[str, Any], generators: Mapping[str, Any]) -> dict[str, Any]:
    ids = set(map(id, others.values()))
    return {path: generator for path, generator in generators.items() if id(generator) not in ids}


def _look_up(holder: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        holder = getattr(holder, name, None)
    return holder

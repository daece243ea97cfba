"""Trees of `torch.utils._pytree`, also of mappings and dataclasses, which it takes for leaves."""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch.utils import _pytree


def tree_leaves(value: Any) -> list[Any]:
    """Returns the leaves of a value in order."""
    leaves = []
    for leaf in _pytree.tree_leaves(value):
        parts = _list_parts(leaf)
        leaves += tree_leaves(list(parts.values())) if parts else [leaf]
    return leaves


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a copy of a value with `function` applied to each leaf."""
    return _pytree.tree_map(partial(_map_leaf, function), value)


def _map_leaf(function: Callable[[Any], Any], leaf: Any) -> Any:
    parts = _list_parts(leaf)
    if not parts:
        return function(leaf)
    new = copy(leaf)
    change = new.__setitem__ if isinstance(new, MutableMapping) else partial(object.__setattr__, new)
    for name, part in parts.items():
        change(name, tree_map(function, part))
    return new


def _list_parts(leaf: Any) -> Mapping[Any, Any]:
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    # The library's own, such as a message between layers, are whole: parts of theirs stand for others.
    is_users = not type(leaf).__module__.startswith("pipedream.")
    is_instance = is_users and is_dataclass(leaf) and not isinstance(leaf, type)
    return {field.name: getattr(leaf, field.name) for field in fields(leaf)} if is_instance else {}

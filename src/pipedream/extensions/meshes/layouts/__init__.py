"""Searches how the ranks of one worker divide a training step, and runs the step so (docs/partition.md).

What users import is here. Names are imported on first use, since only tracing and running a step need torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream.extensions.meshes.layouts.description.operators import Operators as Operators
    from pipedream.extensions.meshes.layouts.search.exchanges import Exchanges as Exchanges
    from pipedream.extensions.meshes.layouts.search.lay_out import lay_out as lay_out
    from pipedream.extensions.meshes.layouts.search.partition import (
        METHODS as METHODS,
        Partition as Partition,
        partition as partition,
    )
    from pipedream.extensions.meshes.layouts.tracing.registry import register_operator as register_operator
    from pipedream.extensions.meshes.layouts.tracing.trace import operators as operators

_NAMES = {
    "description.operators": ("Operators",),
    "search.exchanges": ("Exchanges",),
    "search.lay_out": ("lay_out",),
    "search.partition": ("METHODS", "Partition", "partition"),
    "tracing.registry": ("register_operator",),
    "tracing.trace": ("operators",),
}
"""Module -> the names that it defines."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return list(_HOMES)


if not TYPE_CHECKING:  # type checkers read the aliases above
    __all__ = __dir__()

"""Searches how the ranks of one worker divide a training step, and runs the step so (docs/partition.md).

Everything outside imports from here. Names are imported on first use, since only tracing and running a step need torch.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream.layouts.description.operators import DescribedStep, Operators
    from pipedream.layouts.layer import partition_layer
    from pipedream.layouts.report import (
        compare_layouts,
        compare_partitions,
        format_layouts,
        format_partitions,
    )
    from pipedream.layouts.search.exchanges import Exchanges
    from pipedream.layouts.search.lay_out import lay_out
    from pipedream.layouts.search.partition import METHODS, Partition, check_request, complete_partition, partition
    from pipedream.layouts.step import GroupRanks, PartitionedStep
    from pipedream.layouts.tracing.registry import register_operator
    from pipedream.layouts.tracing.trace import TracedStep, describe_step, operators, trace

__all__ = [
    "METHODS",
    "DescribedStep",
    "Exchanges",
    "GroupRanks",
    "Operators",
    "Partition",
    "PartitionedStep",
    "TracedStep",
    "check_request",
    "compare_layouts",
    "compare_partitions",
    "complete_partition",
    "describe_step",
    "format_layouts",
    "format_partitions",
    "lay_out",
    "operators",
    "partition",
    "partition_layer",
    "register_operator",
    "trace",
]

_NAMES = {
    "description.operators": ("DescribedStep", "Operators"),
    "layer": ("partition_layer",),
    "step": ("GroupRanks", "PartitionedStep"),
    "report": ("compare_layouts", "compare_partitions", "format_layouts", "format_partitions"),
    "search.exchanges": ("Exchanges",),
    "search.lay_out": ("lay_out",),
    "search.partition": ("METHODS", "Partition", "check_request", "complete_partition", "partition"),
    "tracing.registry": ("register_operator",),
    "tracing.trace": ("TracedStep", "describe_step", "operators", "trace"),
}
"""Module -> the names that it defines."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__

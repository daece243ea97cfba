"""Divides a described step: by a partition beside the baselines, or by a layout beside none; as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.operators.named import Report
from pipedream.core.operators.operators import Operators
from pipedream.core.plan.layout import Layout
from pipedream.core.plan.mesh import Mesh
from pipedream.partitioner.exchanges import Exchanges
from pipedream.partitioner.lay_out import lay_out
from pipedream.partitioner.partition import METHODS, Partition, partition


@dataclass(frozen=True)
class DescribedStep:
    """Operators with what a search of them needs.

    Attributes:
        element_bytes: of an element of each tensor.
        batch: the index of the samples, '' if unknown.
    """

    operators: Operators
    element_bytes: Mapping[str, int]
    batch: str = ""

    @property
    def usual_bytes(self) -> int:
        """Bytes of an element of the largest tensor."""
        largest = max(self.operators.tensors, key=lambda name: prod(self.operators.tensors[name]), default="")
        return self.element_bytes.get(largest, 1)


def partitioned(
    step: DescribedStep, ranks: int, method: str = "recursive", *, batch: str = "", replicate: bool = True
) -> dict[str, Any]:
    """Partitions a step by a method, and by all others that run.

    Returns:
        `cuts`: the elements that one pair of halves moves in each, and how many pairs there are; `tensors`: the
        dimension that each cut divides, or None; `operators`: the index of each cut; `methods`: elements, bytes and
        bound of each; `refused`: why others are left out.

    Raises:
        PlanError: see `pipedream.partition`.
    """
    ops, samples = step.operators, batch or step.batch
    chosen = partition(ops, ranks, method, batch=samples, replicate=replicate)
    methods, refused = {method: _report_method(step, chosen)}, {}
    for other in METHODS:
        if other != method:
            try:
                methods[other] = _report_method(step, partition(ops, ranks, other, batch=samples, replicate=replicate))
            except PlanError as error:
                refused[other] = str(error)
    return {
        "method": method,
        "ranks": ranks,
        **methods[method],
        "cuts": [{"pairs": 2**at, "elements": cut.elements} for at, cut in enumerate(chosen.cuts)],
        "tensors": {
            name: {
                "shape": list(ops.tensors[name]),
                "element_bytes": step.element_bytes[name],
                "cuts": [cut.schemes[name] for cut in chosen.cuts],
                "alike": group[0],
            }
            for group in ops.groups
            for name in group
        },
        "operators": [
            {"text": str(operator), "indices": [cut.indices[number] for cut in chosen.cuts]}
            for number, operator in enumerate(ops.steps)
        ],
        "methods": {name: methods[name] for name in METHODS if name in methods},
        "refused": refused,
    }


def _report_method(step: DescribedStep, partition: Partition) -> dict[str, int]:
    exchanges = Exchanges(step.operators, partition)
    return {
        "elements": partition.elements,
        "at_least": partition.at_least,
        "sent_elements": exchanges.elements,
        "sent_bytes": exchanges.sent_bytes(step.element_bytes),
    }


def laid_out(
    step: DescribedStep,
    mesh: Mesh,
    objective: str = "memory",
    fixed: Iterable[str] = (),
    *,
    memory_bytes: int | None = None,
    operations_per_s: float | None = None,
    bytes_per_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Lays out a step by names, and reports it with and without the layout.

    Args:
        bytes_per_s: that a rank sends, for each dimension of the mesh.

    Returns:
        `layout` and `none` have the reports; `names` the sizes of each name that may be cut, `whole` why others may
        not.

    Raises:
        PlanError: see `pipedream.lay_out`.
    """
    each, ops = step.usual_bytes, step.operators
    rates = bytes_per_s and {dimension: rate / each for dimension, rate in bytes_per_s.items()}
    fits = None if memory_bytes is None else memory_bytes // each
    if fits == 0:
        raise PlanError(f"a memory of {memory_bytes} bytes was given, but an element has {each}; give more")
    try:
        chosen = lay_out(
            ops,
            mesh,
            objective,
            fixed,
            memory_elements=fits,
            operations_per_s=operations_per_s,
            elements_per_s=rates,
        )
    except PlanError as error:
        if fits is None:
            raise
        raise PlanError(f"{error} (a memory of {memory_bytes} bytes is {fits} elements)") from None

    def row(layout: Layout) -> dict[str, Any]:
        report = ops.report(layout, mesh)
        seconds = None
        if operations_per_s is not None and rates is not None:
            seconds = report.seconds(operations_per_s, rates)
        return _report_layout(report, each) | {"seconds": seconds}

    return {
        "mesh": mesh.text,
        "objective": objective,
        "rules": chosen.rules,
        "element_bytes": each,
        "layout": row(chosen),
        "none": row(Layout()),
        "fixed": sorted(fixed),
        "names": {name: sorted(sizes) for name, sizes in ops.named.sizes.items()},
        "whole": ops.named.whole,
    }


def _report_layout(report: Report, element_bytes: int) -> dict[str, Any]:
    moved = [{"kind": kind, "over": over, "elements": elements} for (kind, over), elements in report.moved.items()]
    return {
        "peak_elements": report.peak,
        "peak_bytes": report.peak * element_bytes,
        "done": report.done,
        "unique": report.unique,
        "moved": moved,
    }

"""Compares ways to divide a described step: a partition with its baselines, or a layout with none; as JSON or text."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.plan.ranks import Mesh
from pipedream.core.tabular import align
from pipedream.core.units import format_bytes, format_seconds, shorten
from pipedream.extensions.meshes.layout import Layout
from pipedream.extensions.meshes.layouts.description.operators import DescribedStep
from pipedream.extensions.meshes.layouts.search.exchanges import Exchanges
from pipedream.extensions.meshes.layouts.search.lay_out import lay_out
from pipedream.extensions.meshes.layouts.search.partition import METHODS, Partition, partition

_MAX_TENSORS = 10
_MAX_NAMES = 20


def compare_partitions(
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
            {"text": operator.text, "indices": [cut.indices[number] for cut in chosen.cuts]}
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


def compare_layouts(
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
        bytes_per_s: bandwidth of a rank, for each dimension of the mesh.

    Returns:
        `layout` and `none` have the reports; `names` the sizes of each name that may be sharded, `whole` why others may
        not.

    Raises:
        PlanError: see `pipedream.lay_out`.
    """
    element_bytes, ops = step.usual_bytes, step.operators
    rates = bytes_per_s and {dimension: rate / element_bytes for dimension, rate in bytes_per_s.items()}
    fits = None if memory_bytes is None else memory_bytes // element_bytes
    if fits == 0:
        raise PlanError(f"a memory of {memory_bytes} bytes was given, but an element has {element_bytes}; give more")
    try:
        chosen = lay_out(
            ops, mesh, objective, fixed, memory_elements=fits, operations_per_s=operations_per_s, elements_per_s=rates
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
        return {
            "peak_elements": report.peak,
            "peak_bytes": report.peak * element_bytes,
            "done": report.done,
            "unique": report.unique,
            "moved": [{"kind": kind, "over": over, "elements": moved} for (kind, over), moved in report.moved.items()],
            "seconds": seconds,
        }

    return {
        "mesh": mesh.text,
        "objective": objective,
        "rules": chosen.rules,
        "element_bytes": element_bytes,
        "layout": row(chosen),
        "none": row(Layout()),
        "fixed": sorted(fixed),
        "names": {name: sorted(sizes) for name, sizes in ops.named.sizes.items()},
        "whole": ops.named.whole,
    }


def format_partitions(comparison: Mapping[str, Any]) -> str:
    """Returns the cuts, the schemes of the largest tensors, and all methods."""
    ranks, cuts = comparison["ranks"], comparison["cuts"]
    lines = [
        f"{comparison['method']} over {ranks} rank{'' if ranks == 1 else 's'}: {comparison['elements']:,} elements a "
        f"step (lower bound {comparison['at_least']:,}), {comparison['sent_elements']:,} on the wire, "
        f"{format_bytes(comparison['sent_bytes'])}"
    ]
    if cuts:
        numbered = [(f"{at + 1}", f"{cut['pairs']}", f"{cut['elements']:,}") for at, cut in enumerate(cuts)]
        lines += ["", align([("cut", "pairs", "elements of a pair"), *numbered], "r")]
        lines += ["", _format_schemes(comparison["tensors"])]
    rows = [
        (name, f"{row['elements']:,}", f"{row['sent_elements']:,}", format_bytes(row["sent_bytes"]))
        for name, row in comparison["methods"].items()
    ]
    lines += ["", align([("method", "elements", "on the wire", "bytes"), *rows])]
    if comparison["refused"]:
        lines += ["", f"left out: {', '.join(comparison['refused'])} (--json says why)"]
    return "\n".join(lines)


def _format_schemes(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a row for each of the largest shapes and its cuts."""
    equal: dict[tuple[tuple[int, ...], tuple[int | None, ...]], list[str]] = {}
    for name, tensor in tensors.items():
        equal.setdefault((tuple(tensor["shape"]), tuple(tensor["cuts"])), []).append(name)
    largest = sorted(equal.items(), key=lambda row: -prod(row[0][0]))
    rows = [
        (
            shorten(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            " x ".join(map(str, shape)) or "-",
            ", ".join("whole" if cut is None else str(cut) for cut in cuts),
        )
        for (shape, cuts), names in largest[:_MAX_TENSORS]
    ]
    head = "tensor" if len(largest) <= _MAX_TENSORS else "largest tensors"
    return align([(head, "shape", "dimension of each cut"), *rows], "l")


def format_layouts(report: Mapping[str, Any]) -> str:
    """Returns the layout, and what it takes beside no layout."""
    rules = report["rules"]
    least = "least peak memory" if report["objective"] == "memory" else "least time"
    lines = [f"{rules or 'no name is sharded'} on the mesh {report['mesh'] or '-'}, {least}", ""]
    both = report["layout"], report["none"]
    names = [
        ("", "layout", "no layout"),
        ("peak of a rank, elements", *(f"{column['peak_elements']:,}" for column in both)),
    ]
    names.append(("  in bytes", *(format_bytes(column["peak_bytes"]) for column in both)))
    names.append(("operations of all ranks", *(f"{column['done']:,}" for column in both)))
    names.append(("  without duplicates", *(f"{column['unique']:,}" for column in both)))
    moved = [{(row["kind"], row["over"]): row["elements"] for row in column["moved"]} for column in both]
    for key in sorted({key for column in moved for key in column}):
        names.append((f"{key[0]} over {key[1]}, elements", *(f"{column.get(key, 0):,}" for column in moved)))
    if both[0]["seconds"] is not None:
        names.append(("time", *(format_seconds(column["seconds"]) for column in both)))
    lines.append(align(names))
    free = [name for name in report["names"] if f"{name}:" not in f",{rules}"]
    if free:
        shown = ", ".join(free[:_MAX_NAMES]) + (f" and {len(free) - _MAX_NAMES} more" * (len(free) > _MAX_NAMES))
        lines += ["", f"not sharded: {shown}"]
    return "\n".join(lines)

"""Tables of a step that is divided over ranks: by a partition, or by a layout (`workflows.partition`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from pipedream.core.units import format_bytes, format_seconds, shorten

_MOST_TENSORS = 10
_MOST_NAMES = 20


def partition_table(comparison: Mapping[str, Any]) -> str:
    """Returns cuts, the schemes of the largest tensors, and all methods."""
    ranks, cuts = comparison["ranks"], comparison["cuts"]
    lines = [
        f"{comparison['method']} over {ranks} rank{'' if ranks == 1 else 's'}: {comparison['elements']:,} elements a "
        f"step (lower bound {comparison['at_least']:,}), {comparison['sent_elements']:,} on the wire, "
        f"{format_bytes(comparison['sent_bytes'])}"
    ]
    if cuts:
        numbered = [(f"{at + 1}", f"{cut['pairs']}", f"{cut['elements']:,}") for at, cut in enumerate(cuts)]
        lines += ["", *_format_table(("cut", "pairs", "elements of a pair"), numbered, "rrr")]
        lines += ["", *_format_schemes(comparison["tensors"])]
    rows = [
        (name, f"{row['elements']:,}", f"{row['sent_elements']:,}", format_bytes(row["sent_bytes"]))
        for name, row in comparison["methods"].items()
    ]
    lines += ["", *_format_table(("method", "elements", "on the wire", "bytes"), rows, "lrrr")]
    if comparison["refused"]:
        lines += ["", f"left out: {', '.join(comparison['refused'])} (--json says why)"]
    return "\n".join(lines)


def _format_schemes(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
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
        for (shape, cuts), names in largest[:_MOST_TENSORS]
    ]
    head = "tensor" if len(largest) <= _MOST_TENSORS else "largest tensors"
    return _format_table((head, "shape", "dimension of each cut"), rows, "lll")


def layout_table(report: Mapping[str, Any]) -> str:
    """Returns the layout, and what it takes beside no layout."""
    rules = report["rules"]
    least = "least peak memory" if report["objective"] == "memory" else "least time"
    lines = [f"{rules or 'no name is cut'} on the mesh {report['mesh'] or '-'}, {least}", ""]
    both = report["layout"], report["none"]
    names = [("peak of a rank, elements", *(f"{column['peak_elements']:,}" for column in both))]
    names.append(("  in bytes", *(format_bytes(column["peak_bytes"]) for column in both)))
    names.append(("operations of all ranks", *(f"{column['done']:,}" for column in both)))
    names.append(("  without duplicates", *(f"{column['unique']:,}" for column in both)))
    moved = [{(row["kind"], row["over"]): row["elements"] for row in column["moved"]} for column in both]
    for key in sorted({key for column in moved for key in column}):
        names.append((f"{key[0]} over {key[1]}, elements", *(f"{column.get(key, 0):,}" for column in moved)))
    if both[0]["seconds"] is not None:
        names.append(("time", *(format_seconds(column["seconds"]) for column in both)))
    lines += _format_table(("", "layout", "no layout"), names, "lrr")
    free = [name for name in report["names"] if f"{name}:" not in f",{rules}"]
    if free:
        shown = ", ".join(free[:_MOST_NAMES]) + (f" and {len(free) - _MOST_NAMES} more" * (len(free) > _MOST_NAMES))
        lines += ["", f"not cut: {shown}"]
    return "\n".join(lines)


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Returns aligned lines.

    Args:
        sides: "l" or "r" for each column.
    """
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return [
        "  ".join(
            f"{word:{'<' if side == 'l' else '>'}{width}}" for word, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]

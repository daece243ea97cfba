"""What crosses each cut of a model, and the table of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipedream.core.model.graph import LayerGraph, Value
from pipedream.core.units import format_bytes

_SHOWN_VALUES, _SHOWN_REASONS = 2, 20


@dataclass(frozen=True)
class Crossing:
    """What crosses the cut before a layer.

    Attributes:
        layer: its index.
    """

    layer: int
    values: tuple[Value, ...]

    @property
    def bytes(self) -> int:
        """Sent forward, for the minibatch that was captured."""
        return sum(value.bytes for value in self.values)

    @property
    def gradient_bytes(self) -> int:
        """Sent back."""
        return sum(value.bytes for value in self.values if value.gradient)


def crossings(graph: LayerGraph) -> tuple[Crossing, ...]:
    """Returns what crosses each possible cut, in order."""
    starts = {call.name: call.start for call in graph.calls}
    return tuple(
        Crossing(i, tuple(value for value in graph.values if value.crosses(starts.get(graph.layers[i].name, i))))
        for i in range(1, len(graph.layers))
    )


def layer_table(graph: LayerGraph, refused: Mapping[str, str]) -> str:
    """Returns a row for each layer, with what crosses the cut before it; then where there is no cut, and why."""
    across = {crossing.layer: crossing for crossing in crossings(graph)}
    rows = [("", "layer", "kind", "sent", "returned", "what crosses the cut before it")]
    for i, layer in enumerate(graph.layers):
        crossing = across.get(i, Crossing(i, ()))
        names = [value.name for value in crossing.values[:_SHOWN_VALUES]]
        more = len(crossing.values) - len(names)
        shown = ", ".join([*names, *([f"{more} more"] if more else [])])
        sent, back = (format_bytes(size) if size else "-" for size in (crossing.bytes, crossing.gradient_bytes))
        rows.append((str(i), layer.name, layer.kind, sent, back, shown))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        f"{number:>{widths[0]}}  {name:<{widths[1]}}  {kind:<{widths[2]}}  {sent:>{widths[3]}}  {back:>{widths[4]}}  "
        f"{shown}".rstrip()
        for number, name, kind, sent, back, shown in rows
    ]
    for group in graph.ties:
        names = [graph.layers[i].name for i in group]
        lines.append(f"{', '.join(names)}: {_tie_in_words(whole=group in graph.whole)}")
    lines += [f"no cut before {call}: {reason}" for call, reason in list(refused.items())[:_SHOWN_REASONS]]
    if len(refused) > _SHOWN_REASONS:
        lines.append(f"and no cut before {len(refused) - _SHOWN_REASONS} more calls")
    return "\n".join(lines)


def _tie_in_words(*, whole: bool) -> str:
    if whole:
        return "share state that changes without an update, and stay in one stage"
    return "share a weight; only methods whose stages all make the same updates put them in different stages"

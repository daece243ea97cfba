"""The layers of a model, and which layer reads which output.

Layers are in an order in which they can run, and are never split; edge ``(i, j)`` means that j reads the output of i.
Capture returns chains, ``(0, 1), (1, 2), ...``, because a stage is an interval of the order of execution: all values
that are read after a cut cross it (`Value`). The planner takes any graph (`planner.cuts`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pipedream.core.artifact import Artifact, encode_attributes
from pipedream.core.tabular import align
from pipedream.core.units import format_bytes


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        name: the user's name (``features.3``), unique in the graph.
        kind: class of the module (``Conv2d``).
        parameters: names of its parameters and buffers in the user's state dict.
    """

    name: str
    kind: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValueSite:
    """A place where a module takes or returns a value.

    Attributes:
        call: name of the module's call; "" for the model.
        end: "in" or "out".
        path: path of the value in the arguments or the output (``0/hidden_states``).
        moment: position in the order of execution.
    """

    call: str
    end: str
    path: str
    moment: int


@dataclass(frozen=True)
class Call:
    """One call of a module in the model's forward.

    Attributes:
        name: path of the module, with a number from its second call on (``relu@2``).
        start, end: moments.
        hides: other stages cannot skip this call, only calls inside it.
    """

    name: str
    start: int
    end: int
    hides: bool = False

    @property
    def path(self) -> str:
        return self.name.partition("@")[0]


@dataclass(frozen=True)
class Value:
    """A tensor that is made in one layer and read in a later one.

    Attributes:
        bytes: for the profiled minibatch.
        gradient: whether a gradient is sent back.
        born: moment at which it is made; -1 for an input of the model.
        last: moment of its last use.
        sites: where modules take or return it, in the order of moments.
    """

    bytes: int
    gradient: bool
    born: int
    last: int
    sites: tuple[ValueSite, ...]

    @property
    def name(self) -> str:
        """The first place where the value occurs: 'input labels', 'h.0 output', 'h.0.mlp argument 0'."""
        first = self.sites[0]
        role = "output" if first.end == "out" else "argument" if first.call else "input"
        return f"{first.call} {role} {first.path}".strip()

    def crosses(self, moment: int) -> bool:
        return self.born < moment <= self.last


@dataclass(frozen=True)
class LayerGraph(Artifact):
    """Layers in an order in which they can run, and the edges between them.

    Attributes:
        edges: index pairs (producer, consumer), producer before consumer.
        ties: groups of layers that share a trained parameter or state; a cut should not separate a group.
        inseparable: ties that no method can train in separate stages: the shared state changes without an update, or
            different parameters share one storage.
        loss_weight: what the model's own loss is a mean over, found on a sample (`services.losses.losses.LossWeight`);
            empty if unknown.
        calls: calls of a model that runs by its own forward, in the order of their starts; layer i begins with the call
            of its name. Empty for a chain of modules.
        values: values that cross cuts; of a chain, moments are the indices of its layers.
        glue: parameters and buffers used outside of their modules' calls.
        replayed: functions whose results are sent to later stages, because these lack the inputs.
        seeded: paths of modules before whose calls the random generator is seeded.
        draws_in_python: the forward draws from the generators of Python or NumPy, which are then seeded, too.
        inputs: paths of the tensors in the model's inputs ("0", "input_ids").
        evaluation: the layers with the calls and values of a forward in evaluation mode, if these differ from
            training's.

    Raises:
        ValueError: no layer, a repeated name, an edge or tie out of range, or an inseparable group that is no tie.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    ties: tuple[tuple[int, ...], ...] = ()
    inseparable: tuple[tuple[int, ...], ...] = ()
    loss_weight: str = ""
    calls: tuple[Call, ...] = ()
    values: tuple[Value, ...] = ()
    glue: tuple[str, ...] = ()
    replayed: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()
    draws_in_python: bool = False
    inputs: tuple[str, ...] = ()
    evaluation: LayerGraph | None = None

    def __post_init__(self) -> None:
        count = len(self.layers)
        if not count:
            raise ValueError("a model has at least one layer, found none")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != count:
            raise ValueError(f"layer names must differ, found {sorted(n for n in set(names) if names.count(n) > 1)}")
        for source, target in self.edges:
            if not 0 <= source < target < count:
                raise ValueError(f"edge {(source, target)} does not run forward within {count} layers")
        for group in self.ties:
            if not group or min(group) < 0 or max(group) >= count:
                raise ValueError(f"tie {group} names a layer that is not among the {count}")
        if unknown := set(self.inseparable) - set(self.ties):
            raise ValueError(f"inseparable names {min(unknown)}, which is not one of the ties")

    def encoded(self) -> dict[str, Any]:
        """Returns JSON values, without `evaluation` where there is none."""
        names = [field.name for field in fields(self) if field.name != "evaluation" or self.evaluation is not None]
        return encode_attributes(self, *names)

    @classmethod
    def chain(
        cls,
        layers: tuple[Layer, ...],
        ties: tuple[tuple[int, ...], ...] = (),
        inseparable: tuple[tuple[int, ...], ...] = (),
    ) -> LayerGraph:
        return cls(layers, tuple((i, i + 1) for i in range(len(layers) - 1)), ties, inseparable)


def in_order(count: int, edges: Iterable[tuple[int, int]], key: Callable[[int], int] = lambda i: 0) -> list[int]:
    """Returns the nodes in an order in which they can run, the smallest (key, index) first; none in or after cycles."""
    consumers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in edges:
        consumers[source].append(target)
        missing[target] += 1
    ready = [(key(i), i) for i in range(count) if not missing[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)[1]
        order.append(i)
        for target in consumers[i]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (key(target), target))
    return order


_SHOWN_VALUES, _SHOWN_REASONS = 2, 20


@dataclass(frozen=True)
class Crossing:
    """Values that cross the cut before the layer of this index."""

    layer: int
    values: tuple[Value, ...]

    @property
    def bytes(self) -> int:
        """Bytes sent forward, for the captured minibatch."""
        return sum(value.bytes for value in self.values)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients sent back."""
        return sum(value.bytes for value in self.values if value.gradient)


def crossings(graph: LayerGraph) -> tuple[Crossing, ...]:
    """Returns what crosses each possible cut, in order."""
    starts = {call.name: call.start for call in graph.calls}
    return tuple(
        Crossing(i, tuple(value for value in graph.values if value.crosses(starts.get(graph.layers[i].name, i))))
        for i in range(1, len(graph.layers))
    )


def layer_table(graph: LayerGraph, refused: Mapping[str, str]) -> str:
    """Returns a row for each layer with what crosses the cut before it, then why other places are no cuts."""
    crossing_before = {crossing.layer: crossing for crossing in crossings(graph)}
    rows = [("", "layer", "kind", "sent", "returned", "what crosses the cut before it")]
    for i, layer in enumerate(graph.layers):
        crossing = crossing_before.get(i, Crossing(i, ()))
        names = [value.name for value in crossing.values[:_SHOWN_VALUES]]
        more_count = len(crossing.values) - len(names)
        shown = ", ".join([*names, *([f"{more_count} more"] if more_count else [])])
        sent, returned = (format_bytes(size) if size else "-" for size in (crossing.bytes, crossing.gradient_bytes))
        rows.append((str(i), layer.name, layer.kind, sent, returned, shown))
    lines = [align(rows, "rllrrl")]
    share_weight = "share a weight; only methods whose stages all make the same updates put them in different stages"
    share_state = "share state that changes without an update, and stay in one stage"
    for group in graph.ties:
        names = [graph.layers[i].name for i in group]
        lines.append(f"{', '.join(names)}: {share_state if group in graph.inseparable else share_weight}")
    lines += [f"no cut before {call}: {reason}" for call, reason in list(refused.items())[:_SHOWN_REASONS]]
    if len(refused) > _SHOWN_REASONS:
        lines.append(f"and no cut before {len(refused) - _SHOWN_REASONS} more calls")
    return "\n".join(lines)

"""The profile format of the original PipeDream, ``graph.txt``: read, written, and made a profile for `pipedream plan`.

    python benchmarks/paper_tables/graph_txt.py vgg16.txt -o vgg16.profile.json

One record per line (github msr-fiddle/pipedream, ``graph/graph.py``): a node, or, after a TAB, an edge:

    node4 -- Conv2d(3, 64) -- forward_compute_time=1.500, backward_compute_time=3.000, activation_size=512.000, ...
        node1 -- node4

Times are milliseconds and sizes bytes, of one whole minibatch; several outputs have their sizes in brackets,
``[512.0; 64.0]``. ``-- stage_id=0`` may end a node's line. Batch, dtype and device are not recorded.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pipedream.core.artifact import read_text, write_text
from pipedream.core.errors import ArtifactError, PipelineError
from pipedream.core.model.graph import Layer, LayerGraph, in_order
from pipedream.core.model.profile import LayerProfile, Profile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SPECIAL_KINDS = ("Input", "__getitem__")
_MAX_NUMBER = 1e15  # larger numbers mean a damaged file


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph.txt, with milliseconds of one minibatch.

    Attributes:
        name: unique in the file (``node4``).
        kind: a module's repr, ``Input0``, ``Add``, ``__getitem__(1)``.
    """

    name: str
    kind: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    output_sizes_bytes: tuple[float, ...] = (0.0,)
    parameter_bytes: float = 0.0
    stage: int | None = None

    def __post_init__(self) -> None:
        for what, text in (("id", self.name), ("description", self.kind)):
            if text != text.strip() or re.search(r"[\r\n]", text) or f"{text} -- ".split(" -- ") != [text, ""]:
                raise ValueError(f"the {what} {text!r} contains a line break, surrounding blanks or a separator")
        if not self.name:
            raise ValueError("a node needs an id, found none")
        if not self.output_sizes_bytes:
            raise ValueError("activation_size needs at least one number, found none")
        numbers = (self.forward_ms, self.backward_ms, *self.output_sizes_bytes, self.parameter_bytes)
        fields = (*_FIELDS[:2], *[_FIELDS[2]] * len(self.output_sizes_bytes), _FIELDS[3])
        for field, value in zip(fields, numbers, strict=True):
            if not 0 <= value <= _MAX_NUMBER:
                raise ValueError(f"{field} should be a number from 0 to {_MAX_NUMBER:g}, found {value!r}")
        if self.stage is not None and self.stage < 0:
            raise ValueError(f"stage_id cannot be negative, found {self.stage}")

    @property
    def compute_s(self) -> float:
        return (self.forward_ms + self.backward_ms) / 1000.0

    @property
    def output_bytes(self) -> float:
        return sum(self.output_sizes_bytes)

    @property
    def is_input(self) -> bool:
        """Whether the node is the data loader; its time is that of loading."""
        return self.kind.startswith("Input")

    def __str__(self) -> str:
        sizes = [_format_exactly(size) for size in self.output_sizes_bytes]
        numbers = (
            _format_exactly(self.forward_ms),
            _format_exactly(self.backward_ms),
            sizes[0] if len(sizes) == 1 else f"[{'; '.join(sizes)}]",
            _format_exactly(self.parameter_bytes),
        )
        fields = ", ".join(f"{name}={text}" for name, text in zip(_FIELDS, numbers, strict=True))
        return f"{self.name} -- {self.kind} -- {fields}" + ("" if self.stage is None else f" -- stage_id={self.stage}")


@dataclass(frozen=True)
class GraphText:
    """The content of a graph.txt.

    Attributes:
        nodes: in the file's order; the original's results depend on which source is first.
        edges: index pairs (producer, consumer); those into a node are in the order of its arguments.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a graph has at least one node, found none")
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            raise ValueError(f"node ids must differ, found {next(n for n in names if names.count(n) > 1)} twice")
        for edge in self.edges:
            if not all(0 <= end < len(names) for end in edge):
                raise ValueError(f"edge {edge} names a node that is not among the {len(names)}")
        if cycle := _find_cycle(len(names), self.edges):
            raise ValueError(f"the edges form a cycle through {names[min(cycle)]}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a graph.txt.

        Raises:
            ArtifactError: no such file, or see `parse`.
        """
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"cannot read the graph.txt in {path}: {error}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "the text") -> Self:
        """Reads the text of a graph.txt.

        A node without any edge is a sign of a truncated file, except for an input.

        Raises:
            ArtifactError: a malformed line or number, a cycle, or an edge to a node that no earlier line defines.
        """
        nodes: list[GraphNode] = []
        places: dict[str, tuple[int, int]] = {}
        edges: list[tuple[int, int]] = []
        lines: list[int] = []
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                if line.startswith("\t"):
                    edges.append(_read_edge(line.strip(), places))
                    lines.append(number)
                    continue
                node = _read_node(line.strip())
                if node.name in places:
                    raise ValueError(f"{node.name} is already defined on line {places[node.name][1]}")
                places[node.name] = len(nodes), number
                nodes.append(node)
            except ValueError as error:
                raise ArtifactError(_place_error(source, number, str(error))) from None
        if not nodes:
            raise ArtifactError(f"{source} should hold a graph.txt, but has no node; give a whole one")
        if cycle := _find_cycle(len(nodes), edges):
            number = max(n for n, edge in zip(lines, edges, strict=True) if cycle.issuperset(edge))
            raise ArtifactError(
                _place_error(source, number, f"the edges form a cycle through {nodes[min(cycle)].name}")
            )
        connected = {end for edge in edges for end in edge}
        for i, node in enumerate(nodes):
            if i not in connected and len(nodes) > 1 and not node.is_input:
                reason = f"{node.name} has no edge in or out, is the end of the file missing?"
                raise ArtifactError(_place_error(source, places[node.name][1], reason))
        return cls(tuple(nodes), tuple(edges))

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """Returns the graph of a profile; the format has no loss, no update, and no bytes that autograd keeps."""
        names = [_clean(layer.name) for layer in profile.graph.layers]
        unique = names if len(set(names)) == len(names) and all(names) else [f"node{i}" for i in range(len(names))]
        kinds = [_clean(layer.kind) for layer in profile.graph.layers]
        nodes = tuple(
            GraphNode(
                name,
                f"Layer({kind})" if kind.startswith(_SPECIAL_KINDS) else kind,
                cost.forward_s * 1000.0,
                cost.backward_s * 1000.0,
                (float(cost.output_bytes),),
                float(cost.parameter_bytes),
            )
            for name, kind, cost in zip(unique, kinds, profile.layers, strict=True)
        )
        return cls(nodes, profile.graph.edges)

    def save(self, path: str | os.PathLike[str]) -> Path:
        return write_text(path, f"{self}\n")

    def profile(self, model: str = "graph.txt") -> Profile:
        """Returns a Profile with the nodes in an order in which they can run and without the inputs.

        Bytes are rounded. Activations, which the format lacks, get the bytes of outputs; the batch is 1.

        Raises:
            ArtifactError: the graph has only inputs.
        """
        consumers = {target for _, target in self.edges}
        order = [i for i in in_order(len(self.nodes), self.edges) if i in consumers or not self.nodes[i].is_input]
        if not order:
            raise ArtifactError(f"{model} has no layer besides its inputs; give the profile of a model")
        places = {node: place for place, node in enumerate(order)}
        nodes = [self.nodes[i] for i in order]
        edges = tuple((places[a], places[b]) for a, b in self.edges if a in places and b in places)
        costs = tuple(
            LayerProfile(
                node.forward_ms / 1000.0,
                node.backward_ms / 1000.0,
                round(node.output_bytes),
                round(node.parameter_bytes),
                round(node.output_bytes),
            )
            for node in nodes
        )
        layers = tuple(Layer(node.name, node.kind) for node in nodes)
        return Profile(model, LayerGraph(layers, edges), costs, batch=1, device="unknown")

    def __str__(self) -> str:
        names = [node.name for node in self.nodes]
        return "\n".join([*map(str, self.nodes), *(f"\t{names[a]} -- {names[b]}" for a, b in self.edges)])


def _find_cycle(count: int, edges: Iterable[tuple[int, int]]) -> set[int]:
    pairs = tuple(edges)
    remaining = set(range(count)) - set(in_order(count, pairs))
    producers = {target: source for source, target in pairs if source in remaining and target in remaining}
    walked: list[int] = []
    node = min(remaining, default=-1)  # each has a producer among them, so walking back ends in a cycle
    while remaining and node not in walked:
        walked.append(node)
        node = producers[node]
    return set(walked[walked.index(node) :]) if remaining else set()


def _read_node(line: str) -> GraphNode:
    parts = line.split(" -- ")
    if len(parts) not in (3, 4):
        raise ValueError(f"a node has 3 or 4 parts between ' -- ', found {len(parts)}")
    fields = parts[2].split(", ")
    if [field.partition("=")[0] for field in fields] != list(_FIELDS):
        raise ValueError(f"a node has {', '.join(f'{name}=..' for name in _FIELDS)}, found {_shorten(parts[2])!r}")
    forward, backward, sizes, parameters = (field.partition("=")[2] for field in fields)
    size_texts = sizes[1:-1].split("; ") if sizes.startswith("[") and sizes.endswith("]") else [sizes]
    stage = None
    if len(parts) == 4:
        match = re.fullmatch(r"stage_id=([0-9]{1,9})", parts[3])
        if match is None:
            raise ValueError(f"the fourth part of a node is stage_id=.., found {_shorten(parts[3])!r}")
        stage = int(match[1])
    return GraphNode(
        parts[0],
        parts[1],
        _read_number(_FIELDS[0], forward),
        _read_number(_FIELDS[1], backward),
        tuple(_read_number(_FIELDS[2], size) for size in size_texts),
        _read_number(_FIELDS[3], parameters),
        stage,
    )


def _read_edge(line: str, places: dict[str, tuple[int, int]]) -> tuple[int, int]:
    ends = line.split(" -- ")
    if len(ends) != 2:
        raise ValueError(f"an edge has 2 node ids between ' -- ', found {len(ends)} parts")
    for name in ends:
        if name not in places:
            raise ValueError(f"the edge names {_shorten(name)!r}, which no earlier line defines")
    return places[ends[0]][0], places[ends[1]][0]


def _read_number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{field} should be a number, found {_shorten(text)!r}")
    return value


def _place_error(source: str, line: int, reason: str) -> str:
    return f"{source}, line {line}: {reason}; give a whole graph.txt"


def _format_exactly(value: float) -> str:
    rounded = f"{value:.3f}"
    return rounded if float(rounded) == value else repr(value)


def _shorten(text: str) -> str:
    return text if len(text) < 80 else text[:77] + "..."


def _clean(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    while f"{text} -- ".split(" -- ") != [text, ""]:
        text = text.replace(" --", " -")
    return text


def main() -> None:
    """Writes a profile."""
    parser = argparse.ArgumentParser(description="Makes a profile for `pipedream plan` of a graph.txt.")
    parser.add_argument("graph", type=Path, help="the graph.txt")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the profile, as JSON")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples of its minibatch [default: 1]")
    options = parser.parse_args()
    try:
        profile = GraphText.load(options.graph).profile(options.graph.stem)
        replace(profile, batch=options.batch).save(options.output)
    except (OSError, PipelineError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

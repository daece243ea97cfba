"""A model split into layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pipedream.capture.slice import ModelSlice, SliceTables
from pipedream.core.model.graph import LayerGraph, layer_table


@dataclass(frozen=True)
class Captured:
    """A model split into layers.

    Layer 0 is called with the model's inputs, each later layer with one argument, what the one before returned.

    Attributes:
        layers: the user's own modules, one for each layer of the graph; a module that runs twice occurs twice. Of a
            model that runs by its own forward: a `ModelSlice` for each.
        refused: call -> why there is no cut before it.
    """

    graph: LayerGraph
    layers: tuple[nn.Module, ...]
    model: nn.Module | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.graph.layers):
            raise ValueError(f"{len(self.graph.layers)} layers in the graph but {len(self.layers)} modules")

    def stage(self, first: int, last: int) -> Sequence[tuple[str, nn.Module]]:
        """Returns what a stage of the layers first <= i < last runs, with names."""
        names = [layer.name for layer in self.graph.layers]
        if self.model is None:
            return list(zip(names[first:last], self.layers[first:last], strict=True))
        return [(names[first], ModelSlice(self.model, self.graph, first, last))]

    def arguments(self, inputs: Any) -> tuple[Any, ...]:
        """Returns what layer 0 is called with for the model's inputs."""
        return inputs if self.model is None else (inputs,)

    def __str__(self) -> str:
        return layer_table(self.graph, self.refused)


def captured_from(model: nn.Module, graph: LayerGraph, refused: Mapping[str, str] | None = None) -> Captured:
    """Returns the layers of a model that runs by its own forward."""
    tables = SliceTables(model, graph)
    layers = tuple(ModelSlice(model, graph, i, i + 1, tables) for i in range(len(graph.layers)))
    return Captured(graph, layers, model, refused or {})

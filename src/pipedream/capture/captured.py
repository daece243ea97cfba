"""What capture gives: the graph, and the user's modules that it speaks of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from pipedream.core.model.graph import LayerGraph

__all__ = ["Captured"]


@dataclass(frozen=True)
class Captured:
    """A model taken apart into layers.

    Layer 0 is called with the model's inputs, each later layer with one argument: the output of the layer
    before it, be it a tensor or a tuple.

    Attributes:
        graph: names, parameters and ties of the layers.
        layers: the user's own modules, one per layer of the graph; a module that runs twice stands twice.
    """

    graph: LayerGraph
    layers: tuple[nn.Module, ...]

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.graph.layers):
            raise ValueError(f"{len(self.graph.layers)} layers in the graph but {len(self.layers)} modules")

    def __str__(self) -> str:
        return "\n".join(f"{layer.name}: {layer.kind}" for layer in self.graph.layers)

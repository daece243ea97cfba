"""A model split into layers."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.capture.slice import Kept, ModelSlice, SliceTables
from pipedream.capture.split import Ties, group_ties
from pipedream.core.errors import CaptureError
from pipedream.core.model.graph import Layer, LayerGraph, layer_table


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

    def stage(self, first: int, last: int) -> Sequence[tuple[str, nn.Module]]:
        """Returns what a stage of the layers first <= i < last runs, with names."""
        names = [layer.name for layer in self.graph.layers]
        if self.model is None:
            return list(zip(names[first:last], self.layers[first:last], strict=True))
        kept = next((layer.kept for layer in self.layers if isinstance(layer, ModelSlice)), Kept())
        kept.stages += 1
        return [
            (names[first], ModelSlice(self.model, self.graph, first, last, SliceTables(self.model, self.graph, kept)))
        ]

    def arguments(self, inputs: Any) -> tuple[Any, ...]:
        """Returns what layer 0 is called with for the model's inputs."""
        return inputs if self.model is None else (inputs,)

    def __str__(self) -> str:
        return layer_table(self.graph, self.refused)


def build_captured(model: nn.Module, graph: LayerGraph, refused: Mapping[str, str] | None = None) -> Captured:
    """Returns the layers of a model that runs by its own forward."""
    tables = SliceTables(model, graph)
    layers = tuple(ModelSlice(model, graph, i, i + 1, tables) for i in range(len(graph.layers)))
    return Captured(graph, layers, model, refused or {})


def build_chain(model: nn.Module, layers: Sequence[nn.Module]) -> Captured:
    """Returns the layers of a model that is a chain of them."""
    return Captured(LayerGraph.chain(_describe(model, layers), *_find_tied_layers(layers)), tuple(layers))


def find_layers(model: nn.Module, names: Sequence[str]) -> Captured:
    """Finds the layers of a chain by the names that a profile or a plan lists. Raises CaptureError."""
    layers = []
    modules = dict(model.named_modules())
    for name in names:
        path = name.split("@")[0]
        if path not in modules and not (path == type(model).__name__ and len(names) == 1):
            raise CaptureError(
                f"the plan has a layer {name!r}, but the model {type(model).__name__} has no module of that name; "
                "plan again from this model's profile"
            )
        layers.append(modules.get(path, model))
    return build_chain(model, layers)


def _describe(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[Layer, ...]:
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    counts: Counter[int] = Counter()
    described = []
    for layer in layers:
        counts[id(layer)] += 1
        name = paths[id(layer)][0] or type(model).__name__
        name += f"@{counts[id(layer)]}" if counts[id(layer)] > 1 else ""
        parameters = tuple(
            f"{path}.{slot}" if path else slot
            for module in layer.modules()
            for path in paths[id(module)]
            for slot, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        )
        described.append(Layer(name, type(layer).__name__, parameters))
    return tuple(described)


def _find_tied_layers(layers: Sequence[nn.Module]) -> Ties:
    """Returns the groups of layers that share a trained parameter or state, and those of them that share state.

    To share is to use the same storage. State means running statistics, or a module with buffers that runs twice; other
    shared buffers are constants (masks, tables) and tie nothing. Different parameters of one storage count as state:
    their gradients cannot be summed.
    """
    changed_by_forward: dict[int, set[int]] = defaultdict(set)
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if any(buffer is not None for buffer in module._buffers.values()):
                changed_by_forward[id(module)].add(index)
            if isinstance(module, _NormBase):
                for statistics in (module.running_mean, module.running_var):
                    if statistics is not None:
                        changed_by_forward[statistics.untyped_storage()._cdata].add(index)
    return group_ties((layer.parameters() for layer in layers), changed_by_forward)

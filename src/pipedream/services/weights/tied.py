"""Weights that several stages hold (`core.plan.stage`): which they are."""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from pipedream.core.errors import PlanError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.stage import Stage, TiedWeights


def find_tied_weights(model: nn.Module, graph: LayerGraph, stages: Sequence[Stage]) -> tuple[TiedWeights, ...]:
    """Returns the trained weights that more than one stage holds, by the names that the graph's layers list.

    Raises:
        PlanError: stages share a view of a weight, or layers that no method can separate (`LayerGraph.inseparable`).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    holders: dict[int, set[int]] = defaultdict(set)
    storages: dict[int, set[int]] = defaultdict(set)
    for s, stage in enumerate(stages):
        for layer in graph.layers[stage.first : stage.last]:
            for name in layer.parameters:
                parameter = parameters.get(name)
                if parameter is not None and parameter.requires_grad:
                    holders[id(parameter)].add(s)
                    storages[parameter.untyped_storage()._cdata].add(id(parameter))
    by_name = dict(model.named_parameters())
    for parts in storages.values():
        if len(parts) > 1 and len(set.union(*(holders[part] for part in parts))) > 1:
            names = ", ".join(name for name, parameter in by_name.items() if id(parameter) in parts)
            raise PlanError(
                f"stages share one storage under different parameters ({names}), whose gradients cannot be summed; "
                "keep these layers in one stage, or share the parameter itself"
            )
    for group in graph.inseparable:
        if len({s for s, stage in enumerate(stages) for layer in group if stage.first <= layer < stage.last}) > 1:
            names = ", ".join(repr(graph.layers[layer].name) for layer in group)
            raise PlanError(
                f"stages share a module with buffers or running statistics, which each stage would change by itself "
                f"(layers {names}); keep these layers in one stage"
            )
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, parameter in by_name.items():
        if len(holders[id(parameter)]) > 1:
            groups[tuple(sorted(holders[id(parameter)]))].append(name)
    return tuple(
        TiedWeights(tuple(names), group, sum(by_name[name].nbytes for name in names)) for group, names in groups.items()
    )

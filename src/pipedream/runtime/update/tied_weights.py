"""Sums over the holders of tied weights (`core.plan.stage`).

At an update they sum their gradients, so that the copies stay equal to the bit. This needs stages that all make the
same updates (`core.schedule.coupling`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipedream.core.errors import PlanError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.stage import Stage, TiedWeights
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.all_reduce import all_reduce_many


def find_tied_weights(model: nn.Module, graph: LayerGraph, stages: Sequence[Stage]) -> tuple[TiedWeights, ...]:
    """Returns the trained weights that more than one stage holds, by the names that the graph's layers list.

    Raises:
        PlanError: stages share a view of a weight, or layers that no method can separate (`LayerGraph.whole`).
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
    named = dict(model.named_parameters())
    for parts in storages.values():
        if len(parts) > 1 and len(set.union(*(holders[part] for part in parts))) > 1:
            names = ", ".join(name for name, parameter in named.items() if id(parameter) in parts)
            raise PlanError(
                f"stages share one storage under different parameters ({names}), whose gradients cannot be summed; "
                "keep these layers in one stage, or share the parameter itself"
            )
    for group in graph.whole:
        if len({s for s, stage in enumerate(stages) for layer in group if stage.first <= layer < stage.last}) > 1:
            names = ", ".join(repr(graph.layers[layer].name) for layer in group)
            raise PlanError(
                f"stages share a module with buffers or running statistics, which each stage would change by itself "
                f"(layers {names}); keep these layers in one stage"
            )
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, parameter in named.items():
        if len(holders[id(parameter)]) > 1:
            groups[tuple(sorted(holders[id(parameter)]))].append(name)
    return tuple(
        TiedWeights(tuple(names), group, sum(named[name].nbytes for name in names)) for group, names in groups.items()
    )


def copy_tied(
    handles: Mapping[str, nn.Parameter], stage: int, shared: Sequence[TiedWeights]
) -> dict[str, nn.Parameter]:
    """Returns a stage's handles, with copies of weights that an earlier stage of this process holds."""
    foreign = {name for weights in shared if stage in weights.stages[1:] for name in weights.names}
    return {
        name: nn.Parameter(handle.detach().clone()) if name in foreign else handle for name, handle in handles.items()
    }


def broadcast_tied(
    model: nn.Module,
    shared: Sequence[TiedWeights],
    groups: Sequence[dist.ProcessGroup | None],
    placement: Placement,
    rank: int,
) -> None:
    """Broadcasts the first holder's values; every holder calls it, with the group of holders of each of the weights."""
    named = dict(model.named_parameters())
    for weights, group in zip(shared, groups, strict=True):
        if any(rank in placement.ranks[stage] for stage in weights.stages):
            for name in weights.names:
                first = weights.ranks(placement).index(placement.ranks[weights.stages[0]][0])
                dist.broadcast(named[name].data, group=group, group_src=first)


class TiedGradientSum:
    """One rank's part in the gradient sums over all holders of the same weights.

    Args:
        handles: holder on this rank -> its weights by name.
        replicas: of each stage; each contributes its share of their common sum.
    """

    def __init__(
        self,
        shared: TiedWeights,
        handles: Mapping[int, Mapping[str, torch.Tensor]],
        replicas: Sequence[int],
        group: Group,
    ) -> None:
        self._places = {stage: [list(named).index(name) for name in shared.names] for stage, named in handles.items()}
        some = next(iter(handles.values()))
        self._like = [some[name] for name in shared.names]
        self._replicas = replicas
        self._group = group

    def all_reduce(self, sums: Mapping[int, list[torch.Tensor | None]]) -> Waiting[None]:
        """Replaces this rank's sums, by stage, with those over all holders; yields where it would wait.

        A weight for which no holder has a gradient gets None, as in one process.
        """
        mine = [torch.zeros_like(handle) for handle in self._like]
        there = torch.zeros(len(mine), dtype=torch.float64)
        for stage, places in self._places.items():
            share = self._replicas[stage]
            for n, place in enumerate(places):
                if (gradient := sums[stage][place]) is not None:
                    mine[n] += gradient / share if share > 1 else gradient
                    there[n] += 1
        *whole, counts = yield from all_reduce_many(self._group, [*mine, there])
        for stage, places in self._places.items():
            for place, total, count in zip(places, whole, counts.tolist(), strict=True):
                sums[stage][place] = total.clone() if count else None  # each is divided and clipped in place

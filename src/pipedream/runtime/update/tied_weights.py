"""Sums over the holders of tied weights (`core.plan.stage`).

At an update the holders sum their gradients, so that the copies stay equal to the bit. All these stages must make the
same updates (`core.schedule.coupling`).
"""

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


def copy_tied(handles: Mapping[str, nn.Parameter], stage: int, tied: Sequence[TiedWeights]) -> dict[str, nn.Parameter]:
    """Returns a stage's handles, with copies in place of weights that an earlier stage of this process holds."""
    foreign = {name for weights in tied if stage in weights.stages[1:] for name in weights.names}
    return {
        name: nn.Parameter(handle.detach().clone()) if name in foreign else handle for name, handle in handles.items()
    }


def broadcast_tied(
    model: nn.Module,
    tied: Sequence[TiedWeights],
    groups: Sequence[dist.ProcessGroup | None],
    placement: Placement,
    rank: int,
) -> None:
    """Broadcasts the first holder's values; every holder calls it, with the group of holders of each of the weights."""
    by_name = dict(model.named_parameters())
    for weights, group in zip(tied, groups, strict=True):
        if any(rank in placement.ranks[stage] for stage in weights.stages):
            for name in weights.names:
                first = weights.ranks(placement).index(placement.ranks[weights.stages[0]][0])
                dist.broadcast(by_name[name].data, group=group, group_src=first)


class TiedGradientSum:
    """One rank's part in the gradient sums over all holders of the same weights.

    Args:
        handles: stage of this rank that holds the weights -> its handles by name.
        replicas: of each stage; each replica contributes its share of the stage's sum.
    """

    def __init__(
        self,
        tied: TiedWeights,
        handles: Mapping[int, Mapping[str, torch.Tensor]],
        replicas: Sequence[int],
        group: Group,
    ) -> None:
        self._indices = {stage: [list(names).index(name) for name in tied.names] for stage, names in handles.items()}
        handles_of_one = next(iter(handles.values()))
        self._like = [handles_of_one[name] for name in tied.names]
        self._replicas = replicas
        self._group = group

    def all_reduce(self, gradients: Mapping[int, list[torch.Tensor | None]]) -> Waiting[None]:
        """Replaces this rank's sums, by stage, with those over all holders; yields where it would wait.

        A weight for which no holder has a gradient gets None, as in one process.
        """
        local_sums = [torch.zeros_like(handle) for handle in self._like]
        holder_counts = torch.zeros(len(local_sums), dtype=torch.float64)
        for stage, indices in self._indices.items():
            share = self._replicas[stage]
            for n, index in enumerate(indices):
                if (gradient := gradients[stage][index]) is not None:
                    local_sums[n] += gradient / share if share > 1 else gradient
                    holder_counts[n] += 1
        *totals, counts = yield from all_reduce_many(self._group, [*local_sums, holder_counts])
        for stage, indices in self._indices.items():
            for index, total, count in zip(indices, totals, counts.tolist(), strict=True):
                gradients[stage][index] = total.clone() if count else None  # each is divided and clipped in place

"""Tied weights: weights that several stages hold, e.g. an embedding and an output layer that share a matrix.

Each holder keeps its own copy and optimizer state. At an update they sum their gradients, so that the copies stay equal
to the bit. This needs a flush: without one they update at different times, from different versions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.core.errors import PlanError
from pipedream.core.plan.placement import Placement
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.all_reduce import all_reduce_many

__all__ = ["TiedGradientSum", "TiedWeights", "broadcast_tied", "copies_of_tied", "find_tied_weights"]


@dataclass(frozen=True)
class TiedWeights:
    """Weights that the same stages hold; the first of `stages` counts them in the norm."""

    names: tuple[str, ...]
    stages: tuple[int, ...]

    def among(self, stages: Collection[int]) -> TiedWeights:
        """Returns the same weights with the holders in `stages` only."""
        return TiedWeights(self.names, tuple(stage for stage in self.stages if stage in stages))

    def ranks(self, placement: Placement) -> tuple[int, ...]:
        """Returns the ranks with a holder, in order."""
        return tuple(sorted({rank for stage in self.stages for rank in placement.ranks[stage]}))


def find_tied_weights(model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> tuple[TiedWeights, ...]:
    """Returns the trained weights that more than one stage (a list of layers) holds.

    Raises:
        PlanError: stages share a view of a weight, or a module with changing state.
    """
    holders: dict[int, set[int]] = defaultdict(set)
    storages: dict[int, set[int]] = defaultdict(set)
    moving: dict[int, set[int]] = defaultdict(set)
    for stage, layers in enumerate(stages):
        for layer in layers:
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    holders[id(parameter)].add(stage)
                    storages[parameter.untyped_storage()._cdata].add(id(parameter))
            for module in layer.modules():
                if any(buffer is not None for buffer in module._buffers.values()):
                    moving[id(module)].add(stage)
                if isinstance(module, _NormBase):
                    for statistics in (module.running_mean, module.running_var):
                        if statistics is not None:
                            moving[statistics.untyped_storage()._cdata].add(stage)
    named = dict(model.named_parameters())
    for parts in storages.values():
        if len(parts) > 1 and len(set.union(*(holders[part] for part in parts))) > 1:
            names = ", ".join(name for name, parameter in named.items() if id(parameter) in parts)
            raise PlanError(
                f"stages share one storage under different parameters ({names}), whose gradients cannot be summed; "
                "keep these layers in one stage, or share the parameter itself"
            )
    if any(len(found) > 1 for found in moving.values()):
        raise PlanError(
            "stages share a module with buffers or running statistics, which each stage would change by itself; keep "
            "these layers in one stage"
        )
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, parameter in named.items():
        if len(holders[id(parameter)]) > 1:
            groups[tuple(sorted(holders[id(parameter)]))].append(name)
    return tuple(TiedWeights(tuple(names), held) for held, names in groups.items())


def copies_of_tied(
    handles: Mapping[str, nn.Parameter], stage: int, shared: Sequence[TiedWeights]
) -> dict[str, nn.Parameter]:
    """Returns a stage's handles, with copies of weights that an earlier stage of this process holds."""
    foreign = {name for one in shared if stage in one.stages[1:] for name in one.names}
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
    for one, group in zip(shared, groups, strict=True):
        if any(rank in placement.ranks[stage] for stage in one.stages):
            for name in one.names:
                dist.broadcast(named[name].data, placement.ranks[one.stages[0]][0], group=group)


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
        self._places = {stage: [list(own).index(name) for name in shared.names] for stage, own in handles.items()}
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
                if (held := sums[stage][place]) is not None:
                    mine[n] += held / share if share > 1 else held
                    there[n] += 1
        *whole, counts = yield from all_reduce_many(self._group, [*mine, there.to(mine[0].device)])
        for stage, places in self._places.items():
            for place, total, count in zip(places, whole, counts.tolist(), strict=True):
                sums[stage][place] = total.clone() if count else None  # each is divided and clipped in place

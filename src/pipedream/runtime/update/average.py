"""Replicas that update by themselves and average their weights from time to time: local SGD and DiLoCo.

`every:H` (Stich, ICLR 2019): after H updates each replica takes the mean of all replicas' weights. `diloco:H`
(Douillard et al. 2023): that mean is where H updates have led from the outer weights; the outer optimizer, SGD with
Nesterov's momentum, moves the outer weights that way, and each replica takes them. The replicas' own optimizers keep
their state.

Between two averages the replicas differ. What is evaluated and saved then is the mean of their weights, or the outer
weights; training continues with each replica's own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pipedream.core.plan.sums import SumMethod
from pipedream.runtime.comm.channel import Group, Waiting
from pipedream.runtime.update.all_reduce import all_reduce_many

Named = dict[str, torch.Tensor]


class WeightAverage:
    """One replica's part in the averages of its stage; all make the same calls.

    Life: `end_update` after each update. At a drain `show_common` puts what all replicas have in common into the place
    of this replica's own, and `show_own` puts that back.

    Args:
        handles: the weights, by name.
        ema: the averages over time that the replica keeps of its own weights.

    Attributes:
        updates: since the weights were averaged.
        own: while the common ones are shown, ``weights/NAME`` and ``ema/NAME`` of this replica; otherwise empty.
    """

    def __init__(
        self, handles: Mapping[str, torch.Tensor], ema: Named, method: SumMethod, group: Group, replicas: int
    ) -> None:
        self.method = method
        self._handles = dict(handles)
        self._ema = ema
        self._group = group
        self._replicas = replicas
        self.updates = 0
        self.own: Named = {}

    @property
    def _weights(self) -> Named:
        """The weights, which versions move to other memory."""
        return {f"weights/{name}": handle.detach() for name, handle in self._handles.items()}

    @property
    def shown(self) -> Named:
        """This replica's tensors, or the common ones in their place."""
        return self._weights | {f"ema/{name}": average for name, average in self._ema.items()}

    def exchange_counts(self, count: int, stop_request: float) -> Waiting[tuple[int, float]]:
        """Returns an update's microbatches, and the requests to stop, of all replicas."""
        (total,) = yield from all_reduce_many(self._group, [torch.tensor([count, stop_request], dtype=torch.float64)])
        return int(total[0]), float(total[1])

    def end_update(self) -> Waiting[bool]:
        """Returns whether the weights were averaged, because a period has ended; yields where it would wait."""
        self.updates += 1
        if self.updates < self.method.period:
            return False
        self.updates = 0
        weights = self._weights
        _copy(weights, self._step((yield from self._average(weights))))
        return True

    def show_common(self) -> Waiting[None]:
        if self.own:
            return
        shown = self.shown
        self.own = {name: tensor.clone() for name, tensor in shown.items()}
        different = shown if self.updates else {name: tensor for name, tensor in shown.items() if name[:4] == "ema/"}
        _copy(shown, self._find_common((yield from self._average(different))))

    def show_own(self) -> None:
        _copy(self.shown, self.own)
        self.own = {}

    def adopt(self, own: Named | None = None) -> None:
        """Continues with common tensors that were loaded, or shows these with others of this replica's own."""
        self.own = {} if own is None else own

    def _average(self, tensors: Named) -> Waiting[Named]:
        sums = yield from all_reduce_many(self._group, list(tensors.values()))
        return {name: total / self._replicas for name, total in zip(tensors, sums, strict=True)}

    def _step(self, means: Named) -> Named:
        """Returns the weights with which all replicas continue."""
        return means

    def _find_common(self, means: Named) -> Named:
        """Returns what the replicas have in common before their next average."""
        return means


class OuterOptimizer(WeightAverage):
    """DiLoCo.

    Attributes:
        outer, velocity: the outer weights, and their momentum, by name.
    """

    def __init__(
        self, handles: Mapping[str, torch.Tensor], ema: Named, method: SumMethod, group: Group, replicas: int
    ) -> None:
        super().__init__(handles, ema, method, group, replicas)
        self.outer = {name: tensor.clone() for name, tensor in self._weights.items()}
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.outer.items()}

    def adopt(self, own: Named | None = None) -> None:
        super().adopt(own)
        _copy(self.outer, self._weights)

    def _step(self, means: Named) -> Named:
        for name, mean in means.items():
            outer, velocity = self.outer[name], self.velocity[name]
            change = outer - mean
            velocity.mul_(self.method.momentum).add_(change)
            outer.sub_(change.add_(velocity, alpha=self.method.momentum), alpha=self.method.rate)
        return self.outer

    def _find_common(self, means: Named) -> Named:
        return means | self.outer


def _copy(targets: Named, sources: Named) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)

"""Local SGD and DiLoCo: replicas update by themselves and average their weights from time to time.

`every:H` (Stich, ICLR 2019): after H updates each replica takes the mean of all replicas' weights. `diloco:H`
(Douillard et al. 2023): the outer weights minus that mean are the gradient of the outer optimizer, SGD with Nesterov's
momentum; each replica takes the outer weights that it makes. The replicas' own optimizers keep their state.

Between two averages the replicas differ. What is evaluated and saved then is the mean of their weights, or the outer
weights; training continues with each replica's own.
"""

from collections.abc import Callable, Mapping

import torch

from pipedream.runtime.comm.channel import Waiting
from pipedream.runtime.update.all_reduce import all_reduce_many
from pipedream.runtime.update.gradients import Gradients, ReducedGradients
from pipedream.runtime.update.reducer import NamedTensors, Reducer, select_kind
from pipedream.runtime.update.replica import Replica


class WeightAverage(Reducer):
    """One replica's part in the averages of its stage; all make the same calls.

    Args:
        period: updates from one average to the next.

    Attributes:
        local: while the common ones are shown, ``weights/NAME`` and ``ema/NAME`` of this replica; otherwise empty.
    """

    averages_weights = True

    def __init__(self, replica: Replica, period: int) -> None:
        self._period = period
        self._handles = dict(replica.handles)
        self._ema = replica.ema
        self._group = replica.group
        self._replicas = replica.replicas
        self.updates = 0
        self.local: NamedTensors = {}

    @property
    def _weights(self) -> NamedTensors:
        """The weights, read each time because versions move them."""
        return {f"weights/{name}": handle.detach() for name, handle in self._handles.items()}

    @property
    def tensors(self) -> NamedTensors:
        """This replica's tensors, or the common ones in their place."""
        return self._weights | {f"ema/{name}": average for name, average in self._ema.items()}

    def take(
        self, gradients: Gradients, stop_request: float, find_divisor: Callable[[ReducedGradients], float]
    ) -> Waiting[ReducedGradients]:
        reduced = ReducedGradients(*gradients.take(), stop_request)
        counts = torch.tensor([reduced.microbatches, stop_request], dtype=torch.float64)
        (total,) = yield from all_reduce_many(self._group, [counts])
        return reduced._replace(present=int(total[0]), stop_request=float(total[1]))

    def after_step(self) -> Waiting[bool]:
        self.updates += 1
        if self.updates < self._period:
            return False
        self.updates = 0
        weights = self._weights
        _copy(weights, self._step((yield from self._average(weights))))
        return True

    def show_common(self) -> Waiting[None]:
        if self.local:
            return
        values = self.tensors
        self.local = {name: tensor.clone() for name, tensor in values.items()}
        differing = values if self.updates else {name: tensor for name, tensor in values.items() if name[:4] == "ema/"}
        _copy(values, self._find_common((yield from self._average(differing))))

    def show_local(self) -> None:
        _copy(self.tensors, self.local)
        self.local = {}

    def adopt(self) -> None:
        self.local = {}

    def local_tensors(self) -> NamedTensors:
        return dict(self.local)

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        """Loads this replica's part of a checkpoint, whose common weights are shown."""
        self.adopt()
        self.updates = updates
        self.local = {name: local[name].clone() for name in self.tensors if name in local}

    def _average(self, tensors: NamedTensors) -> Waiting[NamedTensors]:
        sums = yield from all_reduce_many(self._group, list(tensors.values()))
        return {name: total / self._replicas for name, total in zip(tensors, sums, strict=True)}

    def _step(self, means: NamedTensors) -> NamedTensors:
        """Returns the weights with which all replicas continue."""
        return means

    def _find_common(self, means: NamedTensors) -> NamedTensors:
        """Returns what the replicas have in common before their next average."""
        return means


class OuterOptimizer(WeightAverage):
    """DiLoCo.

    Attributes:
        outer, velocity: the outer weights, and their momentum, by name.
    """

    def __init__(self, replica: Replica, period: int, rate: float, momentum: float) -> None:
        super().__init__(replica, period)
        self._rate, self._momentum = rate, momentum
        self.outer = {name: handle.detach().clone() for name, handle in replica.handles.items()}
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.outer.items()}

    def adopt(self) -> None:
        super().adopt()
        for name, handle in self._handles.items():
            self.outer[name].copy_(handle.detach())

    def common_tensors(self) -> NamedTensors:
        return {f"velocity/{name}": velocity for name, velocity in self.velocity.items()}

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        super().load(local, common, updates)
        velocity = select_kind("velocity", common)
        for name, tensor in self.velocity.items():
            tensor.copy_(velocity[name]) if name in velocity else tensor.zero_()

    def _step(self, means: NamedTensors) -> NamedTensors:
        for name, outer in self.outer.items():
            change = outer - means[f"weights/{name}"]
            velocity = self.velocity[name].mul_(self._momentum).add_(change)
            outer.sub_(change.add_(velocity, alpha=self._momentum), alpha=self._rate)
        return self._find_common({})

    def _find_common(self, means: NamedTensors) -> NamedTensors:
        return means | {f"weights/{name}": outer for name, outer in self.outer.items()}


def _copy(targets: NamedTensors, sources: NamedTensors) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)

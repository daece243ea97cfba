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
        yield from self._end_period()
        return True

    def show_common(self) -> Waiting[None]:
        if self.local:
            return
        values = self.tensors
        self.local = {name: tensor.clone() for name, tensor in values.items()}
        _copy(values, self._find_common((yield from self._average(self._list_differing(values)))))

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

    def _end_period(self) -> Waiting[None]:
        """Gives all replicas the weights with which they continue."""
        weights = self._weights
        _copy(weights, (yield from self._average(weights)))

    def _list_differing(self, values: NamedTensors) -> NamedTensors:
        """Returns what is averaged to evaluate, given this replica's tensors."""
        return values if self.updates else {name: tensor for name, tensor in values.items() if name[:4] == "ema/"}

    def _find_common(self, means: NamedTensors) -> NamedTensors:
        """Returns what the replicas have in common before their next average."""
        return means


class OuterOptimizer(WeightAverage):
    """DiLoCo: from the outer weights to the mean is the outer gradient.

    Attributes:
        outer, velocity: the outer weights, and their momentum if there is one, by name.
    """

    def __init__(self, replica: Replica, period: int, rate: float, momentum: float) -> None:
        super().__init__(replica, period)
        self._rate, self._momentum = rate, momentum
        self.outer = {name: handle.detach().clone() for name, handle in replica.handles.items()}
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.outer.items() if momentum}

    def adopt(self) -> None:
        super().adopt()
        for name, handle in self._handles.items():
            self.outer[name].copy_(handle.detach())

    def common_tensors(self) -> NamedTensors:
        return {f"velocity/{name}": velocity for name, velocity in self.velocity.items()}

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        super().load(local, common, updates)
        load_kind("velocity", self.velocity, common)

    def _end_period(self) -> Waiting[None]:
        self._step((yield from self._find_gradient()))
        _copy(self._weights, self._find_common({}))

    def _find_gradient(self) -> Waiting[NamedTensors]:
        """Returns the outer gradient, in tensors that the step may change."""
        means = yield from self._average(self._weights)
        return {name: outer - means[f"weights/{name}"] for name, outer in self.outer.items()}

    def _step(self, gradient: NamedTensors) -> None:
        for name, outer in self.outer.items():
            change = gradient[name]
            if self._momentum:
                velocity = self.velocity[name].mul_(self._momentum).add_(change)
                change = change.add_(velocity, alpha=self._momentum)
            outer.sub_(change, alpha=self._rate)

    def _find_common(self, means: NamedTensors) -> NamedTensors:
        return means | {f"weights/{name}": outer for name, outer in self.outer.items()}


def load_kind(kind: str, targets: NamedTensors, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies a checkpoint's tensors KIND/NAME to `targets`; those that it lacks become 0."""
    saved = select_kind(kind, tensors)
    for name, target in targets.items():
        target.copy_(saved[name]) if name in saved else target.zero_()


def _copy(targets: NamedTensors, sources: NamedTensors) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)

"""Local SGD and DiLoCo: replicas update by themselves and average their weights from time to time.

`every:H` (Stich, ICLR 2019): after H updates each replica takes the mean of all replicas' weights. `diloco:H`
(Douillard et al. 2023): the outer weights minus that mean are the gradient of the outer optimizer, SGD with Nesterov's
momentum; each replica takes the outer weights that it makes. The replicas' own optimizers keep their state.

With `overlap=1` an average takes as long as the next period: eager updates (Kale, Douillard and Donchev,
arXiv 2502.12996). Replica m of M uses its own part d_m of an outer gradient at once, and those of the others, which
travel meanwhile, at the next one: g_m(t) = (d_m(t) + sum_{j != m} d_j(t - 1)) / M. So each has outer weights and a
momentum of its own, and has in common with the others the mean of these outer weights.

Between two averages the replicas differ. What is evaluated and saved then is the mean of their weights, or the outer
weights; training continues with each replica's own.
"""

from collections.abc import Callable, Mapping

import torch

from pipedream.extensions.reducers.averages.late import LateSums, SlicedSums
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
    _overlaps = False

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
        self.updates = self.updates % self._period + 1
        if self.updates < self._period:
            return False
        self.updates = self._period if self._overlaps else 0  # 0 says that all replicas have the same weights
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

    Args:
        overlaps: averages take as long as the next period.

    Attributes:
        outer, velocity: the outer weights, and their momentum if there is one, by name.
        late: what the others have added to the last outer gradient, by name, once it is there.
    """

    def __init__(self, replica: Replica, period: int, rate: float, momentum: float, *, overlaps: bool = False) -> None:
        super().__init__(replica, period)
        self._rate, self._momentum, self._overlaps = rate, momentum, overlaps
        self._pending: LateSums | None = None
        self.late: NamedTensors = {}
        self.outer = {name: handle.detach().clone() for name, handle in replica.handles.items()}
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.outer.items() if momentum}

    def adopt(self) -> None:
        super().adopt()
        self.late, self._pending = {}, None
        for name, handle in self._handles.items():
            self.outer[name].copy_(handle.detach())

    def after_step(self) -> Waiting[bool]:
        if self._pending is not None:
            self._pending.begin_next()
        return (yield from super().after_step())

    def show_common(self) -> Waiting[None]:
        yield from self._receive()
        yield from super().show_common()

    def local_tensors(self) -> NamedTensors:
        kinds = {"outer": self.outer, "velocity": self.velocity, "late": self.late} if self._overlaps else {}
        return super().local_tensors() | {f"{kind}/{n}": t for kind, named in kinds.items() for n, t in named.items()}

    def common_tensors(self) -> NamedTensors:
        return {} if self._overlaps else {f"velocity/{name}": tensor for name, tensor in self.velocity.items()}

    def load(self, local: Mapping[str, torch.Tensor], common: Mapping[str, torch.Tensor], updates: int) -> None:
        super().load(local, common, updates)
        load_kind("velocity", self.velocity, local if self._overlaps else common)
        if self._overlaps:
            # `local` has the tensors of all stages that have this replica here.
            late, outer = ({n: t for n, t in select_kind(kind, local).items() if n in self.outer}
                           for kind in ("late", "outer"))  # fmt: skip
            self.late = {name: tensor.clone() for name, tensor in late.items()}
            _copy(self.outer, outer)

    def _end_period(self) -> Waiting[None]:
        self._step((yield from (self._find_late_gradient() if self._overlaps else self._find_gradient())))
        _copy(self._weights, {f"weights/{name}": outer for name, outer in self.outer.items()})

    def _find_gradient(self) -> Waiting[NamedTensors]:
        """Returns the outer gradient, in tensors that the step may change."""
        means = yield from self._average(self._weights)
        return {name: outer - means[f"weights/{name}"] for name, outer in self.outer.items()}

    def _find_late_gradient(self) -> Waiting[NamedTensors]:
        """Begins the sum of this period, and ends the one of the last."""
        yield from self._receive()
        self._pending = self._begin_sum()
        gradient = {}
        for (name, outer), part in zip(self.outer.items(), self._pending.parts, strict=True):
            late = self.late.get(name)
            gradient[name] = ((part if late is None else part + late) / self._replicas).to(outer.dtype)
        self.late = {}
        return gradient

    def _begin_sum(self) -> LateSums:
        """Begins to sum what the replicas add to an outer gradient, in a slice for each update of a period."""
        changes = [outer - self._handles[name].detach() for name, outer in self.outer.items()]
        return SlicedSums(self._group, changes, self._period)

    def _receive(self) -> Waiting[None]:
        if self._pending is not None:
            totals = yield from self._pending.take()
            rows = zip(self.outer, totals, self._pending.parts, strict=True)
            self.late, self._pending = {name: total - part for name, total, part in rows}, None

    def _step(self, gradient: NamedTensors) -> None:
        for name, outer in self.outer.items():
            change = gradient[name]
            if self._momentum:
                velocity = self.velocity[name].mul_(self._momentum).add_(change)
                change = change.add_(velocity, alpha=self._momentum)
            outer.sub_(change, alpha=self._rate)

    def _list_differing(self, values: NamedTensors) -> NamedTensors:
        outer = {f"weights/{name}": outer for name, outer in self.outer.items() if self._overlaps}
        return super()._list_differing(values) | outer

    def _find_common(self, means: NamedTensors) -> NamedTensors:
        return means if self._overlaps else means | {f"weights/{name}": outer for name, outer in self.outer.items()}


def load_kind(kind: str, targets: NamedTensors, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies a checkpoint's tensors KIND/NAME to `targets`; those that it lacks become 0."""
    saved = select_kind(kind, tensors)
    for name, target in targets.items():
        target.copy_(saved[name]) if name in saved else target.zero_()


def _copy(targets: NamedTensors, sources: NamedTensors) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)

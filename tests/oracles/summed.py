"""How replicas agree, in plain PyTorch: a serial loop with a copy of the weights for each replica of each stage.

Only the library's schedule (who reads which version, and which microbatches an update holds) and its seeds are used.
PowerSGD is written with one error for all replicas, since what its factors approximate is the sum of the gradients and
the sum of the errors.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2
from typing import Any

import reference
import torch
from torch import Tensor, nn

from pipedream.core.schedule.schedule import Schedule
from pipedream.core.seeds import layer_seed


@dataclass
class Reducer:
    """How the replicas of one stage agree.

    Attributes:
        kind: 'full', a dtype, 'powersgd', 'every' or 'diloco'.
        number: rank, or updates from one average to the next.
        rate, momentum: of DiLoCo's outer steps.
    """

    kind: Any = "full"
    number: int = 0
    rate: float = 0.7
    momentum: float = 0.9
    errors: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    outer: dict[str, Tensor] = field(default_factory=dict)
    velocity: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0

    @property
    def averages(self) -> bool:
        return self.kind in ("every", "diloco")

    def sum_up(self, name: str, gradients: Sequence[Tensor], weight: float, unit: float) -> Tensor:
        """Returns the mean gradient that all replicas apply.

        Args:
            weight: of all gradients together.
            unit: in which they are sent (docs/couplings.md), which decides what is too small for 16 bits.
        """
        if isinstance(self.kind, torch.dtype):
            total = (gradients[0] / unit).to(self.kind)
            for gradient in gradients[1:]:
                total = total + (gradient / unit).to(self.kind)
            return total.to(gradients[0].dtype) * unit / weight
        mean = sum(gradients, torch.zeros_like(gradients[0])) / weight
        rows, columns = mean.shape[0], mean.numel() // mean.shape[0]
        if self.kind != "powersgd" or 2 * self.number * (rows + columns) >= rows * columns:
            return mean
        matrix = mean.reshape(rows, columns) + self.errors.get(name, 0.0)
        if name not in self.factors:
            generator = torch.Generator().manual_seed(layer_seed(0, 0, name))
            self.factors[name] = torch.randn(columns, self.number, generator=generator).to(mean.dtype)
        basis = orthonormal(matrix @ self.factors[name])
        self.factors[name] = matrix.T @ basis
        approximation = basis @ self.factors[name].T
        self.errors[name] = matrix - approximation
        return approximation.reshape(mean.shape)

    def average(self, copies: Sequence[dict[str, nn.Parameter]]) -> None:
        """Ends an update of all replicas."""
        self.updates += 1
        if not self.averages or self.updates % self.number:
            return
        for name in copies[0]:
            mean = torch.stack([replica[name].data for replica in copies]).mean(0)
            if self.kind == "diloco":
                start = self.outer[name]
                change = start - mean
                self.velocity[name] = self.momentum * self.velocity.get(name, torch.zeros_like(mean)) + change
                mean = start - self.rate * (change + self.momentum * self.velocity[name])
                self.outer[name] = mean.clone()
            for replica in copies:
                replica[name].data.copy_(mean)

    def common(self, copies: Sequence[dict[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Returns the weights that are evaluated."""
        if self.kind == "diloco":
            return {name: tensor.clone() for name, tensor in self.outer.items()}
        return {name: torch.stack([replica[name].data for replica in copies]).mean(0) for name in copies[0]}


def orthonormal(columns: Tensor) -> Tensor:
    """Returns the columns orthonormalised one after the other, twice (Gram and Schmidt)."""
    columns = columns.clone()
    for number in range(columns.shape[1]):
        for _ in range(2):
            for other in range(number):
                columns[:, number] -= (columns[:, other] @ columns[:, number]) * columns[:, other]
            columns[:, number] /= columns[:, number].norm()
    return columns


@dataclass
class Answer:
    """What the loop gives.

    Attributes:
        losses: one for each minibatch.
        at: minibatches done -> the weights that are evaluated then, at each drain and at the end.
        ema: the same of the averages.
    """

    losses: list[float] = field(default_factory=list)
    at: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    ema: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def train(
    model: nn.Module,
    schedule: Schedule,
    batches: Sequence[tuple[Tensor, Tensor]],
    total: reference.Total,
    optimizer: reference.Factory,
    agreement: Reducer,
    *,
    seed: int = 0,
    drains: Sequence[int] = (),
    clip: float | None = None,
    ema: float | None = None,
) -> Answer:
    """Trains a copy of the model.

    Args:
        agreement: of which each stage with replicas has its own.
        drains: minibatch numbers before which versions begin again.
        clip: greatest norm of the gradients of each replica of each stage.
        ema: decay of the average that each replica keeps.
    """
    return _Loop(model, schedule, total, optimizer, agreement, seed, clip, ema).run(batches, drains)


class _Loop:
    def __init__(self, model: nn.Module, schedule: Schedule, total: Any, optimizer: Any, *options: Any) -> None:
        agreement, self.seed, self.clip, self.decay = options
        self.model = copy.deepcopy(model).train()
        self.schedule, self.total = schedule, total
        plan = schedule.plan
        self.names = [name for stage in plan.stages for name in stage.names]
        self.owned = [
            [n for n, _ in model.named_parameters() if any(n.startswith(f"{layer}.") for layer in stage.names)]
            for stage in plan.stages
        ]
        self.replicas = plan.replicas
        self.copies = [
            [{n: nn.Parameter(model.get_parameter(n).detach().clone()) for n in names} for _ in range(count)]
            for names, count in zip(self.owned, self.replicas, strict=True)
        ]
        self.steppers = [[optimizer(list(c.items())) if c else None for c in copies] for copies in self.copies]
        self.averages = [[_values(c) for c in copies] for copies in self.copies]
        self.agreements = [copy.deepcopy(agreement) if count > 1 else Reducer() for count in self.replicas]
        for ours, copies in zip(self.agreements, self.copies, strict=True):
            ours.outer = _values(copies[0])

    def run(self, batches: Sequence[tuple[Tensor, Tensor]], drains: Sequence[int]) -> Answer:
        answer = Answer()
        edges = [0, *(drain for drain in drains if drain < len(batches)), len(batches)]
        for begin, end in pairwise(edges):
            self._run_stream(batches[begin:end], begin, answer)
            answer.at[end] = self._common([_as_parameters(c) for c in self.copies])
            answer.ema[end] = self._common([_as_parameters(c) for c in self.averages], ema=True)
        return answer

    def _common(self, copies: Any, ema: bool = False) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for ours, replicas in zip(self.agreements, copies, strict=True):
            named |= (Reducer() if ema else ours).common(replicas)
        return named

    def _run_stream(self, batches: Sequence[tuple[Tensor, Tensor]], first: int, answer: Answer) -> None:
        m, updates, weights = self.schedule.microbatches, self.schedule.updates, self.schedule.weights
        stages, number = range(len(self.owned)), [0]
        versions = [[[_values(c)] for c in copies] for copies in self.copies]
        pending: list[Any] = [self._nothing(s) for s in stages]
        count = len(batches) * m
        with reference.seeded(self.model, self.names, number, self.seed):
            for k in range(count):
                number[0] = first * m + k
                x, y = batches[k // m]
                xs, ys = reference.pieces(x, y, m)[k % m]
                if k % m == 0:
                    sums = [0.0, 0.0]
                if len(xs):
                    read = [versions[s][k % self.replicas[s]][weights.forward_version(s, k)] for s in stages]
                    loss, weight = self._differentiate(read, xs, ys)
                    sums = [sums[0] + loss, sums[1] + weight]
                    for s in stages:
                        self._add(pending[s][k % self.replicas[s]], s, weight)
                if k % m == m - 1:
                    answer.losses.append(sums[0] / sums[1])
                for s in stages:
                    if (k + 1) % updates.per_update[s] == 0 or k + 1 == count:
                        self._update(s, pending[s])
                        pending[s] = self._nothing(s)
                        for replica, replica_versions in enumerate(versions[s]):
                            replica_versions.append(_values(self.copies[s][replica]))

    def _nothing(self, stage: int) -> list[Any]:
        return [[defaultdict(float), 0.0] for _ in range(self.replicas[stage])]

    def _differentiate(self, read: Sequence[dict[str, Tensor]], xs: Tensor, ys: Tensor) -> tuple[float, float]:
        with torch.no_grad():
            for name, value in (item for named in read for item in named.items()):
                self.model.get_parameter(name).copy_(value)
        self.model.zero_grad()
        loss, weight = self.total(self.model(xs.clone()), ys)
        (loss / weight if self.schedule.updates.mean_of_rounds else loss).backward()
        return float(loss.detach()), weight

    def _add(self, share: list[Any], stage: int, weight: float) -> None:
        for name in self.owned[stage]:
            if (gradient := self.model.get_parameter(name).grad) is not None:
                share[0][name] = share[0][name] + gradient.clone()
        share[1] += 1.0 if self.schedule.updates.mean_of_rounds else weight

    def _update(self, stage: int, shares: list[Any]) -> None:
        ours, updates = self.agreements[stage], self.schedule.updates
        present = sum(weight > 0 for _, weight in shares)
        whole = sum(weight for _, weight in shares)
        factor = updates.per_update[stage] / updates.per_update[0]
        if not ours.averages and updates.mean_of_rounds:
            factor *= present / self.replicas[stage]
        common = {} if ours.averages else self._sum_up(stage, shares, whole)
        for replica, (gradients, weight) in enumerate(shares):
            mine = {name: gradient / weight for name, gradient in gradients.items()} if ours.averages else common
            self._step(stage, replica, mine, factor)
        ours.average(self.copies[stage])

    def _sum_up(self, stage: int, shares: list[Any], whole: float) -> dict[str, Tensor]:
        common = {}
        for name, parameter in self.copies[stage][0].items():
            if any(name in gradients for gradients, _ in shares):
                parts = [torch.as_tensor(g[name]) if name in g else torch.zeros_like(parameter) for g, _ in shares]
                unit = 1.0 if self.schedule.updates.mean_of_rounds else 2.0 ** round(log2(whole))
                common[name] = self.agreements[stage].sum_up(name, [g.detach() for g in parts], whole, unit)
        return common

    def _step(self, stage: int, replica: int, gradients: dict[str, Tensor], factor: float) -> None:
        stepper, named = self.steppers[stage][replica], self.copies[stage][replica]
        for name, parameter in named.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        if stepper is None:
            return
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), self.clip)
        rates = [group["lr"] for group in stepper.param_groups]
        for group in stepper.param_groups:
            group["lr"] *= factor
        stepper.step()
        for group, rate in zip(stepper.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.decay is not None:
            for name, average in self.averages[stage][replica].items():
                average.mul_(self.decay).add_(named[name].detach(), alpha=1 - self.decay)


def _values(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _as_parameters(copies: Any) -> list[dict[str, nn.Parameter]]:
    return [{name: nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()} for named in copies]

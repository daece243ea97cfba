"""A stage of the serial rule: its weights, all their versions since the last drain, and its next update."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any

import torch
from torch import nn

from pipedream.apps.testing.rules import Reducer, Values, copy_values

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


@dataclass
class Version:
    """A stage's weights after an update, and what one update more is expected to add to them."""

    weights: Values
    added: Values = field(default_factory=dict)

    def predict(self, horizon: float) -> Values:
        added = self.added if horizon else {}
        return {name: w + horizon * added[name] if name in added else w for name, w in self.weights.items()}


class Copy:
    """The weights of a stage, with optimizer, average and versions; each replica has its own where they differ."""

    def __init__(self, weights: Mapping[str, Any], optimizer: Factory, scheduler: Any) -> None:
        self.weights, probed = (
            {n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in weights.items()} for _ in range(2)
        )
        self.optimizer: Any = optimizer(list(self.weights.items())) if weights else None
        self.rates = _Rates(optimizer(list(probed.items())) if weights else None, scheduler)
        self.ema, self.newest = copy_values(self.weights), copy_values(self.weights)
        self.versions: list[Any] = [Version(copy_values(self.weights))]
        self._predicted_by: tuple[str, float] = "", 0.0

    def predict_by(self, by: str, gamma: float, coming: list[float]) -> None:
        """Predicts by another way from now on; if the one before was the same, its average continues."""
        if self._predicted_by != (by, gamma):
            self._predicted_by, self.versions[-1].added = (by, gamma), {}
        if by == "velocity":
            self.versions[-1].added = self._find_velocity(coming)

    def finish_update(self, coming: list[float]) -> None:
        """Takes what forwards read from now on as a version; `coming` are the groups' next rates."""
        old, new = self.versions[-1], Version(copy_values(self.newest))
        by, gamma = self._predicted_by
        if by == "velocity":
            new.added = self._find_velocity(coming)
        elif by:
            changes = {name: self.newest[name] - w for name, w in old.weights.items()}
            new.added = {n: gamma * old.added.get(n, 0.0) + (1 - gamma) * d for n, d in changes.items()}
        self.versions.append(new)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        state = {} if self.optimizer is None else self.optimizer.state
        return {name: dict(state[p]) for name, p in self.weights.items() if p in state}

    def _find_velocity(self, coming: list[float]) -> Values:
        """Returns -lr v: of SGD, of Adam m / (sqrt(v) + eps), m and v corrected for their start, or its own."""
        names, velocity = {id(p): name for name, p in self.weights.items()}, Values()
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for group, rate in zip(groups, coming, strict=True):
            for p in group["params"]:
                state, v = self.optimizer.state.get(p, {}), None
                if hasattr(self.optimizer, "velocity"):
                    v = self.optimizer.velocity(p)
                elif "momentum_buffer" in state:
                    v = state["momentum_buffer"]
                elif "exp_avg" in state:
                    first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
                    v = state["exp_avg"] / first / ((state["exp_avg_sq"] / second).sqrt() + group["eps"])
                if v is not None:
                    velocity[names[id(p)]] = -rate * v
        return velocity


class _Rates:
    """The rates of an optimizer's groups after each step of the schedule: all stages have one clock."""

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self._groups = [] if optimizer is None else optimizer.param_groups
        self._scheduler = scheduler(optimizer) if scheduler and optimizer is not None else None
        if self._scheduler is not None:
            for p in (p for group in self._groups for p in group["params"]):
                p.grad = torch.zeros_like(p)
            optimizer.step()  # so that the schedule sees one
        self._rows = [[group["lr"] for group in self._groups]]

    def at(self, clock: int) -> list[float]:
        while self._scheduler is not None and len(self._rows) <= clock:
            self._scheduler.step()
            self._rows.append([group["lr"] for group in self._groups])
        return self._rows[min(clock, len(self._rows) - 1)]


class Stage:
    """Layers, the replicas' copies of their weights and buffers, and what the next update contains so far.

    Args:
        names: of its layers, or of single weights and buffers.
    """

    def __init__(
        self, model: nn.Module, names: Sequence[str], reducer: Reducer, replicas: int, *of_copies: Any
    ) -> None:
        below = tuple(f"{name}." for name in names)
        weights, buffers = (
            {n: t for n, t in named if n in names or n.startswith(below)}
            for named in (model.named_parameters(), model.named_buffers())
        )
        self.reducer = copy.deepcopy(reducer) if replicas > 1 else Reducer()
        self.copies = [Copy(weights, *of_copies) for _ in range(replicas if self.reducer.averages else 1)]
        self.reducer.begin(self.copies[0].newest)
        self.buffers, self.buffers_before = [copy_values(buffers) for _ in range(replicas)], copy_values(buffers)
        self.taken_at: Values = {}
        self.updates = self.skipped = 0
        self.rate = next(iter(self.copies[0].rates.at(0)), None)
        self.clear()

    def clear(self) -> None:
        self.gradients: list[Values] = [{} for _ in self.buffers]
        self.loss_weights = [0.0 for _ in self.buffers]
        self.is_empty = True

    def copy_of(self, k: int) -> Copy:
        """Returns the weights of the replica that takes microbatch k."""
        return self.copies[k % len(self.copies)]

    def buffers_of(self, k: int) -> Values:
        """Returns the buffers of that replica."""
        return self.buffers[k % len(self.buffers)]

    def add(self, k: int, gradients: Values, loss_weight: float) -> None:
        """Adds what a microbatch gives; one without samples adds nothing, but belongs to the update."""
        replica = k % len(self.buffers)
        self.is_empty, sums = False, self.gradients[replica]
        for name in self.copies[0].weights:
            if name in gradients:
                sums[name] = sums[name] + gradients[name] if name in sums else gradients[name]
        self.loss_weights[replica] += loss_weight

    def is_finite(self) -> bool:
        return all(bool(g.isfinite().all()) for sums in self.gradients for g in sums.values())

    def mean_gradients(self, unit: float | None) -> list[Values]:
        """Returns the mean of the gradients for each copy; `unit`: see `Reducer.sum_up`."""
        whole = sum(self.loss_weights)
        if self.reducer.averages:
            rows = zip(self.gradients, self.loss_weights, strict=True)
            return [{name: g / w for name, g in sums.items() if w} for sums, w in rows]
        common = {}
        for name, parameter in self.copies[0].weights.items():
            if any(name in sums for sums in self.gradients):
                parts = [sums[name] if name in sums else torch.zeros_like(parameter) for sums in self.gradients]
                size = 2.0 ** round(log2(whole)) if unit is None and whole else unit or 1.0
                common[name] = self.reducer.sum_up(name, parts, whole, size)
        return [common]

    @property
    def present(self) -> float:
        """The share of the replicas that have a gradient."""
        return sum(weight > 0 for weight in self.loss_weights) / len(self.loss_weights)

    def averages(self) -> Values:
        """Returns the averages over time."""
        return Reducer().common([each.ema for each in self.copies])

    def weights(self) -> Values:
        """Returns the weights that are evaluated."""
        return self.reducer.common([each.newest for each in self.copies])


def average_buffers(stage: Stage) -> None:
    """Gives all replicas the mean of their statistics, and the sum of what they have counted since the last time."""
    for name, before in stage.buffers_before.items() if len(stage.buffers) > 1 else ():
        rows = torch.stack([replica[name] for replica in stage.buffers])
        whole = rows.mean(0) if rows.is_floating_point() else rows.sum(0) - (len(rows) - 1) * before
        for replica in stage.buffers:
            replica[name] = whole.clone()
    stage.buffers_before = copy_values(stage.buffers[0])

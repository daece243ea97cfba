"""Weight predictions of one stage, as tensors (see `core.schedule.weights`).

At a stage with one set of weights, a prediction is written into its storage for one pass, and the weights are restored
to the bit afterwards. If the backward must read what its forward read, or several forwards the same, the prediction is
kept. The last update or the average of updates is kept too, and saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import sqrt
from typing import Any

import torch

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.weights import AVERAGE, DIFFERENCE, VELOCITY, WeightPrediction, WeightRule
from pipedream.runtime.stage.part import PassFacts, StageFacts, StagePart, Task
from pipedream.runtime.stage.stage_module import SavedForward
from pipedream.runtime.stage.versions import Versions, WeightSet
from pipedream.runtime.update.optimizer import Optimizer

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


class WeightPredictions(StagePart):
    """The weight predictions of one stage, whose optimizer `check` has passed."""

    task = Task.PREDICT

    def __init__(self, rule: WeightRule, stage: int, versions: Versions, optimizer: Optimizer) -> None:
        self._stage = stage
        self._versions = versions
        self._optimizer = optimizer
        self._forward = _drop_if_zero(rule.forward_prediction, stage)
        self._backward = _drop_if_zero(rule.backward_prediction, stage)
        self._kept_until = rule.kept_until(stage)
        predictions = [prediction for prediction in (self._forward, self._backward) if prediction is not None]
        self._handles = list(versions.handles.values())
        # The last update, or the average of updates; 0 before the first.
        self._update_steps = {
            prediction.by: [torch.zeros_like(h) for h in self._handles]
            for prediction in predictions
            if prediction.by != VELOCITY
        }
        self._gamma = next((prediction.gamma(stage) for prediction in predictions if prediction.by == AVERAGE), 0.0)
        self._saved: list[torch.Tensor] = []
        self._shared: list[torch.Tensor] = []
        self._shared_for: int | None = None
        self._shared_from = 0

    @classmethod
    def check(cls, facts: StageFacts, program: Program) -> None:
        if program.weights.predicts_by_velocity(facts.stage):
            check_velocity(facts.optimizer.optimizer)

    @classmethod
    def make(cls, facts: PassFacts, program: Program) -> StagePart | None:
        if not isinstance(facts, StageFacts) or not program.weights.predictions(facts.stage):
            return None
        return cls(program.weights, facts.stage, facts.versions, facts.optimizer)

    def begin(self) -> None:
        self._shared_for = None

    def acquire(self, version: int) -> tuple[WeightSet, int]:
        """Returns what a forward reads (see `Versions.read`), and the version it is predicted from."""
        if self._kept_until is Kind.BACKWARD:
            weights = self._versions.read_prediction(version, self._fill)
            return weights, weights.version
        if self._kept_until is None:
            weights = self._versions.acquire(version)
            return weights, weights.version
        if version != self._shared_for:
            self._shared = self._shared or [torch.empty_like(w) for w in self._weights]
            _copy(self._shared, self._weights)
            assert self._forward is not None
            self._advance(self._forward, self._shared)
            self._shared_for = version
            self._shared_from = self._versions.newest
        return self._versions.acquire(self._versions.newest), self._shared_from

    def forward(self, saved: SavedForward) -> AbstractContextManager[None]:
        if self._forward is None or self._kept_until is Kind.BACKWARD:
            return super().forward(saved)
        return self._write_in_place(self._forward if self._kept_until is None else self._shared)

    def backward(self, saved: SavedForward) -> AbstractContextManager[None]:
        return super().backward(saved) if self._backward is None else self._write_in_place(self._backward)

    def before_step(self) -> None:
        if DIFFERENCE in self._update_steps:
            _copy(self._update_steps[DIFFERENCE], self._weights)
        if AVERAGE in self._update_steps:
            self._save_weights()

    def after_step(self) -> None:
        if DIFFERENCE in self._update_steps and self._handles:
            difference = self._update_steps[DIFFERENCE]
            torch._foreach_neg_(difference)
            torch._foreach_add_(difference, self._weights)
        if AVERAGE in self._update_steps and self._handles:
            step = torch._foreach_sub(self._weights, self._saved)
            torch._foreach_lerp_(self._update_steps[AVERAGE], step, 1.0 - self._gamma)

    def tensors(self) -> dict[str, torch.Tensor]:
        names = list(self._versions.handles)
        return {f"{kind}/{n}": t for kind, row in self._update_steps.items() for n, t in zip(names, row, strict=True)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the state; tensors that another method's checkpoint lacks become 0."""
        for name, tensor in self.tensors().items():
            saved = tensors.get(name)
            tensor.zero_() if saved is None else tensor.copy_(saved)

    @property
    def _weights(self) -> list[torch.Tensor]:
        # Read each time, because updates move handles; .data, because graphs check version counters.
        return [handle.data for handle in self._handles]

    @contextmanager
    def _write_in_place(self, prediction: WeightPrediction | list[torch.Tensor]) -> Iterator[None]:
        self._save_weights()
        if isinstance(prediction, WeightPrediction):
            self._advance(prediction, self._weights)
        else:
            _copy(self._weights, prediction)
        try:
            yield
        finally:
            _copy(self._weights, self._saved)

    def _save_weights(self) -> None:
        self._saved = self._saved or [torch.empty_like(w) for w in self._weights]
        _copy(self._saved, self._weights)

    def _fill(self, leaves: Mapping[str, torch.Tensor]) -> None:
        assert self._forward is not None
        targets = [leaves[name] for name in self._versions.handles]
        _copy(targets, self._weights)
        self._advance(self._forward, targets)

    def _advance(self, prediction: WeightPrediction, targets: list[torch.Tensor]) -> None:
        """Moves copies of the weights by as many updates as the prediction's horizon."""
        horizon = prediction.horizons[self._stage]
        if prediction.by != VELOCITY:
            for target, step in zip(targets, self._update_steps[prediction.by], strict=True):
                target.add_(step, alpha=horizon)
            return
        self._optimizer.schedule.step()  # the learning rate of the coming update
        by_handle = dict(zip(self._handles, targets, strict=True))
        add_velocity(self._optimizer.optimizer, by_handle, horizon * self._optimizer.schedule.factor)


def _drop_if_zero(prediction: WeightPrediction | None, stage: int) -> WeightPrediction | None:
    return prediction if prediction is not None and prediction.horizons[stage] else None


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def add_velocity(
    optimizer: torch.optim.Optimizer, targets: Mapping[torch.nn.Parameter, torch.Tensor], updates: float
) -> None:
    """Moves tensors in place by a number of steps (negative for backwards), if there is a velocity yet.

    The velocity is the direction of the optimizer's step, taken from its state: SGD's momentum buffer, and
    m / (sqrt(v) + eps) for Adam and AdamW, with both bias corrections and without decoupled decay. A user's own
    optimizer may have ``velocity(parameter)``: the direction that its step subtracts, times the learning rate, or None
    before the first step.
    """
    for group in optimizer.param_groups:
        scale = -float(group["lr"]) * updates
        for parameter in group["params"]:
            target, state = targets.get(parameter), optimizer.state.get(parameter, {})
            if target is None:
                continue
            if hasattr(optimizer, "velocity"):
                direction = optimizer.velocity(parameter)
                if direction is not None:
                    target.add_(direction, alpha=scale)
            elif "exp_avg" in state:
                _add_adams(target, state, group, scale)
            elif state.get("momentum_buffer") is not None:
                target.add_(state["momentum_buffer"], alpha=scale)


def check_velocity(optimizer: torch.optim.Optimizer) -> None:
    """Raises a `ScheduleError` if the velocity of an optimizer is not known."""
    kind, groups = type(optimizer), optimizer.param_groups
    if hasattr(optimizer, "velocity"):
        return
    reason = ""
    if kind is torch.optim.SGD:
        if any(not group["momentum"] or group["nesterov"] for group in groups):
            reason = "SGD needs momentum=... and nesterov=False"
    elif kind in _ADAMS:
        if any(group["amsgrad"] for group in groups):
            reason = f"{kind.__name__} needs amsgrad=False"
    else:
        reason = "it is known for SGD with momentum, Adam, AdamW and optimizers that have velocity(parameter)"
    if not reason and any(group["maximize"] for group in groups):
        reason = "it needs maximize=False"
    if reason:
        raise ScheduleError(
            "the method predicts weights by the velocity of the optimizer, here "
            f"{kind.__module__}.{kind.__qualname__}: {reason}; use such an optimizer, or predict by the last "
            "difference (NAME[by=difference], e.g. pb_lwp[by=difference]), which works with any optimizer"
        )


def _add_adams(target: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], scale: float) -> None:
    step, (beta, beta_square) = state["step"], group["betas"]
    if step.device.type != "cpu":  # of a fused or capturable optimizer on a GPU, which the host does not wait for
        count = step.double()
        root = (state["exp_avg_sq"].sqrt() / (1 - beta_square**count).sqrt()).add_(group["eps"])
        target.addcdiv_(state["exp_avg"] / (1 - beta**count), root, value=scale)
        return
    count = float(step)
    root = (state["exp_avg_sq"].sqrt() / sqrt(1 - beta_square**count)).add_(group["eps"])
    target.addcdiv_(state["exp_avg"], root, value=scale / (1 - beta**count))

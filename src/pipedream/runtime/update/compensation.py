"""Compensations of delay: what one stage does around a step of the user's own optimizer.

Within an update, after the gradients have been summed, normalised and clipped:

1. the gap-aware penalty on the gradients, while the weights at which they were computed still exist;
2. T1 on the learning rate (`Optimizer.rate_factor`);
3. the optimizer's own step, followed by a further move of the weights.

The stored weights are the compensated ones, y of `core.schedule.compensation`; `unpredicted` computes the others.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.compensation import BasisRotation, Compensation, ErrorFeedback, GapAware, OfVelocity
from pipedream.runtime.division import Division
from pipedream.runtime.update.rotation import RotatedStep, check_has_moments, undo_rotation
from pipedream.runtime.update.stepped import SteppedWeights

_COUPLED = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers that add the weight decay to the gradient, except in groups with ``decoupled_weight_decay``."""


class Compensator:
    """Compensates for the stale gradients of one stage.

    Args:
        compensations: checked by `core.schedule.compensation.check_compensations`.
        staleness: D.
        stepped: what the optimizer steps.

    Raises:
        ScheduleError: one is not defined for this optimizer.
    """

    def __init__(
        self,
        compensations: Sequence[Compensation],
        staleness: int,
        optimizer: torch.optim.Optimizer,
        stepped: SteppedWeights,
        division: Division,
    ) -> None:
        self._staleness = staleness
        self._stepped = stepped
        self._division = division
        self._optimizer = optimizer
        handles = self._handles = stepped.weights
        self._names = {id(handle): name for name, handle in handles.items()}
        self._velocity = next((c for c in compensations if isinstance(c, OfVelocity)), None)
        self._gap = next((c for c in compensations if isinstance(c, GapAware)), None)
        feedback = next((c for c in compensations if isinstance(c, ErrorFeedback)), None)
        self._strength = feedback.strength_at(staleness) if feedback is not None else 0.0
        check_optimizer(compensations, optimizer)
        self._state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in handles}
        self._sides: dict[str, dict[str, torch.Tensor]] = {name: {} for name in handles}
        self._rotation = next((c for c in compensations if isinstance(c, BasisRotation)), None)
        self._rotated_step: RotatedStep | None = None
        if self._rotation is not None:
            adds_decay = partial(_adds_decay_to_gradient, optimizer)
            self._rotated_step = RotatedStep(self._rotation, optimizer, self._names, self._sides, adds_decay)
        for name, handle in handles.items():
            if self._strength:
                self._state[name]["last_update"] = torch.zeros_like(handle, requires_grad=False)
            if self._gap is not None:
                self._state[name]["mean_square"] = torch.zeros_like(handle, requires_grad=False)
                self._state[name]["steps"] = torch.zeros((), dtype=torch.int64)
                self._state[name]["greatest_rate"] = torch.zeros((), dtype=torch.float64)

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What checkpoints save: name of a parameter -> tensors."""
        return {name: tensors | self._sides[name] for name, tensors in self._state.items()}

    @property
    def needs_read_weights(self) -> bool:
        """Whether `penalise` needs the weights at which the gradients were computed."""
        return self._gap is not None

    def penalise(self, newest: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
        """Divides the gradients by 1 + gap / usual step, element by element.

        Args:
            newest: weights from which the update starts.
            read: weights at which the gradients were computed.
        """
        if self._gap is None:
            return
        for group in self._optimizer.param_groups:
            decay = float(group.get("weight_decay", 0.0)) if _adds_decay_to_gradient(self._optimizer, group) else 0.0
            decay = -decay if group.get("maximize", False) else decay  # then it is added to the negated gradient
            for handle in group["params"]:
                name = self._names.get(id(handle))
                steps = 0 if name is None else int(self._state[name]["steps"])
                # Before the first step no weight has moved: there is no gap.
                if handle.grad is None or name is None or not steps:
                    continue
                state = self._state[name]
                usual_step = (state["mean_square"] / (1.0 - self._gap.decay**steps)).sqrt_().add_(self._gap.eps)
                usual_step.mul_(float(state["greatest_rate"]))
                gap = (newest[name].detach() - read[name].detach()).abs_().to(usual_step.dtype)
                penalty = gap.div_(usual_step).add_(1.0)
                if decay:
                    # The optimizer will add decay * w: divide the sum of both.
                    handle.grad.add_(handle.detach(), alpha=decay).div_(penalty).sub_(handle.detach(), alpha=decay)
                else:
                    handle.grad.div_(penalty)

    def step(self) -> None:
        self._stepped.take_gradients()
        self._step()
        self._stepped.write()

    def _step(self) -> None:
        if self._velocity is not None:
            self._step_along_velocity(self._velocity)
        elif self._strength or self._gap is not None:
            self._step_and_track()
        else:
            self._step_optimizer()

    def unpredicted(self, factor: float) -> dict[str, torch.Tensor]:
        """Returns name -> weights w = y + p, from which the stored ones are predicted.

        p is lr T v, at the present learning rate (times `factor`) and momentum of the groups, or lambda u_{t-1}.
        """
        weights = {name: handle.detach() for name, handle in self._handles.items()}
        if self._strength:
            for name, state in self._state.items():
                weights[name] = weights[name] + self._strength * state["last_update"]
        if self._velocity is not None:
            for group in self._optimizer.param_groups:
                distance = factor * float(group["lr"]) * self._velocity.horizon_at(group["momentum"], self._staleness)
                for handle in group["params"]:
                    velocity = self._optimizer.state.get(handle, {}).get("momentum_buffer")
                    if velocity is not None and id(handle) in self._names:
                        weights[self._names[id(handle)]] = handle.detach() + distance * velocity
        return weights

    def load(self, name: str, saved: Mapping[str, torch.Tensor]) -> None:
        """Loads a parameter's state from a checkpoint or another method; missing entries keep their initial values."""
        for key, tensor in self._state[name].items():
            if key in saved:
                tensor.copy_(saved[key])
        handle = self._handles[name]
        sides = {side: saved[side].to(handle.device, copy=True) for side in ("left", "right") if side in saved}
        shapes = {} if self._rotation is None else self._rotation.kept_shapes(handle.shape)
        if {side: tuple(matrix.shape) for side, matrix in sides.items()} == shapes:
            self._sides[name] |= sides
        elif sides:
            moments = {n: t for n, t in self._optimizer.state.get(handle, {}).items() if torch.is_tensor(t) and t.dim()}
            for key, moment in undo_rotation(self._gather(name, moments), sides).items():
                moments[key].copy_(self._division.take_part([name], moment))

    def _gather(self, name: str, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {n: self._division.gather([name], tensor) for n, tensor in parts.items()}

    def _step_optimizer(self) -> None:
        step = self._optimizer.step if self._rotated_step is None else self._rotated_step.step
        with self._division.stepping(self._optimizer, self._handles):
            step()

    def _step_along_velocity(self, kind: OfVelocity) -> None:
        """Lets the optimizer step at rate 0, which only updates its velocity, then moves y by lr (a v + b g).

        a = 1, b = 0 is plain momentum SGD, and b = 1 torch's Nesterov, to the bit.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        self._step_optimizer()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            a, b = kind.coefficients(group["momentum"], self._staleness)
            handles = [handle for handle in group["params"] if handle.grad is not None]
            if not handles:
                continue
            weights = [handle.detach() for handle in handles]
            velocities = [self._optimizer.state[handle]["momentum_buffer"] for handle in handles]
            if b:
                directions = [handle.grad for handle in handles]
                if group["weight_decay"]:
                    torch._foreach_add_(directions, weights, alpha=float(group["weight_decay"]))
                if b != 1.0:
                    torch._foreach_mul_(directions, b)
                torch._foreach_add_(directions, velocities, alpha=a)
            else:
                directions = velocities
            torch._foreach_add_(weights, directions, alpha=-float(rate))
            self._track_usual_step(handles, velocities, float(rate))

    def _step_and_track(self) -> None:
        handles = list(self._handles.values())
        if not handles:
            self._step_optimizer()
            return
        updates = [handle.detach().clone() for handle in handles]
        self._step_optimizer()
        weights = [handle.detach() for handle in handles]
        torch._foreach_sub_(updates, weights)
        if self._strength:
            states = [self._state[name] for name in self._handles]
            last_updates = [state["last_update"] for state in states]
            torch._foreach_add_(weights, updates, alpha=-self._strength)
            torch._foreach_add_(weights, last_updates, alpha=self._strength)
            for state, update in zip(states, updates, strict=True):
                state["last_update"] = update
        if self._gap is not None:
            update_by_id = {id(handle): update for handle, update in zip(handles, updates, strict=True)}
            for group in self._optimizer.param_groups:
                rate = float(group["lr"])
                stepped = [handle for handle in group["params"] if id(handle) in update_by_id]
                if rate:
                    self._track_usual_step(stepped, [update_by_id[id(handle)] / rate for handle in stepped], rate)

    def _track_usual_step(
        self, handles: Sequence[torch.nn.Parameter], steps: Sequence[torch.Tensor], rate: float
    ) -> None:
        """Adds steps, which are divided by the learning rate, to the running mean square."""
        if self._gap is None or not rate:
            return
        for handle, step in zip(handles, steps, strict=True):
            state = self._state[self._names[id(handle)]]
            state["mean_square"].mul_(self._gap.decay).addcmul_(step, step, value=1.0 - self._gap.decay)
            state["steps"] += 1
            state["greatest_rate"].clamp_(min=rate)


def check_optimizer(compensations: Sequence[Compensation], optimizer: torch.optim.Optimizer) -> None:
    """Raises a `ScheduleError` if a compensation is not defined for an optimizer."""
    for compensation in compensations:
        if isinstance(compensation, OfVelocity):
            _check_velocity(compensation, optimizer)
        if isinstance(compensation, BasisRotation):
            check_has_moments(compensation, optimizer)


def _adds_decay_to_gradient(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, _COUPLED) and not group.get("decoupled_weight_decay", False)


def _check_velocity(kind: OfVelocity, optimizer: torch.optim.Optimizer) -> None:
    """Raises a `ScheduleError` if an optimizer is not plain momentum SGD."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise ScheduleError(
            f"compensation {kind} works on the velocity of torch.optim.SGD, found {type(optimizer).__name__}; use "
            "error_feedback, which works with any optimizer, or SGD with momentum"
        )
    for group in optimizer.param_groups:
        if not group["momentum"]:
            raise ScheduleError(
                f"compensation {kind} works on the velocity, which SGD without momentum does not have; set momentum, "
                "or use error_feedback or t1"
            )
        for option in ("dampening", "nesterov", "maximize"):
            if group[option]:
                raise ScheduleError(
                    f"compensation {kind} is defined for plain momentum, found SGD with {option}={group[option]!r}; "
                    f"remove {option}"
                )

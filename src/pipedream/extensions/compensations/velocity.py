"""Compensations of momentum SGD: every prediction along its velocity is a member of one family."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipedream.core.errors import ScheduleError
from pipedream.core.late import LateModule
from pipedream.core.schedule.delay_compensation import Compensation, expect, expect_horizon

if TYPE_CHECKING:
    import torch
else:
    torch = LateModule("torch")


class OfVelocity(Compensation):
    """Momentum SGD that steps along the velocity and the newest gradient.

        v(t+1) = m v(t) + g_t,   y(t+1) = y(t) - lr (a v(t+1) + b g_t),   a = 1 - b (1 - m)

    A gradient moves the weights by lr / (1 - m) in total, of which b at once. In the coordinates
    w = y + lr T v this is momentum SGD on w, with gradients taken at the prediction w - lr T v, T = m b. A coupled
    weight decay is part of g, and is taken at y.
    """

    moves_weights = True

    @abstractmethod
    def at_once(self, momentum: float, staleness: int) -> float:
        """Returns b."""

    def coefficients(self, momentum: float, staleness: int) -> tuple[float, float]:
        b = self.at_once(momentum, staleness)
        return 1.0 - b * (1.0 - momentum), b

    def horizon_at(self, momentum: float, staleness: int) -> float:
        """Returns T: the stored weights are T velocities ahead of w."""
        return momentum * self.at_once(momentum, staleness)

    def move(self, stage: Any, step: Callable[[], None]) -> None:
        """Lets the optimizer step at rate 0, which only updates its velocity, then moves y by lr (a v + b g).

        a = 1, b = 0 is plain momentum SGD, and b = 1 torch's Nesterov, to the bit.
        """
        groups = stage.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            a, b = self.coefficients(group["momentum"], stage.staleness)
            handles = [handle for handle in group["params"] if handle.grad is not None]
            if not handles:
                continue
            weights = [handle.detach() for handle in handles]
            velocities = [stage.optimizer.state[handle]["momentum_buffer"] for handle in handles]
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
            stage.note_steps(handles, velocities, float(rate))

    def unpredict(self, stage: Any, weights: dict[str, Any], factor: float) -> None:
        for group in stage.optimizer.param_groups:
            distance = factor * float(group["lr"]) * self.horizon_at(group["momentum"], stage.staleness)
            for handle in group["params"]:
                velocity, name = stage.optimizer.state.get(handle, {}).get("momentum_buffer"), stage.name_of(handle)
                if velocity is not None and name is not None:
                    weights[name] = handle.detach() + distance * velocity

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises a `ScheduleError` if the optimizer is not plain momentum SGD."""
        if not isinstance(optimizer, torch.optim.SGD):
            raise ScheduleError(
                f"compensation {self} works on the velocity of torch.optim.SGD, found {type(optimizer).__name__}; use "
                "error_feedback, which works with any optimizer, or SGD with momentum"
            )
        for group in optimizer.param_groups:
            if not group["momentum"]:
                raise ScheduleError(
                    f"compensation {self} works on the velocity, which SGD without momentum does not have; set "
                    "momentum, or use error_feedback or t1"
                )
            for option in ("dampening", "nesterov", "maximize"):
                if group[option]:
                    raise ScheduleError(
                        f"compensation {self} is defined for plain momentum, found SGD with "
                        f"{option}={group[option]!r}; remove {option}"
                    )


@dataclass(frozen=True)
class Generalised(OfVelocity):
    """Any member of the family.

    Attributes:
        b: share of the newest gradient; 0 is plain momentum, 1 Nesterov's.
    """

    name: ClassVar[str] = "generalised"
    b: float

    def __post_init__(self) -> None:
        expect(math.isfinite(self.b) and self.b >= 0, f"b must be at least 0, found {self.b}")

    def at_once(self, momentum: float, staleness: int) -> float:
        return self.b


@dataclass(frozen=True)
class Nesterov(OfVelocity):
    """Asynchronous Nesterov momentum: b = 1, one update ahead regardless of the delay.

    Ajanthan et al., ICML 2025, with a constant momentum: d = m (w(t) - w(t-1)), w(t+1) = w(t) + d - eta (1 - m) grad at
    the delayed w + d. The learning rate here is eta (1 - m).
    """

    name: ClassVar[str] = "nesterov"

    def at_once(self, momentum: float, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class SpikeCompensation(OfVelocity):
    """Spike compensation SC_D: a gradient immediately makes the steps of the D updates that it missed.

    Kosson et al., Pipelined Backpropagation at Scale, MLSys 2021: a = m^D, b = (1 - m^D) / (1 - m). The same as the
    multi-step Nesterov prediction of FTPipe (Eliad et al., ATC 2021) and DANA at horizon D, kept for the backward.
    D = 0 is plain momentum, D = 1 Nesterov's.

    Attributes:
        delay: D; None: the stage's staleness.
    """

    name: ClassVar[str] = "spike"
    joins_forward_prediction: ClassVar[bool] = True
    delay: int | None = None

    def __post_init__(self) -> None:
        expect(self.delay is None or self.delay >= 0, f"a delay must be at least 0 updates, found {self.delay}")

    def at_once(self, momentum: float, staleness: int) -> float:
        delay = staleness if self.delay is None else self.delay
        return sum((momentum**i for i in range(delay)), 0.0)


@dataclass(frozen=True)
class VelocityPrediction(OfVelocity):
    """Linear weight prediction in the velocity form, w - lr T v, kept for the backward: b = T / m.

    SpecTrain (Chen et al., 2018), and LWPv of Kosson et al., MLSys 2021.

    Attributes:
        horizon: T; None: the stage's staleness.
    """

    name: ClassVar[str] = "velocity_prediction"
    horizon: float | None = None

    def __post_init__(self) -> None:
        expect_horizon(self.horizon)

    def at_once(self, momentum: float, staleness: int) -> float:
        return (staleness if self.horizon is None else self.horizon) / momentum


COMPENSATIONS = (Generalised, Nesterov, SpikeCompensation, VelocityPrediction)

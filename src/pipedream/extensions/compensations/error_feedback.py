"""Error feedback, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipedream.core.late import LateModule
from pipedream.core.schedule.delay_compensation import Compensation, expect_horizon

if TYPE_CHECKING:
    import torch
else:
    torch = LateModule("torch")


@dataclass(frozen=True)
class ErrorFeedback(Compensation):
    """Error feedback, for the update u of any optimizer: y(t+1) = y(t) - (u_t + lambda (u_t - u_{t-1})), u_{-1} = 0.

    One-Step Gradient Delay, arXiv 2606.30634, ICML 2026, with lambda = 1 for a delay of 1. The same as linear weight
    prediction in the difference form, w + T (w(t) - w(t-1)) (LWPw of Kosson et al.), at horizon T = lambda, kept for
    the backward. A decoupled weight decay is part of u.

    Attributes:
        strength: lambda; None: the stage's staleness.
    """

    name: ClassVar[str] = "error_feedback"
    moves_weights: ClassVar[bool] = True
    strength: float | None = None

    def __post_init__(self) -> None:
        expect_horizon(self.strength)

    def kept_tensors(self, staleness: int) -> int:
        return 1 if self.strength_at(staleness) else 0

    def strength_at(self, staleness: int) -> float:
        return float(staleness) if self.strength is None else self.strength

    def moves_at(self, staleness: int) -> bool:
        return bool(self.strength_at(staleness))

    def begin(self, stage: Any) -> None:
        if self.moves_at(stage.staleness):
            for name, handle in stage.handles.items():
                stage.state[name]["last_update"] = torch.zeros_like(handle, requires_grad=False)

    def move(self, stage: Any, step: Callable[[], None]) -> None:
        updates, strength = stage.step_and_measure(step), self.strength_at(stage.staleness)
        if not updates:
            return
        states = [stage.state[name] for name in stage.handles]
        weights = [handle.detach() for handle in stage.handles.values()]
        last_updates = [state["last_update"] for state in states]
        torch._foreach_add_(weights, updates, alpha=-strength)
        torch._foreach_add_(weights, last_updates, alpha=strength)
        for state, update in zip(states, updates, strict=True):
            state["last_update"] = update
        stage.note_updates(updates)

    def unpredict(self, stage: Any, weights: dict[str, Any], factor: float) -> None:
        if strength := self.strength_at(stage.staleness):
            for name, state in stage.state.items():
                weights[name] = weights[name] + strength * state["last_update"]


COMPENSATIONS = (ErrorFeedback,)

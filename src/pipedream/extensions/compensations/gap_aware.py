"""The gap-aware penalty on gradients, for any optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipedream.core.errors import ScheduleError
from pipedream.core.late import LateModule
from pipedream.core.schedule.delay_compensation import Compensation, expect
from pipedream.core.schedule.weights import WeightRule

if TYPE_CHECKING:
    import torch
else:
    torch = LateModule("torch")


@dataclass(frozen=True)
class GapAware(Compensation):
    """The gradient is divided, element by element, by 1 + gap / usual step.

    Barkai et al., Gap-Aware Mitigation of Gradient Staleness, ICLR 2020; FTPipe, ATC 2021:
    1 + |w_t - w_read| / (lr_max (sqrt(E[v^2]) + eps)), with w_read the weights that the gradient was taken at, E the
    moving average over the updates made so far, corrected for its start, v = u / lr the step at a rate of 1 (for
    momentum SGD its velocity), lr_max the greatest rate so far. A coupled weight decay is divided likewise.
    """

    name: ClassVar[str] = "gap_aware"
    needs_read_weights: ClassVar[bool] = True
    notes_steps: ClassVar[bool] = True
    eps: ClassVar[float] = 1e-8
    decay: float = 0.999

    def kept_tensors(self, staleness: int) -> int:
        return 1

    def __post_init__(self) -> None:
        expect(0.0 <= self.decay < 1.0, f"the decay of an average lies between 0 and 1, found {self.decay}")

    def check_method(self, weights: WeightRule, *, reads_one_version: bool) -> None:
        if weights.backward_rule == "graph":
            raise ScheduleError(
                "compensation gap_aware needs the weights that a gradient was taken at; under the backward rule "
                "'graph' there are none; use a method that stashes weights"
            )
        if weights.backward_rule == "recompute":
            raise ScheduleError(
                "compensation gap_aware divides by how far the weights have moved from those that a gradient was taken "
                "at, but the backward rule 'recompute' takes it at the newest; leave it out, or use a method that "
                "stashes weights"
            )
        if weights.forward_prediction is not None:
            raise ScheduleError(
                "compensation gap_aware needs the weights that a gradient was taken at, but the method's forwards read "
                "predictions, which are gone when the update comes; use a method that stashes weights"
            )
        if not reads_one_version:
            raise ScheduleError(
                "compensation gap_aware needs the weights that a gradient was taken at, but microbatches of one update "
                "read different versions; use a method whose updates do not accumulate over versions"
            )

    def begin(self, stage: Any) -> None:
        for name, handle in stage.handles.items():
            stage.state[name]["mean_square"] = torch.zeros_like(handle, requires_grad=False)
            stage.state[name]["steps"] = torch.zeros((), dtype=torch.int64)
            stage.state[name]["greatest_rate"] = torch.zeros((), dtype=torch.float64)

    def penalise(self, stage: Any, newest: Mapping[str, Any], read: Mapping[str, Any]) -> None:
        for group in stage.optimizer.param_groups:
            decay = float(group.get("weight_decay", 0.0)) if stage.adds_decay(group) else 0.0
            decay = -decay if group.get("maximize", False) else decay  # then it is added to the negated gradient
            for handle in group["params"]:
                name = stage.name_of(handle)
                steps = 0 if name is None else int(stage.state[name]["steps"])
                # Before the first step no weight has moved: there is no gap.
                if handle.grad is None or name is None or not steps:
                    continue
                state = stage.state[name]
                usual_step = (state["mean_square"] / (1.0 - self.decay**steps)).sqrt_().add_(self.eps)
                usual_step.mul_(float(state["greatest_rate"]))
                gap = (newest[name].detach() - read[name].detach()).abs_().to(usual_step.dtype)
                penalty = gap.div_(usual_step).add_(1.0)
                if decay:
                    # The optimizer will add decay * w: divide the sum of both.
                    handle.grad.add_(handle.detach(), alpha=decay).div_(penalty).sub_(handle.detach(), alpha=decay)
                else:
                    handle.grad.div_(penalty)

    def note_steps(self, stage: Any, handles: Sequence[Any], steps: Sequence[Any], rate: float) -> None:
        for handle, step in zip(handles, steps, strict=True) if rate else ():
            state = stage.state[stage.name_of(handle)]
            state["mean_square"].mul_(self.decay).addcmul_(step, step, value=1.0 - self.decay)
            state["steps"] += 1
            state["greatest_rate"].clamp_(min=rate)


COMPENSATIONS = (GapAware,)

"""The velocity of an optimizer: the direction of its step, taken from its state, to predict weights along it.

It is SGD's momentum buffer, and m / (sqrt(v) + eps) for Adam and AdamW, with both bias corrections and without
decoupled decay. A user's own optimizer may have ``velocity(parameter)``: the direction that its step subtracts, times
the learning rate, or None before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch

from pipedream.core.errors import ScheduleError

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def add_velocity(
    optimizer: torch.optim.Optimizer, targets: Mapping[torch.nn.Parameter, torch.Tensor], updates: float
) -> None:
    """Moves tensors in place by a number of steps (negative for backwards), if there is a velocity yet."""
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
        size = (state["exp_avg_sq"].sqrt() / (1 - beta_square**count).sqrt()).add_(group["eps"])
        target.addcdiv_(state["exp_avg"] / (1 - beta**count), size, value=scale)
        return
    count = float(step)
    size = (state["exp_avg_sq"].sqrt() / sqrt(1 - beta_square**count)).add_(group["eps"])
    target.addcdiv_(state["exp_avg"], size, value=scale / (1 - beta**count))

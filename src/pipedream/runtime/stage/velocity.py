"""The direction of an optimizer's step, read off its state, so that weights can be predicted along it.

SGD's momentum buffer; Adam's and AdamW's m / (sqrt(v) + eps), both corrected for their beginning, without decoupled
decay. An optimizer of the user's own may tell it: ``velocity(parameter)`` returns the direction (its step subtracts
the rate times that), or None where there is none yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch

from pipedream.core.errors import ScheduleError

__all__ = ["add_velocity", "check_velocity"]

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def add_velocity(
    optimizer: torch.optim.Optimizer, targets: Mapping[torch.nn.Parameter, torch.Tensor], updates: float
) -> None:
    """Moves tensors by so many updates along the direction of the optimizer's step, at its rates; not before the first.

    Args:
        optimizer: one that `check_velocity` lets pass.
        targets: parameter -> tensor to add to, in place.
        updates: how far; negative for back.
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
    """Refuses an optimizer whose direction cannot be told.

    Raises:
        ScheduleError: names it, and what would do.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    if hasattr(optimizer, "velocity"):
        return
    reason = ""
    if kind is torch.optim.SGD:
        if any(not group["momentum"] or group["nesterov"] for group in groups):
            reason = "with SGD it takes momentum=, and nesterov=False"
    elif kind in _ADAMS:
        if any(group["amsgrad"] for group in groups):
            reason = f"with {kind.__name__} it takes amsgrad=False"
    else:
        reason = "it is known of SGD with momentum, Adam and AdamW, and of those that have velocity(parameter)"
    if not reason and any(group["maximize"] for group in groups):
        reason = "it takes maximize=False"
    if reason:
        raise ScheduleError(
            "weights are to be predicted by the velocity of the optimizer, here "
            f"{kind.__module__}.{kind.__qualname__}: {reason}; take such a one, or predict by the last difference "
            "(NAME[by=difference], as in pb_lwp[by=difference]), which any optimizer has"
        )


def _add_adams(target: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any], scale: float) -> None:
    count, (beta, beta_square) = float(state["step"]), group["betas"]
    size = (state["exp_avg_sq"].sqrt() / sqrt(1 - beta_square**count)).add_(group["eps"])
    target.addcdiv_(state["exp_avg"], size, value=scale / (1 - beta**count))

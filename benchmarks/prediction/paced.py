"""Real compute at a steady pace: a layer computes, and sleeps for what is left of some times its profiled seconds.

Two workers that compute fill two cores, on which the system and gloo's threads serve the network too, and the speed of
a rented core changes by a quarter from one second to the next. Cores that sleep in between have time for both.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from pipedream import Profile


def paced(model: nn.Sequential, profile: Profile, factor: float) -> nn.Sequential:
    """Returns the model with layers that take so many times as long as in its profile."""
    rows = zip(model, profile.layers, strict=True)
    return nn.Sequential(*(_Paced(layer, factor * row.forward_s, factor * row.backward_s) for layer, row in rows))


class PacedSGD(torch.optim.SGD):
    """SGD whose updates take so many times as long."""

    def __init__(self, parameters: Any, *, factor: float, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._more = factor - 1

    def step(self, closure: Any = None) -> Any:
        """Updates, then sleeps."""
        start_s = time.perf_counter()
        loss = super().step(closure)
        time.sleep(self._more * (time.perf_counter() - start_s))
        return loss


class _Paced(nn.Module):
    """A layer whose passes take the seconds given.

    A backward sleeps before it computes, by what it took the last time, so that gradients are ready when they would
    be. The layer's input always gets a gradient, by which the end is noticed.
    """

    def __init__(self, layer: nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layer = layer
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.begun_s = 0.0  # of the last backward: when it began, when it began to compute, what that took
        self.awake_s = 0.0
        self.taken_s = backward_s

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        value = _Begin.apply(value, anchor, self)  # type: ignore[no-untyped-call]
        output = _End.apply(self.layer(value), self)  # type: ignore[no-untyped-call]
        _sleep_until(start_s + self.forward_s)
        return torch.as_tensor(output)


class _Begin(torch.autograd.Function):
    """Stands in front of a layer."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor, layer: _Paced) -> torch.Tensor:
        ctx.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        layer = ctx.layer
        layer.taken_s = time.perf_counter() - layer.awake_s
        _sleep_until(layer.begun_s + layer.backward_s)
        return gradients[0], None, None


class _End(torch.autograd.Function):
    """Follows a layer."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layer: _Paced) -> torch.Tensor:
        ctx.layer = layer
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        layer = ctx.layer
        layer.begun_s = time.perf_counter()
        _sleep_until(layer.begun_s + layer.backward_s - layer.taken_s)
        layer.awake_s = time.perf_counter()
        return gradients[0], None


def _sleep_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)

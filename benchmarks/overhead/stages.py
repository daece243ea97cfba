"""Stages whose own time is known: one that only waits, and one that multiplies matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

optimizer = partial(torch.optim.SGD, lr=1e-3)
loss = functional.mse_loss


@dataclass(frozen=True)
class Shape:
    """A network of one layer per stage.

    Attributes:
        stages: p; one process each.
        microbatches: m of a minibatch, for the methods that split it.
        forward_s, backward_s: for which a layer sleeps.
        message_bytes: an activation, and the gradient on its way back.
        compute: (rows of a microbatch, width, products of a stage) in place of layers that sleep.
    """

    stages: int
    microbatches: int = 8
    forward_s: float = 0.004
    backward_s: float = 0.008
    message_bytes: int = 4096
    compute: tuple[int, int, int] | None = None

    def batch(self, microbatches: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, float32."""
        rows, width = (1, 1) if self.compute is None else self.compute[:2]
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(rows * microbatches, width, generator=generator)
        return inputs, torch.zeros(rows * microbatches, width)

    @property
    def message_shape(self) -> tuple[int, int]:
        return (1, self.message_bytes // 4) if self.compute is None else self.compute[:2]


class Waits:
    """How long the sleeps of this process really took: `time.sleep` oversleeps."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets what was measured so far."""
        self._sums_s, self._counts = [0.0, 0.0], [0, 0]

    def note(self, backward: bool, start_s: float) -> None:
        """Adds a sleep that has just ended."""
        self._sums_s[backward] += time.perf_counter() - start_s
        self._counts[backward] += 1

    @property
    def means_s(self) -> tuple[float, ...]:
        """Of a forward and of a backward; 0 if there was none."""
        return tuple(sum_s / max(1, count) for sum_s, count in zip(self._sums_s, self._counts, strict=True))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: WaitingLayer) -> Tensor:
        start = time.perf_counter()
        time.sleep(layer.shape.forward_s)
        ctx.layer, ctx.sizes = layer, (x.shape, weight.shape)
        y = x.new_zeros(len(x), layer.outputs)
        layer.waits.note(False, start)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:  # type: ignore[override]
        start = time.perf_counter()
        time.sleep(ctx.layer.shape.backward_s)
        input_gradient = gradient.new_zeros(ctx.sizes[0]) if ctx.needs_input_grad[0] else None
        weights = gradient.new_zeros(ctx.sizes[1])
        ctx.layer.waits.note(True, start)
        return input_gradient, weights, None


class WaitingLayer(nn.Module):
    """Sleeps in each pass; what it computes, zeros, is made within the measured time."""

    def __init__(self, shape: Shape, outputs: int, waits: Waits) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.shape, self.outputs, self.waits = shape, outputs, waits

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.weight, self)  # type: ignore[no-any-return]


class ComputingLayer(nn.Module):
    """Multiplies by several matrices in turn."""

    def __init__(self, width: int, products: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(products))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def network(shape: Shape, waits: Waits) -> nn.Sequential:
    """Returns the network: a layer per stage, the same weights at each call."""
    torch.manual_seed(0)
    if shape.compute is not None:
        _, width, products = shape.compute
        return nn.Sequential(*(ComputingLayer(width, products) for _ in range(shape.stages)))
    # Inputs and outputs of the network are one number, so that only messages have the size.
    widths = [shape.message_bytes // 4] * (shape.stages - 1) + [1]
    return nn.Sequential(*(WaitingLayer(shape, width, waits) for width in widths))

"""Emulated stages: layers that sleep for the planned time instead of computing.

Tensors are zeros of the planned sizes, for which the system allocates memory only when they are written. So plans with
more workers than cores can be timed.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import nn

from pipedream.core.plan.cost import FIRST_BUCKET_BYTES
from pipedream.core.plan.stage import Stage

_ITEM_BYTES = 4
_MAX_PIECES = 32


def make_emulated_model(stages: Sequence[Stage], microbatches: int, **how: Any) -> nn.Sequential:
    """Returns a model with one layer per stage, named ``stage0``, ``stage1``, ...; `how`: see `EmulatedStage`."""
    last, model = len(stages) - 1, nn.Sequential()
    for number, stage in enumerate(stages):
        model.add_module(f"stage{number}", EmulatedStage(stage, microbatches, sends=number < last, **how))
    return model


def make_emulated_optimizer(
    stages: Sequence[Stage],
) -> Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """Returns the factory of optimizers whose steps wait for the planned time."""

    def make(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        numbers = {int(name.split(".")[0].removeprefix("stage")) for name, _ in parameters}
        seconds = [stages[number].update_s - stages[number].copy_s for number in numbers]  # the runtime really copies
        return EmulatedOptimizer([parameter for _, parameter in parameters], sum(seconds))

    return make


class EmulatedStage(nn.Module):
    """Waits, and returns tensors of the planned sizes.

    The weights of a replicated stage are in pieces whose gradients come one by one during the backward, as the planner
    assumes (`core.plan.cost.SumLink`). A stage that sends nothing returns the loss.

    Args:
        microbatches: parts of a minibatch; each is one row of the tensors.
        splits_backward: weight gradients take half of a backward's time, as in `simulator.costs`.
        byte_scale: factor by which the stage's bytes were multiplied.
        shaped: a replicated stage has matrices of its weights' shapes, for sums that depend on these.
    """

    def __init__(
        self,
        stage: Stage,
        microbatches: int,
        *,
        sends: bool,
        splits_backward: bool = False,
        byte_scale: float = 1.0,
        shaped: bool = False,
    ) -> None:
        super().__init__()
        self._forward_s = stage.forward_s / microbatches
        self._columns = max(1, ceil(stage.output_bytes / microbatches / _ITEM_BYTES)) if sends else 1
        self._activation_bytes = ceil(stage.activation_bytes / microbatches)
        items = max(1, ceil(stage.trained_bytes / _ITEM_BYTES))
        pieces = 1
        if stage.replicas > 1:
            pieces = max(1, min(_MAX_PIECES, int(stage.trained_bytes / FIRST_BUCKET_BYTES / byte_scale)))
        ends = [items * piece // pieces for piece in range(pieces + 1)]
        shapes: list[tuple[int, ...]] = [(end - begin,) for begin, end in pairwise(ends)]
        if shaped and stage.replicas > 1 and stage.matrices:
            shapes = [(rows, columns) for rows, columns, tensors, _ in stage.matrices for _ in range(tensors)]
            shapes += [(max(items - sum(rows * columns for rows, columns in shapes), 1),)]
            pieces = len(shapes)
        self.weights = nn.ParameterList(nn.Parameter(_allocate_zeros(*shape)) for shape in shapes)
        for piece in self.weights:
            piece.byte_scale = byte_scale
        self._splits = splits_backward
        self._piece_s = stage.backward_s / microbatches / pieces

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = _EmulatedForward.apply(value, self._forward_s, self._columns, self._activation_bytes)  # type: ignore[no-untyped-call]
        no_index = torch.empty(0, dtype=torch.long)
        # Where nothing that arrived wants a gradient, only the weights get one.
        input_s = self._piece_s / 2 if self._splits and value.requires_grad else 0.0
        for weights in self.weights:
            if input_s:
                output = _EmulatedInputGradient.apply(output, input_s)  # type: ignore[no-untyped-call]
            # index_add_ adds no rows. At its node, one of autograd's own, the halves of a backward separate.
            gradient = _EmulatedWeightGradient.apply(weights, self._columns, self._piece_s - input_s)  # type: ignore[no-untyped-call]
            output = output.index_add_(0, no_index, gradient)
        return torch.as_tensor(output)


class EmulatedOptimizer(torch.optim.Optimizer):
    """An optimizer whose step waits and changes nothing."""

    def __init__(self, parameters: Sequence[nn.Parameter], seconds: float) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self._seconds = seconds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _wait(time.perf_counter(), self._seconds)

    def velocity(self, parameter: nn.Parameter) -> None:
        """Returns None to methods that predict weights: a step has no direction."""


class _EmulatedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float, columns: int, activation_bytes: int) -> torch.Tensor:
        start = time.perf_counter()
        ctx.shape = value.shape
        ctx.save_for_backward(torch.empty(activation_bytes, dtype=torch.uint8))
        output = _allocate_zeros(value.shape[0], columns)
        _wait(start, seconds)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, None, None, None]:
        return (_allocate_zeros(*ctx.shape) if ctx.needs_input_grad[0] else None), None, None, None


class _EmulatedInputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        _wait(time.perf_counter(), ctx.seconds)
        return gradients[0], None


class _EmulatedWeightGradient(torch.autograd.Function):
    """Returns no rows; the backward waits for the gradient of a piece of the weights."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, columns: int, seconds: float) -> torch.Tensor:
        ctx.weights_shape = weights.shape
        ctx.seconds = seconds
        return torch.empty(0, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        _wait(time.perf_counter(), ctx.seconds)
        return _allocate_zeros(*ctx.weights_shape), None, None


def _allocate_zeros(*shape: int) -> torch.Tensor:
    # numpy asks for zero pages, allocated when written; torch would write them here.
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


def _wait(start_s: float, seconds: float) -> None:
    remaining_s = start_s + seconds - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)

"""The models of the curve, sleeping: a layer waits for the profiled seconds, as if for an accelerator.

Weights, gradients and what layers pass on are real tensors of the real sizes, so messages, their encodings, compressed
gradients, sums and sockets are real for all that train such a model. `seconds.json` has the seconds (README.md).
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from models import Job
from torch import nn

from pipedream import Profile
from pipedream.apps.emulate.emulated import EmulatedOptimizer

_FILE = Path(__file__).with_name("seconds.json")


@dataclass(frozen=True)
class Seconds:
    """What a microbatch takes on one core, and an update of all weights; the loss is in the last layer."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float


def load_seconds(model: str) -> Seconds:
    """Returns a model's seconds of `seconds.json`."""
    values = json.loads(_FILE.read_text(encoding="ascii"))[model]
    return Seconds(tuple(values["forward_s"]), tuple(values["backward_s"]), values["update_s"])


def make_sleeping(job: Job, seconds: Seconds) -> Job:
    """Returns a job whose model and optimizer sleep for these seconds, whose loss is next to nothing."""

    def make() -> nn.Sequential:
        return _make_asleep(job.make(), job.batch(job.samples)[0], seconds)

    whole = _count(tuple(job.make().parameters()))

    def make_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        weights = tuple(item[1] if isinstance(item, tuple) else item for item in parameters)
        return EmulatedOptimizer(weights, seconds.update_s * _count(weights) / whole)

    return replace(job, make=make, loss=lambda output, targets: output.mean(), optimizer=make_optimizer)


def set_seconds(profile: Profile, seconds: Seconds, microbatches: int) -> Profile:
    """Returns the profile of a sleeping model without what the machine added to its waits."""
    rows = zip(profile.layers, seconds.forward_s, seconds.backward_s, strict=True)
    exact: dict[str, float] = dict.fromkeys(
        ("forward_spread_s", "backward_spread_s", "forward_fixed_s", "backward_fixed_s"), 0.0
    )
    layers = [
        replace(layer, forward_s=microbatches * forward_s, backward_s=microbatches * backward_s, **exact)
        for layer, forward_s, backward_s in rows
    ]
    return replace(profile, layers=tuple(layers), update_s=seconds.update_s, update_fixed_s=0.0, loss_s=0.0)


def _make_asleep(model: nn.Sequential, inputs: torch.Tensor, seconds: Seconds) -> nn.Sequential:
    passes, shaped = _Passes(), copy.deepcopy(model).to("meta")
    value: Any = inputs.to("meta")
    layers = []
    for number, (layer, like) in enumerate(zip(model, shaped, strict=True)):
        with torch.device("meta"):
            value = like(value)
        layers.append(_Asleep(number, layer, like, _count(value), seconds, passes))
    return nn.Sequential(*layers)


class _Passes:
    """The waits of a process, without their overshoot: a layer waits until its seconds after the end of the last wait,
    if that was of the layer before it in the same pass."""

    def __init__(self) -> None:
        self._next: tuple[bool, int] | None = None
        self._end_s = 0.0

    def wait(self, number: int, seconds: float, *, is_forward: bool, start_s: float) -> None:
        if self._next == (is_forward, number):
            start_s = self._end_s
        self._next, self._end_s = (is_forward, number + (1 if is_forward else -1)), start_s + seconds
        if (left_s := self._end_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class _Asleep(nn.Module):
    """A layer that waits; it has the weights of the real one, and outputs of its shapes, always of the same numbers.

    Args:
        like: the layer on the meta device, for the shapes.
        count: numbers in the output for a microbatch, for which it waits its seconds; for others in proportion.
    """

    def __init__(
        self, number: int, layer: nn.Module, like: nn.Module, count: int, seconds: Seconds, passes: _Passes
    ) -> None:
        super().__init__()
        self.layer = layer
        self.place, self.passes, self._like, self._count = number, passes, [like], count
        self._seconds = seconds.forward_s[number], seconds.backward_s[number]
        self._outputs: dict[tuple[Any, ...], tuple[tuple[torch.Tensor, ...], bool]] = {}
        self.gradients = [torch.randn_like(weight) for weight in layer.parameters()]

    def forward(self, value: Any) -> Any:
        start_s = time.perf_counter()
        values = value if isinstance(value, tuple) else (value,)
        shapes = tuple(tensor.shape for tensor in values)
        if shapes not in self._outputs:
            arrived = tuple(torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in values)
            with torch.no_grad(), torch.device("meta"):
                output = self._like[0](arrived if isinstance(value, tuple) else arrived[0])
            outputs = tuple(
                torch.randn(tensor.shape) for tensor in (output if isinstance(output, tuple) else (output,))
            )
            self._outputs[shapes] = outputs, isinstance(output, tuple)
        outputs, is_tuple = self._outputs[shapes]
        scale = _count(outputs) / self._count
        forward_s, backward_s = (scale * seconds for seconds in self._seconds)
        results = _Sleep.apply(self, outputs, backward_s, len(values), *values, *self.layer.parameters())  # type: ignore[no-untyped-call]
        self.passes.wait(self.place, forward_s, is_forward=True, start_s=start_s)
        return results if is_tuple else results[0]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: _Asleep,
        outputs: tuple[torch.Tensor, ...],
        backward_s: float,
        arrived: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.layer, ctx.backward_s = layer, backward_s
        ctx.arrived = [torch.empty_like(value) if value.is_floating_point() else None for value in tensors[:arrived]]
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        start_s, layer = time.perf_counter(), ctx.layer
        weights = [gradient.clone() for gradient in layer.gradients]
        layer.passes.wait(layer.place, ctx.backward_s, is_forward=False, start_s=start_s)
        return (None,) * 4 + (*ctx.arrived, *weights)


def _count(values: Any) -> int:
    return sum(value.numel() for value in (values if isinstance(values, tuple) else (values,)))

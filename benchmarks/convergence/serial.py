"""Trains an arm as a running pipeline does, in one process, one microbatch after the other.

Whatever a pipeline does at the same time, the weights that each pass of each microbatch reads are known numbers of
updates old, so each gradient can be taken by itself, as `pipedream.testing.Loop` does; here it gets torch's optimizers,
and what the methods change of their updates. The result equals the running pipeline's
(tests/end_to_end/test_convergence_emulation.py).

The step in a rotated basis is the library's own, which other tests compare with the published equations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from arms import Arm, Method
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from pipedream.core.schedule.delay_compensation import Compensation
from pipedream.extensions.compensations.basis_rotation.rotation import RotatedStep
from pipedream.testing import CompensationRule, Loop, MethodRules, Passes

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]
Output = Callable[[Tensor], Tensor]
"""An input -> what the newest weights of all stages make of it."""


class Changes(CompensationRule):
    """What a method changes of the updates at p stages; `annealed` updates until T1 has ended, K."""

    def __init__(self, method: Method, p: int, annealed: int) -> None:
        self._method, self._annealed = method, annealed
        self._delays = [method.staleness(p, s) for s in range(p)]
        self._rotated: dict[int, RotatedStep] = {}
        self._last_update: dict[str, Tensor] = {}

    def rate(self, s: int, k: int) -> float:
        late = max(self._delays[s], 1)
        return late ** (min(k / self._annealed, 1.0) - 1.0) if self._method.rescheduled else 1.0

    @torch.no_grad()
    def step(self, s: int, optimizer: Any, w: Mapping[str, nn.Parameter], y: Mapping[str, Tensor]) -> None:
        method, before = self._method, {name: p.detach().clone() for name, p in w.items()}
        self._step(s, optimizer, w)
        if method.at_once:  # adds what b g + (a - 1) v moves, a - 1 = -b (1 - m), to a step along v
            (group,) = optimizer.param_groups
            momentum, b = group["momentum"], method.at_once(group["momentum"], self._delays[s])
            for name, p in w.items():
                g, v = p.grad + group["weight_decay"] * before[name], optimizer.state[p]["momentum_buffer"]
                p.sub_(group["lr"] * b * (g - (1 - momentum) * v))
        if feedback := method.feedback(self._delays[s]) if method.feedback else 0.0:
            for name, p in w.items():
                update = before[name] - p
                p.sub_(update - self._last_update.get(name, 0.0), alpha=feedback)
                self._last_update[name] = update

    def _step(self, s: int, optimizer: Any, w: Mapping[str, nn.Parameter]) -> None:
        if not self._method.rotation:
            optimizer.step()
            return
        if s not in self._rotated:
            form = Compensation.of_text(self._method.rotation).at_stage(s, self._delays)
            names, sides = {id(p): name for name, p in w.items()}, {name: {} for name in w}
            self._rotated[s] = RotatedStep(form, optimizer, names, sides, lambda group: False)
        self._rotated[s].step(optimizer.step)


def train(
    units: Sequence[nn.Module],
    stages: int,
    arm: Arm,
    optimizer: Factory,
    loss: Loss,
    batches: Sequence[tuple[Tensor, Tensor]],
    factor: Callable[[int], float],
    watch: Callable[[int, float, Output], bool],
    *,
    annealed: int = 1,
) -> dict[str, Tensor]:
    """Trains a model as a pipeline of equal stages trains it, by each method of an arm in turn; returns its weights.

    Args:
        units: the model, layer by layer; `stages` divides their number.
        optimizer: makes one for a stage.
        loss: a mean over the samples of (output, targets).
        factor: number of an update -> factor on the learning rates.
        watch: called with the number of updates made and the loss of the last; says whether to go on.
        annealed: updates until T1 has ended, K.
    """
    size = len(units) // stages
    names = [[str(s * size + i) for i in range(size)] for s in range(stages)]
    ends = [round(turn.until * len(batches)) for turn in arm.turns]
    methods = zip([0, *ends[:-1]], (turn.method for turn in arm.turns), strict=True)
    rules = {
        begin: MethodRules(
            method.paper(stages, m := method.parts(stages)), m, compensation=Changes(method, stages, annealed)
        )
        for begin, method in methods
    }

    def total(output: Tensor, batch: Any) -> tuple[Tensor, float]:
        return loss(output, batch[1]) * len(batch[1]), float(len(batch[1]))

    return (
        Loop(
            Passes(copy.deepcopy(nn.Sequential(*units)), names, total),
            batches,
            optimizer,
            rules,
            scheduler=partial(LambdaLR, lr_lambda=factor),
            watch=lambda n, value, loop: watch(n, value, loop.output),
            max_versions=2 * stages + 1,
        )
        .run()
        .state
    )

"""Trains an arm as a running pipeline does, in one process, one microbatch after the other.

Whatever a pipeline does at the same time, the weights that each pass of each microbatch reads are known numbers of
updates old (`delayed.Paper`), so each gradient can be taken by itself. tests/oracles/delayed.py does so; here it gets
torch's optimizers, and what the methods change of their updates. The result equals the running pipeline's
(tests/end_to_end/test_convergence_emulation.py).

The step in a rotated basis is the library's own, which other tests compare with the published equations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import delayed
import torch
from arms import Arm, Method
from delayed import Values
from torch import Tensor, nn

from pipedream.core.schedule.compensation import Compensation
from pipedream.runtime.update.rotation import RotatedStep

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]
Output = Callable[[Tensor], Tensor]
"""An input -> what the newest weights of all stages make of it."""


class Stepper(delayed.OfTorch):
    """The optimizer of stage s of p, with what a method changes of its updates."""

    def __init__(self, make: Factory, method: Method, p: int, s: int) -> None:
        super().__init__(make)
        paper, self._method = method.paper(p, method.parts(p)), method
        self._predicts = paper.by == "velocity" and bool(paper.ahead(s) or paper.back(s))
        self._delays, self._s = [method.staleness(p, i) for i in range(p)], s
        self._feedback = method.feedback(self._delays[s]) if method.feedback else 0.0
        self._last_update: Values = {}

    def begin(self, weights: Values) -> None:
        super().begin(weights)
        if self._method.rotation:
            form = Compensation.of_text(self._method.rotation).at_stage(self._s, self._delays)
            names = {id(handle): name for name, handle in self.handles.items()}
            sides: dict[str, Values] = {name: {} for name in weights}
            self.update = RotatedStep(form, self.optimizer, names, sides, lambda group: False).step

    def step(self, weights: Values, gradients: Values, rate: float) -> Values:
        new = super().step(weights, gradients, rate)
        if self._method.at_once:  # adds what b g + (a - 1) v moves, a - 1 = -b (1 - m), to a step along v
            (group,), v = self.optimizer.param_groups, super().direction()
            momentum, b = group["momentum"], self._method.at_once(group["momentum"], self._delays[self._s])
            for name, w in new.items():
                g = gradients[name] + group["weight_decay"] * weights[name]
                w.sub_(rate * b * (self.rates[0] * g - (1 - momentum) * v[name]))
        if self._feedback:
            update = {name: weights[name] - w for name, w in new.items()}
            for name, w in new.items():
                w.sub_(update[name] - self._last_update.get(name, 0.0), alpha=self._feedback)
            self._last_update = update
        return new

    def direction(self) -> Values:
        """Is not needed where nothing is predicted by it."""
        return super().direction() if self._predicts else {}


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
    begins = zip([0, *ends[:-1]], arm.turns, strict=True)
    turns = {n: _make_turn(turn.method, stages, annealed) for n, turn in begins}
    # Only an arm of one method changes its updates.
    steppers = iter([Stepper(optimizer, arm.turns[-1].method, stages, s) for s in range(stages)])
    answer = delayed.train(
        nn.Sequential(*units),
        names,
        batches,
        lambda output, y: (loss(output, y) * len(y), float(len(y))),
        turns[0].paper,
        partial(next, steppers),
        rate_at=factor,
        turns=turns,
        watch=lambda n, value, parts: watch(n, value, partial(_compute_output, parts)),
        versions_kept=2 * stages + 1,
    )
    return answer.state


def _make_turn(method: Method, p: int, annealed: int) -> delayed.Turn:
    m, late = method.parts(p), [max(method.staleness(p, s), 1) for s in range(p)]
    if not method.rescheduled:
        return delayed.Turn(method.paper(p, m), m)
    return delayed.Turn(method.paper(p, m), m, lambda s, update: late[s] ** (min(update / annealed, 1.0) - 1.0))


@torch.no_grad()
def _compute_output(parts: Sequence[delayed.Stage], x: Tensor) -> Tensor:
    for stage in parts:
        x = stage.run(x, stage.versions[-1].weights, 0)
    return x

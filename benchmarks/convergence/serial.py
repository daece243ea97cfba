"""A serial emulation: pipeline training of one model in one process, one microbatch after the other.

Whatever a pipeline does at the same time, the weights that each pass of each microbatch reads are known numbers of
updates old (`arms.Method`). So each gradient can be taken by itself: the weights that its forward read are written into
the model, then those that its backward read, and the update is made. What comes out equals the running pipeline's
(tests/end_to_end/test_convergence_emulation.py) at the cost of training in one process.

A stage keeps its weights in one flat tensor, of which the optimizer's parameters are views, and writes views and old
versions into another, whose parts the modules' parameters are: reading a version is one copy. Written through `data`
it does not move autograd's count of versions, so a backward after another copy goes through old activations and new
weights: the rule 'graph'.

The step in a rotated basis is the library's own, which other tests compare with the published equations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import exp

import torch
from arms import Arm, Method
from torch import Tensor, nn

from pipedream.core.schedule.compensation import Compensation
from pipedream.runtime.update.rotation import RotatedStep

Factory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]

DECAY = exp(-2)
"""Of PipeMare's average, over D updates (Yang et al., section 3.2: theory asks for this)."""


class Stage:
    """Some layers, their weights, and what an update needs to know of earlier ones.

    Args:
        layers: as they stand in the model, numbered.
        optimizer: makes the stage's own.
    """

    def __init__(self, layers: Sequence[tuple[int, nn.Module]], optimizer: Factory) -> None:
        self.layers = nn.Sequential(*(layer for _, layer in layers))
        named = [(f"{i}.{name}", p) for i, layer in layers for name, p in layer.named_parameters()]
        self._leaves = [p for _, p in named]
        self._read = torch.cat([p.detach().reshape(-1) for p in self._leaves])
        self.weights = self._read.clone()
        self._handles = [nn.Parameter(part) for part in _split_flat(self.weights, self._leaves)]
        for leaf, part in zip(self._leaves, _split_flat(self._read, self._leaves), strict=True):
            leaf.data = part
        self._names = {id(handle): name for (name, _), handle in zip(named, self._handles, strict=True)}
        self._optimizer = optimizer([(self._names[id(handle)], handle) for handle in self._handles])
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def begin(self, method: Method, p: int, s: int, annealed: int) -> None:
        """Begins with a method, drained; the method's own knowledge of earlier updates is 0.

        Args:
            annealed: updates until T1 has ended, K.
        """
        self._method, self._annealed = method, annealed
        self._late, self._m, self._staleness = method.late(p, s), method.parts(p), method.staleness(p, s)
        self._ahead = method.ahead(p, s) if method.ahead else 0.0
        self._back = method.back(p, s) if method.back else 0.0
        self._feedback = method.feedback(self._staleness) if method.feedback else 0.0
        self._gamma = DECAY ** (1 / abs(self._back)) if method.step == "average" and self._back else 0.0
        self._average = torch.zeros_like(self.weights) if self._gamma else None
        self._last_update = torch.zeros_like(self.weights) if self._feedback else None
        self._weights_before: deque[Tensor] = deque([self.weights.clone()], maxlen=self._staleness + 1)
        self._newest = self.weights
        self._step = self._optimizer.step
        if method.rotation:
            form = Compensation.of_text(method.rotation).at_stage(s, [method.staleness(p, i) for i in range(p)])
            sides: dict[str, dict[str, Tensor]] = {name: {} for name in self._names.values()}
            self._step = RotatedStep(form, self._optimizer, self._names, sides, lambda group: False).step

    def read_forward(self, k: int) -> None:
        """Writes what the forward of microbatch k reads into the layers."""
        version = max(0, (k - self._late) // self._m)
        self._read.copy_(self._weights_before[version - k // self._m - 1])

    def read_backward(self) -> None:
        """Writes what a backward reads into the layers: all updates of earlier microbatches are made."""
        if self._method.rule != "stash":
            self._read.copy_(self._newest)

    def read_newest(self) -> None:
        """Writes the newest weights into the layers."""
        self._read.copy_(self.weights)

    def update(self, number: int, factor: float, coming: float) -> None:
        """Makes an update with the gradients that the layers' parameters have.

        Args:
            number: of updates since the start of training.
            factor: on the learning rates, at this update.
            coming: the same at the next one.
        """
        if self._method.rescheduled:
            factor *= max(self._staleness, 1) ** (min(number / self._annealed, 1.0) - 1.0)
        for handle, leaf in zip(self._handles, self._leaves, strict=True):
            handle.grad, leaf.grad = leaf.grad, None
        self._set_rates(factor)
        before = self.weights.clone()
        self._step()
        if self._method.at_once:
            self._move_at_once(before)
        if self._last_update is not None:
            update = before - self.weights
            self.weights.sub_(update - self._last_update, alpha=self._feedback)
            self._last_update = update
        if self._average is not None:
            self._average.lerp_(self.weights - before, 1 - self._gamma)
        self._compute_views(before, coming)

    def _move_at_once(self, before: Tensor) -> None:
        """Adds what b g + (a - 1) v moves, a - 1 = -b (1 - m), to a step of momentum SGD along v."""
        assert self._method.at_once is not None
        (group,) = self._optimizer.param_groups
        momentum = group["momentum"]
        b = self._method.at_once(momentum, self._staleness)
        gradient = torch.cat([handle.grad.reshape(-1) for handle in self._handles])  # type: ignore[union-attr]
        gradient.add_(before, alpha=group["weight_decay"])
        self.weights.sub_(gradient - (1 - momentum) * self._compute_direction(), alpha=group["lr"] * b)

    def _compute_views(self, before: Tensor, coming: float) -> None:
        """Computes the views of the version that was just made."""
        newest = ahead = self.weights
        if self._ahead or self._back:
            if self._method.step == "velocity":
                self._set_rates(coming)
                step = -self._optimizer.param_groups[0]["lr"] * self._compute_direction()
            else:
                step = self._average if self._average is not None else self.weights - before
            ahead = torch.add(self.weights, step, alpha=self._ahead)
            newest = torch.add(self.weights, step, alpha=self._back)
        self._newest = newest
        self._weights_before.append(ahead.clone() if ahead is self.weights else ahead)

    def _compute_direction(self) -> Tensor:
        """Returns v of momentum SGD, or Adam's m / (sqrt(v) + eps), m and v corrected for their beginning."""
        direction = {}
        for group in self._optimizer.param_groups:
            for handle in group["params"]:
                state = self._optimizer.state[handle]
                if "momentum_buffer" in state:
                    direction[id(handle)] = state["momentum_buffer"]
                    continue
                first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
                size = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
                direction[id(handle)] = state["exp_avg"] / first / size
        return torch.cat([direction[id(handle)].reshape(-1) for handle in self._handles])

    def _set_rates(self, factor: float) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor


class Emulation:
    """A model that is trained as a pipeline of p stages trains it.

    Args:
        units: the model, layer by layer; p divides their number.
        stages: p.
        optimizer: makes one for a stage.
        loss: a mean over the samples of (output, targets).
        annealed: updates until T1 has ended, K.
    """

    def __init__(
        self, units: Sequence[nn.Module], stages: int, optimizer: Factory, loss: Loss, *, annealed: int = 1
    ) -> None:
        numbered, size = list(enumerate(units)), len(units) // stages
        if size * stages != len(units):
            raise ValueError(
                f"{len(units)} layers were to be cut into {stages} equal stages; their number does not divide"
            )
        self.stages = [Stage(numbered[s * size : (s + 1) * size], optimizer) for s in range(stages)]
        self._loss, self._annealed = loss, annealed
        self._number = 0

    def begin(self, method: Method) -> None:
        """Drains, and goes on with a method."""
        self._method, self._split_flat, self._k = method, method.parts(len(self.stages)), 0
        for s, stage in enumerate(self.stages):
            stage.begin(method, len(self.stages), s, self._annealed)

    def minibatch(self, x: Tensor, y: Tensor, factor: Callable[[int], float]) -> float:
        """Trains on a minibatch and makes an update of each stage; returns the loss.

        Args:
            factor: number of an update -> factor on the learning rates.
        """
        loss = 0.0
        pieces = zip(x.tensor_split(self._split_flat), y.tensor_split(self._split_flat), strict=True)
        for xs, ys in pieces if self._split_flat > 1 else [(x, y)]:
            for stage in self.stages:
                stage.read_forward(self._k)
            share = len(xs) / len(x)
            loss += (self._pass_recomputed if self._method.rule == "recompute" else self._pass_graph)(xs, ys, share)
            self._k += 1
        for stage in self.stages:
            stage.update(self._number, factor(self._number), factor(self._number + 1))
        self._number += 1
        return loss

    def output(self, x: Tensor) -> Tensor:
        """Returns what the newest weights of all stages make of an input."""
        for stage in self.stages:
            stage.read_newest()
        with torch.no_grad():
            for stage in self.stages:
                x = stage.layers(x)
        return x

    def state(self) -> Tensor:
        """Returns all weights, stage after stage."""
        return torch.cat([stage.weights for stage in self.stages])

    def _pass_graph(self, x: Tensor, y: Tensor, share: float) -> float:
        """Does forward and backward, with the weights changed between the two; returns the loss."""
        for stage in self.stages:
            x = stage.layers(x)
        loss = self._loss(x, y) * share
        for stage in self.stages:
            stage.read_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _pass_recomputed(self, x: Tensor, y: Tensor, share: float) -> float:
        """Does the forward, and each stage's again at the backward's weights, from its old input."""
        inputs = []
        with torch.no_grad():
            for stage in self.stages:
                inputs.append(x)
                x = stage.layers(x)
        output = x.requires_grad_()
        loss = self._loss(output, y) * share
        (slope,) = torch.autograd.grad(loss, output)
        for stage, stage_input in zip(reversed(self.stages), reversed(inputs), strict=True):
            stage.read_backward()
            stage_input = stage_input.detach().requires_grad_(stage_input.is_floating_point())
            torch.autograd.backward(stage.layers(stage_input), slope)
            slope = stage_input.grad
        return loss.item()


def train(
    emulation: Emulation,
    arm: Arm,
    batches: Sequence[tuple[Tensor, Tensor]],
    factor: Callable[[int], float],
    watch: Callable[[int, float], bool],
) -> None:
    """Trains on minibatches, by each method of an arm in turn.

    Args:
        factor: see `Emulation.minibatch`.
        watch: called with the number of updates made and the loss of the last; says whether to go on.
    """
    ends = [round(turn.until * len(batches)) for turn in arm.turns]
    begins = dict(zip([0, *ends[:-1]], arm.turns, strict=True))
    for n, (x, y) in enumerate(batches):
        if n in begins:
            emulation.begin(begins[n].method)
        loss = emulation.minibatch(x, y, factor)
        if not watch(n + 1, loss):
            return


def _split_flat(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]

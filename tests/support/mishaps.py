"""Training runs in which something goes wrong; they must be importable by the processes that run them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import pipedream as pd


class FailsForward(nn.Module):
    """Raises at its sixth training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 6:
                raise ZeroDivisionError("a layer that fails")
        return x * 1.0


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.count == 6:
            raise ZeroDivisionError("a gradient that fails")
        return gradients[0], None


class FailsBackward(FailsForward):
    """Raises in the backward of its sixth training forward."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return _Raises.apply(x, self.calls)


class NotANumber(FailsForward):
    """Gives nan at its sixth training forward."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return x * (float("nan") if self.calls == 6 else 1.0)


KINDS: dict[str, type[nn.Module]] = {"forward": FailsForward, "backward": FailsBackward, "nan": NotANumber}


def train(kind: str, stages: int, schedule: str = "pipedream", **rest: Any) -> list[float]:
    """Trains a small model whose middle layer misbehaves; `kind` 'loop' is a loop body that raises."""
    animal = zoo.make("mlp")
    if kind != "loop":
        animal.model[3] = KINDS[kind]()
    losses = []
    with pd.Pipeline(
        animal.model,
        zoo.plan_of(zoo.make("mlp"), stages),
        schedule=schedule,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        **rest,
    ) as pipeline:
        for done in pipeline.train(animal.batches, epochs=4):
            losses.append(done.loss)
            if kind == "loop" and done.number == 5 and pipeline.rank == 0:
                raise ZeroDivisionError("a loop that fails")
    return losses


def predict(stages: int, count: int) -> list[Tensor]:
    """Returns the outputs for `count` batches of changing size."""
    animal = zoo.make("cnn")
    x = torch.cat([batch for batch, _ in animal.batches])
    batches = [x[i : i + 1 + i % 4] for i in range(count)]
    with pd.Pipeline(
        animal.model, zoo.plan_of(zoo.make("cnn"), stages), optimizer=partial(torch.optim.SGD, lr=0.1), loss=animal.loss
    ) as pipeline:
        return list(pipeline.predict([batch.clone() for batch in batches]))

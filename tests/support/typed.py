"""A model whose layers pass on outputs of a type of their own, run by a pipeline."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import pipedream as pd


class Scored(NamedTuple):
    """An output of a type of its own, which other layers take, too."""

    scores: Any
    length: int = 0
    loss: Any = None


class Scoring(nn.Module):
    """A layer that returns such an output."""

    def forward(self, value: Any) -> Scored:
        return Scored(value.scores * 2, value.length + 1) if isinstance(value, Scored) else Scored(value)


def predict() -> tuple[list[Scored], list[Tensor]]:
    """Returns what three stages predict, and the scores that the model itself gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), Scoring(), Scoring(), Scoring())
    batches = [(torch.randn(size, 2), torch.zeros(size)) for size in (3, 1)]
    expected = [model(x).scores.detach() for x, _ in batches]
    animal = zoo.Animal(model, batches, F.mse_loss, lambda output, targets: (output, 1.0), {3: (2, 3)})
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with pd.Pipeline(model, zoo.plan_of(animal, 3), loss=F.mse_loss, optimizer=optimizer) as pipeline:
        return list(pipeline.predict(batches)), expected

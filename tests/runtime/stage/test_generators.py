"""Generators that layers hold: replicas draw unlike numbers from them, a recomputed forward the same again."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import training
from torch import Tensor, nn

from pipedream import Cluster, plan, profile

DRAWN: list[float] = []


class Noise(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = torch.Generator().manual_seed(1) if kind == "torch" else None
        self.others = {"numpy": np.random.default_rng(1), "python": random.Random(1)}
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        noise = random.random() if self.kind == "global" else 0.0
        if self.generator is not None:
            noise = float(torch.rand((), generator=self.generator))
        elif self.kind in self.others:
            noise = self.others[self.kind].random()
        if self.training and torch.is_grad_enabled():
            DRAWN.append(noise)
        return self.linear(x) * (1 + noise)


def train(kind: str, schedule: str, shape: tuple[int, int], **options: Any) -> list[float]:
    """Returns what was drawn in training."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(Noise(kind), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(6)]
    cluster = Cluster.flat(sum(shape))
    stages = plan(profile(model, data[0][0], runs=1), cluster, schedule=schedule, shape=shape, cuts=(1,), **options)
    DRAWN.clear()
    training.train(model, stages, data, loss=nn.functional.mse_loss, check=False)
    return list(DRAWN)


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_recomputed_forward_draws_the_same_again(kind: str) -> None:
    drawn = train(kind, "1f1b", (1, 1), recompute="always", microbatches=1)
    assert drawn[0::2] == drawn[1::2]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "global"])
def test_replicas_draw_different_numbers(kind: str) -> None:
    """Other replicas in the same process draw from copies; the global generators are seeded for each microbatch."""
    drawn = train(kind, "pipedream", (2, 1))
    assert len(set(drawn)) == 6
    if kind == "global":
        assert drawn == train(kind, "pipedream", (2, 1))
        assert random.random() == random.Random(0).random(), "the user's generator has not moved"

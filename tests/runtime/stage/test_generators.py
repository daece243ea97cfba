"""Generators that layers hold: replicas draw unlike numbers from them, a recomputed forward the same again."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import training
from built import Built
from torch import Tensor, nn
from training import plan_of

DRAWN: list[float] = []


def noisy(self: Any, x: Tensor) -> Tensor:
    if self.kind == "torch":
        noise = float(torch.rand((), generator=self.generator))
    else:
        noise = self.others.get(self.kind, random).random()
    if self.training and torch.is_grad_enabled():
        DRAWN.append(noise)
    return self.linear(x) * (1 + noise)


def train(kind: str, schedule: str, shape: tuple[int, int], **options: Any) -> list[float]:
    """Returns what was drawn in training."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(Built(noisy, linear=nn.Linear(4, 4), kind=kind), nn.Tanh(), nn.Linear(4, 2))
    model[0].generator = torch.Generator().manual_seed(1) if kind == "torch" else None
    model[0].others = {"numpy": np.random.default_rng(1), "python": random.Random(1)}
    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(6)]
    plan = plan_of(model, data[0][0], (1,), shape, **options)
    DRAWN.clear()
    training.train(model, plan, data, schedule=schedule, microbatches=1, loss=nn.functional.mse_loss, check=False)
    return list(DRAWN)


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_recomputed_forward_draws_the_same_again(kind: str) -> None:
    drawn = train(kind, "1f1b", (1, 1), recompute="always")
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

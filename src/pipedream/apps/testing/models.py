"""Tiny models for checks of a method: what a pipeline can get wrong, in a few layers that train in milliseconds."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipedream.apps.testing.training import Training

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
Batch = tuple[Tensor, Tensor]


def perceptron(width: int = 16) -> nn.Module:
    """Returns linear layers with dropout, and work in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = [nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(inplace=True)]
        return nn.Sequential(*first, nn.Dropout(0.2), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)).double()


def with_statistics() -> nn.Module:
    """Returns layers with running statistics; a bias before a norm would have a gradient of rounding alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8, bias=False)]
        return nn.Sequential(*first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_batches(count: int = 5, samples: int = 12, last: int = 2) -> list[Batch]:
    """Returns samples of three classes; the last batch is a short one."""
    generator = torch.Generator().manual_seed(1)
    sizes = [samples] * (count - 1) + [last]
    return [
        (torch.randn(n, 6, generator=generator).double(), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]


def tiny(model: Callable[[], nn.Module] = perceptron, **options: Any) -> Training:
    """Returns a training of two epochs of five minibatches, with an evaluation within an epoch."""
    batches = make_batches(last=8 if model is with_statistics else 2)
    odd = [batches[0], *((x[:3], y[:3]) for x, y in batches[1:])]
    how: dict[str, Any] = {"model": model, "data": batches, "test": odd, "epochs": 2, "evaluate_at": (3,), "seed": 3}
    how |= {"loss": F.cross_entropy, "optimizer": SGD}
    return Training(**how | options)

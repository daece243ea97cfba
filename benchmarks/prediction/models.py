"""The two models: one whose weights are at its end, and one whose layers are alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from paced import PacedSGD
from torch import nn
from torch.nn import functional

CLASSES = 10
optimizer = partial(PacedSGD, lr=1e-3, momentum=0.9)


@dataclass(frozen=True)
class Job:
    """A model and what it is trained on.

    Attributes:
        make: returns the model, with the same weights at each call.
        batch: a minibatch and its targets.
        loss: of the model's output and the targets.
    """

    make: Callable[[], nn.Sequential]
    batch: tuple[torch.Tensor, torch.Tensor]
    loss: Callable[[Any, Any], torch.Tensor] = functional.cross_entropy


def _make_vgg() -> nn.Sequential:
    """Convolutions with large outputs, then dense layers with most of the weights."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for block in ((64, 64), (64, 64), (192, 192, 192)):
        for width in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels * 16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


def _make_transformer() -> nn.Sequential:
    """Eight layers that are alike, 25 MB of weights, small outputs."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(8)]
    return nn.Sequential(*layers, _Mean(), nn.Linear(256, CLASSES))


class _Mean(nn.Module):
    """The mean over a sequence."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.mean(1)


def _draw_batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator), torch.randint(0, CLASSES, (shape[0],), generator=generator)


MODELS = {
    "VGG-like": Job(_make_vgg, _draw_batch(48, 3, 32, 32)),
    "transformer": Job(_make_transformer, _draw_batch(16, 32, 256)),
}
"""Name -> what is trained."""

"""A network in the manner of VGG: convolutions, then heavy dense layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_CLASSES = 10
_CONVOLUTIONS = ((64, 64), (64, 64), (192, 192, 192))


@dataclass(frozen=True)
class Sizes:
    """How large the network and its minibatches are.

    Attributes:
        batch: samples in a minibatch.
        width: factor on the channels of the convolutions.
        dense: width of the dense layers.
    """

    batch: int = 12
    width: float = 1.0
    dense: int = 1024


def network(sizes: Sizes) -> nn.Sequential:
    """Returns the network, with the same weights at each call; takes float32[batch, 3, 32, 32]."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for block in _CONVOLUTIONS:
        for full_width in block:
            width = max(1, int(full_width * sizes.width))
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels * 16, sizes.dense), nn.ReLU()]
    layers += [nn.Linear(sizes.dense, sizes.dense), nn.ReLU(), nn.Linear(sizes.dense, _CLASSES)]
    return nn.Sequential(*layers)

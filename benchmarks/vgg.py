"""A network in the manner of VGG: convolutions with large outputs, then dense layers with most of the weights."""

from __future__ import annotations

import torch
from torch import nn

CLASSES = 10


def make_vgg(width: float = 1.0, dense: int = 1024) -> nn.Sequential:
    """Returns the network, with the same weights at each call; takes float32[batch, 3, 32, 32].

    Args:
        width: factor on the channels of the convolutions.
        dense: width of the dense layers.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for block in ((64, 64), (64, 64), (192, 192, 192)):
        for full_width in block:
            block_width = max(1, int(full_width * width))
            layers += [nn.Conv2d(channels, block_width, 3, padding=1), nn.ReLU()]
            channels = block_width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels * 16, dense), nn.ReLU(), nn.Linear(dense, dense), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(dense, CLASSES))

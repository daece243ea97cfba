"""The models whose steps are partitioned: of the sizes that Tofu publishes, and small ones that two cores can run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pipedream.extensions.meshes.layouts.tracing.trace import TracedStep, trace

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from rnn_partition import stacked
from wide_resnet import Bottleneck, wide_resnet


@dataclass(frozen=True)
class Model:
    """A model and the shape of its minibatch; the loss is the mean of the squared outputs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def traced(self, device: str = "cpu", *, updates: bool = False) -> tuple[nn.Module, torch.Tensor, TracedStep]:
        """Returns the model, a minibatch and their step.

        Args:
            updates: with SGD with momentum; else forward and backward alone.
        """
        torch.manual_seed(0)
        with torch.device(device):
            model, sample = self.make(), torch.randn(self.shape)
        optimizer = partial(torch.optim.SGD, momentum=0.9) if updates else None
        return model, sample, trace(model, sample, loss=_mean_square, optimizer=optimizer)


def _mean_square(output: torch.Tensor) -> torch.Tensor:
    return (output * output).mean()


def _make_perceptron() -> nn.Module:
    wide = (nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU())
    return nn.Sequential(*wide, nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512))


def _make_wide_resnet(layers: int, width: int) -> nn.Module:
    """Returns a wide residual network for pictures of the size of ImageNet's."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return wide_resnet(layers, width, 1000, *stem)


PUBLISHED = {
    "WResNet-152, widened 10 times": Model(partial(_make_wide_resnet, 152, 640), (32, 3, 224, 224)),
    "RNN, 10 layers, 20 time steps, 4096 units": Model(partial(stacked, 10, 4096), (128, 1, 20, 8)),
}
"""Only searched, on meta."""

TIMED = {
    "perceptron": Model(_make_perceptron, (512, 1024)),
    "LSTM": Model(partial(stacked, 1, 512), (256, 1, 4, 8)),
    "bottleneck": Model(partial(Bottleneck, 256, 256, 2), (16, 256, 16, 16)),
}
"""Run on ranks that are processes."""

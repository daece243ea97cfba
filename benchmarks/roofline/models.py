"""Four models, small enough for a CPU: the networks of the examples' kinds, and what they are run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Causal(nn.TransformerEncoderLayer):
    """A block of a decoder."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the block's output."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)


class First(nn.Module):
    """Takes the first of a pair."""

    def forward(self, value: Any) -> Tensor:
        """Returns it."""
        output: Tensor = value[0]
        return output


def cnn() -> tuple[nn.Module, Tensor]:
    """Convolutions like those of examples/digits.py, wider, on images of 32 by 32."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10)), torch.randn(32, 3, 32, 32)


def mlp() -> tuple[nn.Module, Tensor]:
    """Dense layers and non-linearities."""
    layers: list[nn.Module] = [nn.Linear(784, 1024), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(256, 784)


def transformer() -> tuple[nn.Module, Tensor]:
    """Three blocks of a small GPT over 128 positions."""
    blocks = [Causal(256, 4, 1024, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(1000, 256), *blocks, nn.LayerNorm(256), nn.Linear(256, 1000))
    return model, torch.randint(1000, (8, 128))


def lstm() -> tuple[nn.Module, Tensor]:
    """Two recurrent layers of a language model over 64 steps."""
    layers = [nn.LSTM(256, 256, batch_first=True), First(), nn.LSTM(256, 256, batch_first=True), First()]
    return nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000)), torch.randint(1000, (32, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "cnn": cnn,
    "mlp": mlp,
    "transformer": transformer,
    "lstm": lstm,
}

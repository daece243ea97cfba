"""Profiles of real models on the card, as files that `pipedream plan` reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.model.profile import Profile

OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
IMAGE_SIDE, CLASSES = 224, 1000


def vgg16() -> nn.Module:
    """Simonyan and Zisserman, ICLR 2015, table 1, column D."""
    layers: list[nn.Module] = []
    fan_in = 3
    for blocks, fan_out in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(blocks):
            layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU(inplace=True)]
            fan_in = fan_out
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for wide in (512 * 7 * 7, 4096):
        layers += [nn.Linear(wide, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, CLASSES))


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al., CVPR 2016, section 4.1); its stride is in the 3 x 3 convolution."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        fan_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, fan_out, 1, bias=False), nn.BatchNorm2d(fan_out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """He et al., CVPR 2016, table 1."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    fan_in = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(fan_in, width, stride if block == 0 else 1))
            fan_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


class Embed(nn.Module):
    """Tokens and places."""

    def __init__(self, words: int, places: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(tokens) + self.places.weight[: tokens.shape[1]]


class Block(nn.Module):
    """A layer of GPT-2 (Radford et al., 2019): norms before attention and dense layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        return x + self.outer(F.gelu(self.inner(self.second(x)), approximate="tanh"))


def gpt2_medium(layers: int = 24, width: int = 1024, words: int = 50257) -> nn.Module:
    """24 layers of width 1024; the head has weights of its own."""
    blocks = [Block(width, width // 64) for _ in range(layers)]
    head = [nn.LayerNorm(width), nn.Linear(width, words, bias=False)]
    return nn.Sequential(Embed(words, 1024, width), *blocks, *head)


def _draw_images(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, IMAGE_SIDE, IMAGE_SIDE), torch.randint(CLASSES, (batch,))


def _draw_tokens(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(50257, (batch, 1025))
    return tokens[:, :-1], tokens[:, 1:].flatten()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int, torch.dtype | None]] = {
    "vgg16": (vgg16, _draw_images, 64, None),
    "resnet50": (resnet50, _draw_images, 128, None),
    "gpt2_medium": (gpt2_medium, _draw_tokens, 8, torch.bfloat16),
}
"""Name -> its function, that of its (inputs, targets), samples in a minibatch, and autocast's dtype."""


def write_profile(name: str, device: torch.device, folder: Path, *, runs: int = 10) -> Profile:
    """Measures a model into ``<folder>/<name>.json``."""
    build, data, samples, autocast = MODELS[name]
    torch.manual_seed(0)
    x, y = data(samples)
    y = y.to(device)
    profile = pd.profile(
        build(),
        x,
        loss=lambda output: F.cross_entropy(output.flatten(0, -2), y),
        optimizer=OPTIMIZER,
        device=str(device),
        autocast=autocast,
        runs=runs,
        warmup=min(3, runs),
    )
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(folder / f"{name}.json")
    return profile

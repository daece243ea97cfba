"""The tasks: handwritten digits by a deep narrow convolutional network, characters of source code by a small GPT.

Both have eight layers that are alike, one a stage at eight stages; the GPT for sixteen stages has sixteen. They are
normalised sample by sample (GroupNorm, LayerNorm), so that no statistics couple the samples of a minibatch. There is no
dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from sysconfig import get_path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNITS = 8
MODULES = "argparse ast calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data and its training.

    Attributes:
        units: -> the layers of a fresh model, drawn from torch's generator.
        data: -> training and test samples, each a pair (inputs, targets).
        loss: (output, targets) -> mean.
        metric: what is shown: 'accuracy' or 'loss'.
        batch: samples of a minibatch.
        rates: optimizer -> the rate in the middle of those that are tried.
        updates: of a run.
        warmup: share of them over which rates rise.
        stages: numbers of them in which it is cut.
        layers: of the model.
    """

    name: str
    units: Callable[[], list[nn.Module]]
    data: Callable[[], tuple[Pair, Pair]]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: str
    batch: int
    rates: dict[str, float]
    updates: int = 300
    warmup: float = 0.1
    stages: tuple[int, ...] = (2, 4, 8)
    layers: int = UNITS

    def model(self, seed: int) -> list[nn.Module]:
        """Returns fresh layers; the same seed gives the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.units()

    def batches(self, seed: int) -> list[Pair]:
        """Returns the minibatches of a run, whole ones alone, in an order that follows from the seed."""
        (x, y), _ = self.data()
        draw = torch.Generator().manual_seed(seed)
        batches: list[Pair] = []
        while len(batches) < self.updates:
            order = torch.randperm(len(x), generator=draw).split(self.batch)
            batches += [(x[rows], y[rows]) for rows in order if len(rows) == self.batch]
        return batches[: self.updates]

    def factor(self, update: int) -> float:
        """Returns the factor on the learning rate: a linear rise, then half a cosine down to a tenth."""
        rise = max(1, round(self.warmup * self.updates))
        fall = 0.1 + 0.45 * (1 + math.cos(math.pi * min(update / self.updates, 1.0)))
        return min(1.0, (update + 1) / rise) * fall

    def settings(self) -> dict[str, object]:
        """Returns what a run depends on, as JSON values."""
        return {"batch": self.batch, "updates": self.updates, "warmup": self.warmup, "rates": self.rates}


class Convolution(nn.Sequential):
    """Kernel, GroupNorm, ReLU."""

    def __init__(self, inputs: int, channels: int) -> None:
        kernel = nn.Conv2d(inputs, channels, 3, padding=1, bias=False)
        super().__init__(kernel, nn.GroupNorm(2, channels), nn.ReLU())


class Head(nn.Module):
    """The output layer, after the rest of the network."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x.flatten(1) if x.ndim == 4 else x)  # type: ignore[no-any-return]


class Embedded(nn.Module):
    """The input layer, in front of the first block."""

    def __init__(self, block: nn.Module, symbols: int, context: int, width: int) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(symbols, width), block
        self.embed_places = nn.Parameter(torch.randn(context, width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.embed(x) + self.embed_places[: x.shape[1]])  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer's block, normalised first; ReLU, whose derivative is fast on a CPU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.read(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.write(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def digits_units(channels: int = 8, count: int = UNITS) -> list[nn.Module]:
    """Returns so many convolutions, halved in size once, the last with the output layer."""
    layers: list[nn.Module] = [Convolution(channels if i else 1, channels) for i in range(count)]
    layers[count // 2 - 1].append(nn.MaxPool2d(2))  # type: ignore[operator]
    layers[-1] = Head(layers[-1], 16 * channels, 10)
    return layers


def char_gpt_units(
    width: int = 32, heads: int = 2, context: int = 32, symbols: int = 128, count: int = UNITS
) -> list[nn.Module]:
    """Returns so many blocks, the first with the embedding, the last with the output layer."""
    layers: list[nn.Module] = [Block(width, heads) for _ in range(count)]
    layers[0] = Embedded(layers[0], symbols, context, width)
    layers[-1] = Head(nn.Sequential(layers[-1], nn.LayerNorm(width)), width, symbols)
    return layers


@cache
def digits() -> tuple[Pair, Pair]:
    """Returns 797 digits of 8 x 8 pixels to train on and 1,000 to test (UCI, carried by scikit-learn)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[1000:], y[1000:]), (x[:1000], y[:1000])


@cache
def characters(context: int = 32) -> tuple[Pair, Pair]:
    """Returns windows of the source of modules of Python's standard library; every tenth is kept for the test."""
    text = "".join(Path(get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES.split())
    windows = torch.tensor(list(text.encode("ascii", "replace"))).unfold(0, context + 1, context)
    is_test = torch.arange(len(windows)) % 10 == 0
    train, test = windows[~is_test], windows[is_test]
    return (train[:, :-1], train[:, 1:]), (test[:250, :-1], test[:250, 1:])


def measure_per_token(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


_GPT_RATES = {"sgd": 0.1, "adamw": 0.004, "nadam": 0.004, "muon": 0.008}

TASKS = {
    "digits": Task(
        "digits", digits_units, digits, F.cross_entropy, metric="accuracy", batch=32,
        rates={"sgd": 0.0125, "adamw": 0.005, "nadam": 0.005},
    ),
    "char_gpt": Task(
        "char_gpt", char_gpt_units, characters, measure_per_token, metric="loss", batch=16, rates=_GPT_RATES
    ),
    "char_gpt_16": Task(
        "char_gpt_16", partial(char_gpt_units, count=16), characters, measure_per_token, metric="loss", batch=16,
        rates=_GPT_RATES, stages=(16,), layers=16,
    ),
}  # fmt: skip

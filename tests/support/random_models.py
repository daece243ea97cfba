"""Random models: modules, nested blocks, skip connections and all kinds of code between them."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import CLASSES, PAD, WIDTH, WORDS

Step = Callable[[list[Tensor], Tensor], Tensor]


class RandomBlock(nn.Module):
    """Steps on the newest tensors; returns one or two of them, in a container or alone."""

    def __init__(self, rng: random.Random, size: int, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.bias = nn.Parameter(torch.randn(WIDTH) / 4)
        self.steps = [self._draw(rng, depth) for _ in range(size)]
        self.returns = rng.choice(["one", "pair", "dict"])

    def forward(self, live: list[Tensor], mask: Tensor) -> Any:
        live = list(live)
        for step in self.steps:
            live.append(step(live, mask))
        if self.returns == "one":
            return live[-1]
        return (live[-1], live[-2]) if self.returns == "pair" else {"a": live[-2], "b": live[-1]}

    def _draw(self, rng: random.Random, depth: int) -> Step:
        def pick(live: list[Tensor], back: int) -> Tensor:
            return live[max(0, len(live) - back)]

        def add_part(module: nn.Module) -> nn.Module:
            self.parts.append(module)
            return module

        i, j = rng.randint(1, 2), rng.randint(1, 5)
        kind = rng.choice([*("linear", "norm", "block") * 2, *_GLUE, "again", "own", "cat", "in_place"])
        if kind == "block" and depth:
            block = add_part(RandomBlock(rng, rng.randint(1, 3), depth - 1))
            return lambda live, mask: newest(block([pick(live, i), pick(live, j)], mask))
        if kind in _GLUE:
            return lambda live, mask: _GLUE[kind](pick(live, i), pick(live, j), mask)
        if kind == "own":
            return lambda live, mask: pick(live, i) * self.bias + pick(live, j)
        if kind == "norm":
            norm = add_part(nn.LayerNorm(WIDTH))
            return lambda live, mask: norm(pick(live, i)) + pick(live, j)
        if kind == "cat":
            wide = add_part(nn.Linear(2 * WIDTH, WIDTH))
            return lambda live, mask: wide(torch.cat([pick(live, i), pick(live, j)], -1))
        linears = [part for part in self.parts if isinstance(part, nn.Linear) and part.in_features == WIDTH]
        linear = rng.choice(linears) if kind == "again" and linears else add_part(nn.Linear(WIDTH, WIDTH))
        if kind == "in_place":
            return lambda live, mask: linear(pick(live, i)).add_(pick(live, j)).relu_()
        return lambda live, mask: torch.tanh(linear(pick(live, i)))


def newest(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["a"] + output["b"]
    return output[0] - output[1] if isinstance(output, tuple) else output


_GLUE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda a, b, mask: a + b,
    "gate": lambda a, b, mask: a * torch.sigmoid(b),
    "mask": lambda a, b, mask: a.masked_fill(~mask.unsqueeze(2), 0.0) + 0.5 * b,
    "where": lambda a, b, mask: torch.where(mask.unsqueeze(2), a, b),
    "attend": lambda a, b, mask: F.scaled_dot_product_attention(a, b, b, attn_mask=mask.unsqueeze(1)),
    "turn": lambda a, b, mask: a.transpose(1, 2).reshape(a.shape[0], -1).view_as(a) + b,
    # Both sides read both tensors: what a branch reads that the sample's does not is an error (test_errors.py).
    "branch": lambda a, b, mask: torch.tanh(a) + b if a.mean() > 0 else a + 0.5 * b,
    "number": lambda a, b, mask: a / (1.0 + b.detach().abs().max().item()),
    "detach": lambda a, b, mask: a + b.detach(),
}


class RandomModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(RandomBlock(rng, rng.randint(2, 4), 2) for _ in range(rng.randint(2, 4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != PAD
        live = [self.embed(tokens)]
        for block in self.blocks:
            live.append(live[-1] + newest(block(live, mask)))
        return self.head(live[-1].mean(1))

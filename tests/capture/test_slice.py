"""A model in slices gives what it gives in one piece, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from marks import spread
from own_models import PAD, WIDTH, WORDS, padded_tokens
from random_models import RandomBlock, newest
from torch import Tensor, nn

from pipedream.capture.compare import split
from pipedream.capture.slice import ModelSlice
from pipedream.capture.slice_forward import call_model
from pipedream.capture.structure import walk
from pipedream.core.model.graph import LayerGraph

Numbers = dict[str, Tensor | None]


@dataclass
class Output:
    logits: Tensor
    count: int
    nothing: None = None


class Counted(nn.Module):
    """Normalises with running statistics, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.norm(x.transpose(1, 2)).transpose(1, 2) + self.calls


class Drawn(nn.Module):
    """Random blocks with state between them, which returns its tensors in a container."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(RandomBlock(rng, rng.randint(2, 4), 1) for _ in range(rng.randint(1, 3)))
        self.counted = Counted()
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("seen", torch.zeros(()))
        self.returns = rng.choice(["one", "tuple", "dict", "object"])
        if rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        mask = tokens != PAD
        live = [self.embed(tokens)]
        for number, block in enumerate(self.blocks):
            live.append(live[-1] + newest(block(live, mask)))
            if number == 0:
                live.append(self.counted(live[-1]))
        if self.training:
            self.seen.add_(mask.sum())
        logits = self.head(live[-1])
        if self.returns == "tuple":
            return logits, [live[0], live[-1]]
        if self.returns == "dict":
            return {"logits": logits, "first": live[0]}
        return Output(logits, len(live)) if self.returns == "object" else logits


def results(model: nn.Module, output: Any) -> tuple[Numbers, Numbers, Numbers]:
    """Outputs, gradients and buffers; the gradients are taken out of the model."""
    outputs = {path: leaf.detach() if isinstance(leaf, Tensor) else leaf for path, leaf in walk(output)}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return outputs, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


def backward(output: Any) -> None:
    floats = [leaf for _, leaf in walk(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if floats:
        weights = [torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).view(leaf.shape) for leaf in floats]
        torch.autograd.backward(floats, weights)


def run_whole(model: nn.Module, inputs: Any) -> tuple[Numbers, Numbers, Numbers]:
    output = call_model(model, inputs)
    backward(output)
    return results(model, output)


def run_slices(model: nn.Module, graph: LayerGraph, cuts: Sequence[int], inputs: Any) -> tuple[Numbers, ...]:
    """As stages do it: only what is sent reaches the next slice, and only gradients of it come back."""
    value, sent = inputs, []
    for first, last in pairwise([0, *cuts, len(graph.layers)]):
        value = ModelSlice(model, graph, first, last)(value)
        if last < len(graph.layers):
            arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in value["values"]]
            sent.append((value["values"], arrived))
            value = {**value, "values": [tensor.clone() for tensor in arrived]}
    backward(value)
    for left, arrived in reversed(sent):
        pairs = [(a, b.grad) for a, b in zip(left, arrived, strict=True) if b.grad is not None]
        if pairs:
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
    return results(model, value)


def check(make: Any, batches: Sequence[Any], cuts: Sequence[Sequence[int]], graph: LayerGraph) -> None:
    for training in (True, False):
        for each in cuts:
            whole, parts = make().train(training), make().train(training)
            for inputs in batches:
                expected, actual = run_whole(whole, inputs), run_slices(parts, graph, each, inputs)
                for what, a, b in zip(("output", "gradient", "buffer"), expected, actual, strict=True):
                    assert a.keys() == b.keys()
                    for name in a:
                        assert_same(f"{what} {name} with cuts {each}", a[name], b[name], exact=what != "gradient")


def assert_same(what: str, a: Any, b: Any, *, exact: bool) -> None:
    if not isinstance(a, Tensor):
        assert type(a) is type(b), what
        assert a == b, what
    else:
        # The terms of a gradient's sum may be in another order.
        torch.testing.assert_close(b, a, rtol=0.0 if exact else 1e-10, atol=0.0 if exact else 1e-12, msg=what)


def cuts_of(rng: random.Random, graph: LayerGraph) -> list[int]:
    inner = range(1, len(graph.layers))
    return sorted(rng.sample(inner, min(len(inner), rng.randint(1, 4))))


@pytest.mark.parametrize("seed", spread(pytest.param(n, marks=[] if n < 6 else pytest.mark.slow) for n in range(80)))
def test_random_modules_at_random_cuts(seed: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(seed)
        return Drawn(seed).double()

    rng = random.Random(seed)
    graph, _ = split(make(), padded_tokens(0, 4, 5)[0], (), False)
    every = list(range(1, len(graph.layers)))
    batches = [padded_tokens(n, 4, length)[0] for n, length in enumerate((5, 5, 3))]
    check(make, batches, [every, cuts_of(rng, graph)], graph)

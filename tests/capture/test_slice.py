"""A model in slices gives what it gives in one piece, wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from built import Built, unchanged
from marks import seeds
from random_models import RandomBlock, newest
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import PAD, WIDTH, WORDS, padded_tokens

import pipedream as pd
from pipedream.capture import compare, slice, structure

Make = Callable[[], nn.Module]


def seeded(kind: Make, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


@dataclass
class Output:
    logits: Tensor
    count: int
    nothing: None = None


def count(module: Any, x: Tensor) -> Tensor:
    """Normalises with running statistics, and counts its calls."""
    if module.training:
        module.calls += 1
    return module.norm(x.transpose(1, 2)).transpose(1, 2) + module.calls


class Drawn(nn.Module):
    """Random blocks with state between them, which returns its tensors in a container."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(RandomBlock(rng, rng.randint(2, 4), 1) for _ in range(rng.randint(1, 3)))
        self.counted = Built(count, norm=nn.BatchNorm1d(WIDTH), calls=nn.Buffer(torch.zeros(())))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("tokens", torch.zeros(()))
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
            self.tokens.add_(mask.sum())
        logits = self.head(live[-1])
        if self.returns == "tuple":
            return logits, [live[0], live[-1]]
        if self.returns == "dict":
            return {"logits": logits, "first": live[0]}
        return Output(logits, len(live)) if self.returns == "object" else logits


def results(model: nn.Module, output: Any) -> dict[str, Any]:
    """Outputs, gradients and buffers; the gradients are taken out of the model."""
    outputs = {
        f"output {path}": leaf.detach() if isinstance(leaf, Tensor) else leaf for path, leaf in structure.walk(output)
    }
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return outputs | gradients | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def backward(output: Any) -> None:
    floats = [leaf for _, leaf in structure.walk(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if floats:
        weights = [torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).view(leaf.shape) for leaf in floats]
        torch.autograd.backward(floats, weights)


def run_slices(model: nn.Module, graph: pd.LayerGraph, cuts: Sequence[int], inputs: Any) -> dict[str, Any]:
    """As stages do it: only what is sent reaches the next slice, and only gradients of it come back."""
    value, sent = inputs, []
    for first, last in pairwise([0, *cuts, len(graph.layers)]):
        value = slice.ModelSlice(model, graph, first, last)(value)
        if last < len(graph.layers):
            arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in value["values"]]
            sent.append((value["values"], arrived))
            value = {**value, "values": [tensor.clone() for tensor in arrived]}
    backward(value)
    for sent_values, arrived in reversed(sent):
        pairs = [(a, b.grad) for a, b in zip(sent_values, arrived, strict=True) if b.grad is not None]
        if pairs:
            torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
    return results(model, value)


def check(make: Any, batches: Sequence[Any], cuts: Sequence[Sequence[int]], graph: pd.LayerGraph) -> None:
    for training, ends in product((True, False), cuts):
        whole, parts = make().train(training), make().train(training)
        for inputs in batches:
            output = pd.capture.call_model(whole, inputs)
            backward(output)
            expected, actual = results(whole, output), run_slices(parts, graph, ends, inputs)
            assert actual.keys() == expected.keys()
            for what, value in expected.items():
                # The terms of a gradient's sum may be in another order.
                rtol, atol = (1e-10, 1e-12) if what.startswith("gradient") else (0.0, 0.0)
                torch.testing.assert_close(actual[what], value, rtol=rtol, atol=atol, msg=f"{what} with cuts {ends}")


@pytest.mark.parametrize("seed", seeds(3, 18, 80))
def test_random_modules_at_random_cuts(seed: int) -> None:
    make, rng = partial(seeded, partial(Drawn, seed), seed), random.Random(seed)
    graph = pd.capture(make(), padded_tokens(0, 4, 5)[0], finest=True).graph
    every = list(range(1, len(graph.layers)))
    some = sorted(rng.sample(every, min(len(every), rng.randint(1, 4))))
    check(make, [padded_tokens(n, 4, length)[0] for n, length in enumerate((5, 5, 3))], [every, some], graph)


def attend(block: Any, x: Tensor, state: Tensor | None) -> Tensor:
    """Writes what it has seen into a tensor that all blocks share."""
    y = torch.tanh(block.mix(x))
    if state is not None:
        state[block.number] = y.detach().mean(1)
    return x + y


def remember(model: Any, tokens: Tensor) -> Any:
    """In evaluation it also returns what earlier blocks have computed, as XLNet and RWKV do."""
    x = model.embed(tokens)
    state = None if model.training else x.new_zeros(len(model.blocks), len(x), WIDTH)
    memories = []
    for block in model.blocks:
        memories.append((x[:, 1:].detach(), x.topk(2, dim=2).values))
        x = block(x, state)
    return (model.norm(x),) if model.training else (model.norm(x), memories, state)


def remembers() -> nn.Module:
    blocks = nn.ModuleList(Built(attend, number=number, mix=nn.Linear(WIDTH, WIDTH)) for number in range(3))
    return Built(remember, embed=nn.Embedding(WORDS, WIDTH), blocks=blocks, norm=nn.LayerNorm(WIDTH))


def with_head() -> nn.Module:
    def forward(model: Any, tokens: Tensor) -> Any:
        x, *others = model.body(tokens)
        return model.head(x), *others

    return Built(forward, body=remembers(), head=nn.Linear(WIDTH, WORDS))


@pytest.mark.parametrize("kind", [remembers, with_head])
def test_what_a_model_returns_in_evaluation_only(kind: Make) -> None:
    batches = [padded_tokens(n, 4, length)[0] for n, length in enumerate((5, 3))]
    captured = pd.capture(seeded(kind), batches[0], finest=True)
    graph = captured.graph
    assert not captured.refused
    assert pd.LayerGraph.from_json(graph.to_json()) == graph
    every = list(range(1, len(graph.layers)))
    check(partial(seeded, kind), batches, [every, *([i] for i in every)], graph)


X = torch.randn(3, 4)


class Blocks(nn.Module):
    """A residual network with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        return {"logits": self.last(self.dropout(self.norm(x)) + x)}


forward = slice.ModelSlice.forward


def changing(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Returns a slice's forward that changes what is sent."""

    def changed(self: slice.ModelSlice, arriving: Any) -> Any:
        sent = forward(self, arriving)
        return sent | {"values": [change(value) for value in sent["values"]]} if "values" in sent else sent

    return changed


def counting(self: slice.ModelSlice, arriving: Any) -> Any:
    if not self.is_first or not self.is_last:
        self.model.norm.num_batches_tracked += 1
    return forward(self, arriving)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (changing(Tensor.detach), r"lose the gradient of the parameter '\w+\.\w+' of the module"),
        (changing(lambda value: value * 1.01), "in training mode the output 'logits' differs"),
        (counting, r"buffer 'norm[.]num_batches_tracked' differs"),
    ],
)
def test_what_the_layers_lose_is_found(monkeypatch: pytest.MonkeyPatch, fault: Any, message: str) -> None:
    monkeypatch.setattr(slice.ModelSlice, "forward", fault)
    model = Blocks()
    with unchanged(model), pytest.raises(pd.PipelineError, match=rf"the layers of Blocks.*{message}"):
        pd.capture(model, X)


def test_sums_of_float64_are_of_float64() -> None:
    x = torch.randn(1 << 17, dtype=torch.float64)
    assert compare.fingerprint(x)[2] == pytest.approx(x.abs().sum().item(), rel=1e-12)
    assert compare.fingerprint(x.float())[2] == pytest.approx(x.abs().sum().item(), rel=1e-4)

"""What the modules of a model hold is after a run as it was before."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from built import unchanged
from torch import nn

import pipedream as pd
from pipedream.capture.preserve_state import running

VALUES: dict[str, tuple[Any, Callable[[Any], object]]] = {  # an attribute, and what a forward does to it
    "list": ([1, 2], list.clear),
    "deque": (deque([1], maxlen=2), lambda value: value.append(2)),
    "dict": ({"a": 1}, lambda value: value.update(a=2)),
    "set": ({1}, lambda value: value.add(2)),
    "tuple": (([1],), lambda value: value[0].clear()),
    "nested": ({"a": [{1}]}, lambda value: value["a"][0].clear()),
    "instance": (SimpleNamespace(x=1), lambda value: setattr(value, "y", 2)),
    "partial": (partial(sorted, [1]), lambda value: value.args[0].clear()),
    "tensor": (torch.ones(2), torch.Tensor.zero_),
    "array": (np.ones(2), lambda value: value.fill(0)),
    "random": (random.Random(0), random.Random.random),
    "generator": (np.random.default_rng(0), np.random.Generator.random),
    "state": (np.random.RandomState(0), np.random.RandomState.rand),
}


@pytest.mark.parametrize("name", VALUES)
def test_an_attribute_is_left_as_it_was(name: str) -> None:
    value, change = VALUES[name]
    module, before = nn.Identity(), pickle.dumps(value)
    module.value = value
    with pd.capture.preserve_state([module]):
        change(value)
        assert pickle.dumps(value) != before
    assert module.value is value
    assert pickle.dumps(value) == before


@pytest.mark.parametrize(
    "context", [lambda layer: running(layer, (), True), lambda layer: pd.capture.preserve_state([layer])]
)
def test_a_weight_that_a_forward_writes_is_as_it_was(context: Callable[[nn.Module], Any]) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    with unchanged(layer, is_restored=True), context(layer), torch.no_grad():
        assert layer.weight.grad is None
        layer.weight.mul_(2).grad = torch.zeros(2, 2)
        layer.bias.data = torch.zeros(2)


class Slow(nn.Module):
    """Follows the weights of its other part, in code that each stage runs; `do` is a part of its forward."""

    def __init__(self, do: Callable[[Slow], object] = lambda _: None) -> None:
        super().__init__()
        self.fast, self.slow, self.head = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
        self.do = do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fast(x)
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        self.do(self)
        return self.head(hidden + self.slow(x))


def test_a_parameter_that_a_forward_makes_is_refused() -> None:
    model = Slow(lambda model: hasattr(model, "scale") or setattr(model, "scale", nn.Parameter(torch.ones(()))))
    with pytest.raises(pd.PipelineError, match=r"makes or removes the parameter 'scale'.*run the model once"):
        pd.capture(model, torch.ones(3, 4))
    assert not hasattr(model, "scale")


def test_a_parameter_that_a_forward_freezes_stays_frozen() -> None:
    model = Slow(lambda model: model.fast.bias.requires_grad_(False))
    with unchanged(model, is_restored=True):  # though a stage follows weights of another
        assert len(pd.profile(model, torch.ones(3, 4), warmup=0, runs=1).graph.layers) > 1
    assert not model.fast.bias.requires_grad


def test_a_hook_that_steps_an_optimizer_is_refused_before_it_does() -> None:
    model = Slow()
    optimizer, before = torch.optim.SGD([model.fast.weight], lr=0.1), model.fast.weight.clone()
    model.fast.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(pd.PipelineError, match=r"'fast.weight' has a hook.*Do in the optimizer what it does"):
        pd.profile(model, torch.ones(3, 4))
    assert torch.equal(model.fast.weight, before)

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
from torch import nn

from pipedream.capture import preserve_state
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
    with preserve_state([module]):
        change(value)
        assert pickle.dumps(value) != before
    assert module.value is value
    assert pickle.dumps(value) == before


def test_a_weight_that_a_forward_writes_is_as_it_was() -> None:
    layer = nn.Linear(2, 2)
    before = {name: (tensor, tensor.clone()) for name, tensor in layer.state_dict(keep_vars=True).items()}
    with running(layer, (), True), torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.data.zero_()
    for name, tensor in layer.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])

"""A split that would lose something is found, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import Built, unchanged
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.capture.compare import fingerprint
from pipedream.capture.slice import ModelSlice

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


def count(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    module.memory = x
    return x + module.calls


def make_chain() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5), Built(count, calls=0))


@pytest.mark.parametrize("make", [Blocks, make_chain])
def test_the_model_and_the_sample_are_left_as_they_were(make: Callable[[], nn.Module]) -> None:
    model, is_chain = make(), make is make_chain
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    for module in model.modules():
        module.train(not isinstance(module, nn.Dropout))
        if not is_chain:  # a container with hooks is none
            module.register_forward_hook(lambda *_: None)
    x = X.clone().requires_grad_(not is_chain)
    with unchanged(model, also=(x,)):
        assert len(pd.capture(model, x).graph.layers) > 2


forward = ModelSlice.forward


def changing(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Returns a slice's forward that changes what is sent."""

    def changed(self: ModelSlice, arriving: Any) -> Any:
        sent = forward(self, arriving)
        return sent | {"values": [change(value) for value in sent["values"]]} if "values" in sent else sent

    return changed


def counting(self: ModelSlice, arriving: Any) -> Any:
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
    monkeypatch.setattr(ModelSlice, "forward", fault)
    model = Blocks()
    with unchanged(model), pytest.raises(pd.PipelineError, match=rf"the layers of Blocks.*{message}"):
        pd.capture(model, X)


def test_sums_of_float64_are_of_float64() -> None:
    x = torch.randn(1 << 17, dtype=torch.float64)
    assert fingerprint(x)[2] == pytest.approx(x.abs().sum().item(), rel=1e-12)
    assert fingerprint(x.float())[2] == pytest.approx(x.abs().sum().item(), rel=1e-4)

"""A split that would lose something is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import unchanged
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.capture import compare, slice

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

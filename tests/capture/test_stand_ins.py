"""Stand-ins look like the tensors in whose place they are, and leave no trace."""

from typing import Any

import pytest
import torch
from built import Built
from torch import nn

import pipedream as pd


def list_tensors(model: nn.Module) -> list[Any]:
    return [(name, id(t)) for m in model.modules() for name, t in (*m._parameters.items(), *m._buffers.items())]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_computed_and_the_model_is_as_it_was(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LSTM(3, 2)).to(device)
    before, flat = list_tensors(model), list(map(id, model[2]._flat_weights))
    x = torch.randn(5, 4, device=device)
    with pd.capture.stand_ins(model, (x, [x])) as (a, (b,)):
        assert a is b
        output, _ = model(a)
        assert (tuple(output.shape), output.device.type) == ((5, 2), "cpu")
        assert not {identity for _, identity in list_tensors(model)} & {identity for _, identity in before}
        assert model[2]._flat_weights[0] is model[2].weight_ih_l0
    assert list_tensors(model) == before
    assert list(map(id, model[2]._flat_weights)) == flat
    assert set(model[2].__dict__) == set(nn.LSTM(3, 2).__dict__)


def test_dtype_of_floating_point_tensors_only() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    with pd.capture.stand_ins(model, (torch.zeros(3, dtype=torch.long),), torch.bfloat16) as (tokens,):
        assert tokens.dtype is torch.long
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert [p.requires_grad for p in model.parameters()] == [True, False, False]
        assert model(tokens).dtype is torch.bfloat16


def test_plain_attributes_that_are_tensors() -> None:
    mask, scales = torch.ones(4, device="meta"), {"all": torch.ones(4, device="meta")}
    model = Built(lambda model, x: x * model.mask * model.scales["all"], mask=mask, scales=scales)
    with pd.capture.stand_ins(model, (torch.ones(2, 4),)) as (x,):
        assert model(x).device.type == "cpu"
    assert model.mask is mask

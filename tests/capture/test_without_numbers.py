"""Models are captured and profiled without numbers: on the meta device, or by stand-ins that leave no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import Built
from marks import long, slow
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import HF, OWN

import pipedream as pd


def estimate(model: nn.Module, inputs: Any) -> pd.Profile:
    return pd.profile(model, inputs, device="meta", as_device="A100-80GB")


def list_sizes(profile: pd.Profile) -> list[tuple[str, int, int, int]]:
    costs = [(layer.output_bytes, layer.parameter_bytes, layer.activation_bytes) for layer in profile.layers]
    return [(layer.name, *cost) for layer, cost in zip(profile.graph.layers, costs, strict=True)]


NEED_NUMBERS = "packed_lstm", "hf_mixtral", "hf_gpt_oss", "hf_deepseek_v3"
"""They branch on computed numbers, mostly on which expert a word goes to."""


def case_of(name: str) -> Any:
    if name in HF:
        pytest.importorskip("transformers")
    return {**HF, **OWN}[name]


SLOW = ["tied_gpt", "hf_mamba"]
LONG = ["unet", "hf_llama", "hf_gpt2", "hf_t5"]


@pytest.mark.parametrize("name", ["early_exits", *(slow(name) for name in SLOW), *(long(name) for name in LONG)])
def test_sizes_are_those_of_a_run(name: str) -> None:
    case = case_of(name)
    model, inputs = case.build(), case.inputs(case.batch(0, 3, 8))
    expected = list_sizes(pd.profile(model, inputs, warmup=0, runs=1))
    assert list_sizes(estimate(model, inputs)) == expected
    with torch.device("meta"):
        empty = case.make().train()
    assert list_sizes(estimate(empty, inputs)) == expected


def residual() -> nn.Module:
    def forward(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
        y = x + model.a(x) if bool((lengths > 2).all()) else x
        return y + model.b(y)

    return Built(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))


def test_numbers_of_integer_inputs_decide_the_path() -> None:
    layers = []
    for lengths in (torch.tensor([3, 4]), torch.tensor([1, 4])):
        profile = estimate(residual(), (torch.ones(2, 4), lengths))
        layers.append([layer.name for layer in profile.graph.layers])
    assert layers == [["a", "b"], ["Built"]]


def test_a_model_on_the_meta_device_is_captured() -> None:
    inputs = torch.ones(2, 4), torch.tensor([3, 4])
    assert pd.capture(residual().to("meta"), inputs).graph == pd.capture(residual(), inputs).graph


DRAWS: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "nothing": (False, lambda y: y.add_(1)),
    "dropout": (True, lambda y: F.dropout(y, inplace=True)),
    "dropout by position": (True, lambda y: F.dropout(y, 0.5, True, True)),
    "dropout_": (True, lambda y: torch.dropout_(y, 0.5, True)),
    "no dropout": (False, lambda y: F.dropout(y, 0.0, inplace=True)),
    "dropout in evaluation": (False, lambda y: F.dropout(y, 0.5, False, True)),
    "alpha_dropout": (True, lambda y: F.alpha_dropout(y, training=True, inplace=True)),
    "alpha_dropout in evaluation": (False, lambda y: F.alpha_dropout(y, inplace=True)),
    "rrelu": (True, lambda y: F.rrelu(y, training=True, inplace=True)),
    "rrelu_": (True, lambda y: torch.rrelu_(y, training=True)),
    "rrelu in evaluation": (False, lambda y: F.rrelu(y, inplace=True)),
    "bernoulli_": (True, lambda y: y.mul_(torch.empty_like(y).bernoulli_())),
    "uniform_": (True, lambda y: y.add_(torch.empty_like(y).uniform_())),
    "normal_": (True, lambda y: y.add_(torch.empty_like(y).normal_())),
    "kaiming_uniform_": (True, lambda y: nn.init.kaiming_uniform_(y.new_empty(2, 4)).add(y)),
    "a pool": (True, lambda y: F.fractional_max_pool2d(y[None, None], 2, output_size=(1, 2)).flatten()),
    "attention": (True, lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.5)[0]),
    "attention without dropout": (False, lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None])[0]),
    "creation": (True, lambda y: y + torch.rand(4, device=y.device)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen(name: str) -> None:
    """Also one in place: the generator is seeded before the same layers as where there are numbers."""
    draws, function = DRAWS[name]
    model = Built(lambda model, x: model.b(function(model.a(x) * 1)), a=nn.Linear(4, 4), b=nn.LazyLinear(4))
    x = torch.ones(2, 4)
    model(x)
    seeded = pd.capture(model, x).graph.seeded
    assert seeded == (("a",) if draws else ())
    assert estimate(model, x).graph.seeded == seeded
    assert pd.capture(model.to("meta"), x.to("meta")).graph.seeded == seeded


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_dropouts_of_a_transformer_are_seen(dropout: float) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True), 2)
    x = torch.ones(2, 3, 4)
    assert estimate(model, x).graph.seeded == pd.capture(model, x).graph.seeded
    assert bool(estimate(model, x).graph.seeded) == bool(dropout)


@pytest.mark.parametrize("name", ["value_branch", *(slow(name) for name in NEED_NUMBERS)])
def test_models_that_need_numbers_say_so(name: str) -> None:
    case = case_of(name)
    with pytest.raises(pd.PipelineError, match="profile it on a device that computes"):
        estimate(case.build(), case.inputs(case.batch(0, 3, 8)))


def test_a_chain_that_needs_numbers_says_so() -> None:
    with pytest.raises(pd.PipelineError, match=r"DataDependent.*a device that computes"):
        estimate(nn.Sequential(Built(lambda _, x: x if x.sum() > 0 else -x)), torch.ones(2))


# -- stand-ins -----------------------------------------------------------------------------------------


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

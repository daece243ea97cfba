"""Placeholders look like the tensors that they stand for, and compute nothing."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import Built
from hypothesis import given, strategies as st
from marks import long, slow, thinned
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import HF, OWN

import pipedream as pd
from pipedream.capture.placeholder import NumbersNeeded, Placeholder, converting_placeholders, placeholder_like

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(0, 3), max_size=3)


def make_placeholder(tensor: Tensor, wants: bool = False) -> Placeholder:
    return placeholder_like(tensor, CPU, wants)


def describe(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value


@st.composite
def broadcast_pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two tensors whose shapes broadcast, or a tensor and a number."""
    shape = draw(SHAPES)
    other = [1 if draw(st.booleans()) else size for size in shape][draw(st.integers(0, len(shape))) :]
    number = draw(st.sampled_from([None, None, 2, 0.5]))
    pair = torch.ones(shape, dtype=draw(DTYPES)), number or torch.ones(other, dtype=draw(DTYPES))
    return pair if draw(st.booleans()) else (pair[1], pair[0])


@given(SHAPES, DTYPES, st.booleans())
def test_reports_what_the_tensor_has(shape: list[int], dtype: torch.dtype, wants: bool) -> None:
    tensor = torch.ones(shape, dtype=dtype).transpose(0, -1) if shape else torch.ones(shape, dtype=dtype)
    placeholder = make_placeholder(tensor, wants)
    for name in ("shape", "dtype", "ndim", "device", "is_cpu", "is_cuda", "is_meta"):
        assert getattr(placeholder, name) == getattr(tensor, name), name
    for name in ("stride", "size", "numel", "dim", "is_floating_point"):
        assert getattr(placeholder, name)() == getattr(tensor, name)(), name
    assert placeholder.requires_grad is wants
    assert isinstance(placeholder, Tensor)


def test_the_device_is_the_one_of_the_tensor_that_it_stands_for() -> None:
    x, cuda = torch.ones(2, 2), torch.device("cuda", 1)
    gpu = placeholder_like(x, cuda, False)
    assert (gpu.device, gpu.is_cuda, gpu.is_cpu) == (cuda, True, False)
    assert ((gpu + 1).device, gpu.cpu().device) == (cuda, CPU)
    assert gpu.cuda() is gpu
    assert [tensor.type() for tensor in (gpu, gpu.cpu())] == ["torch.cuda.FloatTensor", x.type()]
    for kind in (torch.float64, "torch.DoubleTensor", torch.DoubleTensor, "torch.FloatTensor", x.type()):
        assert describe(make_placeholder(x).type(kind)) == describe(x.type(kind))
    assert describe(gpu.type("torch.cuda.HalfTensor")) == ((2, 2), torch.float16, cuda)
    assert gpu.type("torch.FloatTensor").device == CPU
    with torch.autocast("cpu", torch.bfloat16):  # of another device
        assert ((make_placeholder(x) @ x).dtype, (gpu @ gpu).dtype) == (torch.bfloat16, torch.float32)


FUNCTIONS = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.mul, torch.div)


@given(broadcast_pairs(), st.sampled_from(FUNCTIONS))
def test_arithmetic_gives_the_shape_and_dtype_of_torch(pair: tuple[Any, Any], function: Any) -> None:
    try:
        expected = function(*pair)
    except (RuntimeError, TypeError):  # torch subtracts no booleans, and its functions of a number are few
        return
    a, b = (make_placeholder(value) if isinstance(value, Tensor) else value for value in pair)
    for arguments in ((a, b), (a, pair[1]), (pair[0], b)):
        if any(type(value) is Placeholder for value in arguments):
            actual = function(*arguments)
            assert type(actual) is Placeholder
            assert describe(actual) == describe(expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, 1).contiguous(),
        lambda x: x[..., None].expand(2, 3, 4, 5),
        lambda x: x.max(dim=-1),
        lambda x: torch.where(torch.ones(2, 3, 4) > 0, x, 0.0),
        lambda x: x.new_zeros(x.shape[0], 7),
        lambda x: torch.ones_like(x, dtype=torch.long),
        lambda x: x.data,
        lambda x: x.T.shape,
        lambda x: F.gelu(x.t() if x.ndim == 2 else x),
    ],
)
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_any_other_function_gives_what_torch_gives(function: Callable[[Any], Any]) -> None:
    expected, actual = function(torch.rand(2, 3, 4)), function(make_placeholder(torch.rand(2, 3, 4)))
    if type(expected).__module__ == "torch.return_types":
        assert type(actual) is type(expected)
        assert [describe(value) for value in actual] == [describe(value) for value in expected]
    else:
        assert describe(actual) == describe(expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_returns_its_argument_does_so(autocast: bool) -> None:
    x = make_placeholder(torch.ones(2, 3), True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        unchanged = x.to(torch.float32), x.to("cpu"), x.contiguous(), x.cpu(), x.float(), x.requires_grad_(), x.add_(1)
        assert all(same is x for same in unchanged)
        assert F.dropout(x, p=0.0) is x
        assert F.dropout(x, training=False) is x
        assert F.dropout(x) is not x
        assert x.to(torch.float64) is not x
        assert x.t().contiguous() is not x.t()
        assert (x @ x.mT).requires_grad


def test_functions_that_make_tensors_of_data_take_placeholders() -> None:
    x, functions = make_placeholder(torch.ones(2, 3)), (torch.as_tensor, torch.tensor)
    with converting_placeholders():
        assert torch.as_tensor(x) is torch.as_tensor(x, device=x.device) is x
        tensor = torch.tensor(x, dtype=torch.int64, requires_grad=False)
        assert describe(tensor) == ((2, 3), torch.int64, CPU)
        assert isinstance(tensor, Placeholder)
        assert torch.as_tensor([1, 2]).tolist() == [1, 2]
    assert functions == (torch.as_tensor, torch.tensor)


def test_a_device_context_within_does_not_change_later_ones() -> None:
    torch.utils._device._device_constructors.cache_clear()
    with converting_placeholders(), torch.device("meta"):
        assert torch.tensor(0).is_meta
    with torch.device("meta"):
        assert torch.tensor(0).is_meta


def test_gradients_are_asked_for_as_in_torch() -> None:
    x, y = make_placeholder(torch.ones(2), True), make_placeholder(torch.ones(2))
    assert (x + y).requires_grad
    assert F.relu(x).requires_grad
    assert not any(value.requires_grad for value in (y * 2, F.relu(y), x.detach(), x.argmax()))
    with torch.no_grad():
        assert not any(value.requires_grad for value in (F.relu(x), x + y, x.sum()))


def test_a_tensor_into_which_placeholders_are_written_becomes_one_and_what_is_read_does_not() -> None:
    whole, table = torch.zeros(3, 2), torch.ones(5, 3)
    alias = whole
    whole[1] = make_placeholder(torch.ones(2), True)
    assert type(alias) is Placeholder
    assert describe(alias) == ((3, 2), torch.float32, CPU)
    assert alias.requires_grad
    for add in (operator.iadd, Tensor.add_):
        total = torch.zeros(2)
        assert add(total, make_placeholder(torch.ones(2))) is total
        assert type(total) is Placeholder
    F.embedding(make_placeholder(torch.ones(4, dtype=torch.long)), table)
    make_placeholder(table) + table
    assert type(table) is Tensor


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.item(), "item"),
        (lambda x: bool(x > 0), "__bool__"),
        (int, "__int__"),
        (float, "__float__"),
        (lambda x: x.reshape(1).tolist(), "tolist"),
        (lambda x: x.reshape(1).nonzero(), "nonzero"),
        (lambda x: x.reshape(1).numpy(), "numpy"),
        (lambda x: torch.ones(3)[x.reshape(1) > 0], "__getitem__"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_needs_numbers_says_so(function: Callable[[Any], Any], name: str, autocast: bool) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(NumbersNeeded, match=rf"needs the numbers of a tensor .*\({name};") as caught,
    ):
        function(make_placeholder(torch.tensor(1.0)))
    assert caught.value.function == name


def attend(x: Tensor, y: Tensor) -> Any:
    weights = torch.ones(12, 4), torch.ones(12), None, None, False, 0.0, torch.ones(4, 4), torch.ones(4)
    return F.multi_head_attention_forward(x, y, y, 4, 2, *weights, need_weights=False)[0]


@pytest.mark.parametrize("low", [torch.bfloat16, slow(torch.float16)])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x @ y.mT,
        lambda x, y: F.scaled_dot_product_attention(x, x, y.to(device="cpu"), is_causal=True),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x * torch.tensor(2.0),
        lambda x, y: torch.stack([x.sum(), y.norm(), torch.tensor(1.0)]),
        lambda x, y: x.prod(0) + x.cumsum(0),
        lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.zeros(6, dtype=torch.long)),
        lambda x, y: F.grid_sample(x[None], y[:1, :, :2][None], align_corners=True),
        lambda x, y: y.clone().add_(x @ x.mT @ x),
        lambda x, y: x.to(torch.float64) @ y.mT.to(torch.float64),
        lambda x, y: torch.amp.custom_fwd(lambda a: a @ a.mT, device_type="cpu", cast_inputs=torch.float32)(x),
        attend,
    ],
)
def test_under_autocast_dtypes_are_those_of_torch(function: Callable[[Tensor, Tensor], Any], low: torch.dtype) -> None:
    for kinds in ((torch.float32, torch.float32), (torch.float32, low), (low, torch.float32), (low, low)):
        x, y = (torch.rand(2, 3, 4, dtype=kind) for kind in kinds)
        for enabled in (True, False):
            with torch.autocast("cpu", low, enabled=enabled):
                try:
                    expected = function(x, y)
                except RuntimeError:  # other dtypes without autocast, or no kernel
                    assert not enabled or low is torch.float16
                    continue
                for pair in ((make_placeholder(x), make_placeholder(y)), (make_placeholder(x), y)):
                    actual = function(*pair)
                    assert type(actual) is Placeholder
                    assert describe(actual) == describe(expected), (kinds, enabled)


def test_autocast_keeps_no_weight_that_a_placeholder_met() -> None:
    """Autocast keeps its casts of weights, and one that is made without a graph would lose the gradient."""
    weight, bias = torch.ones(2, 2, requires_grad=True), torch.ones((), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(make_placeholder(torch.ones(3, 2)), weight)
        torch.addmm(bias, make_placeholder(torch.ones(3, 2)), weight)
        torch.addmm(bias, torch.ones(3, 2), weight).sum().backward()
    assert weight.grad is not None
    assert bias.grad is not None


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


SLOW = ["tied_gpt"]
LONG = ["hf_mamba", "unet", "hf_llama", "hf_gpt2", "hf_t5"]


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
        layers.append([layer.name for layer in estimate(residual(), (torch.ones(2, 4), lengths)).graph.layers])
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


@pytest.mark.parametrize("name", thinned(DRAWS))
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


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [slow(0.0), 0.5])
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

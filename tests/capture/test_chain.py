"""Chains are found, everything else is no chain or stays one layer, and the model is left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import Built
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipedream as pd
from pipedream.capture.chain import find_chain


def names(captured: pd.capture.Captured) -> list[str]:
    return [layer.name for layer in captured.graph.layers]


class Line(nn.Module):
    """A forward that calls its children one after the other, in any order it likes."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.children_list = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children_list:
            x = child(x)
        return x


def glue(call: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Returns two linear layers, a dropout, and the code that calls them."""
    return Built(call, a=nn.Linear(4, 4), b=nn.Linear(4, 4), dropout=nn.Dropout(0.5))


# Random nestings of Sequential, ordinary lines and residual blocks; with them the names of their layers.
LEAF = st.sampled_from([lambda: nn.Linear(4, 4), lambda: nn.ReLU(), lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5)])


def nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    groups = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        groups.map(lambda makers: lambda: nn.Sequential(*(make() for make in makers))),
        groups.map(lambda makers: lambda: Line(*(make() for make in makers))),
        children.map(lambda make: lambda: Built(lambda model, x: x + model.inner(x), inner=make())),
    )


def leaves(module: nn.Module, path: str) -> list[str]:
    """The oracle: what the layers of a nest are, from how it was built."""
    if isinstance(module, nn.Sequential):
        inner = [(f"{path}.{name}", child) for name, child in module.named_children()]
    elif isinstance(module, Line):
        inner = [(f"{path}.children_list.{i}", child) for i, child in enumerate(module.children_list)]
    else:
        return [path]
    return [leaf for name, child in inner for leaf in leaves(child, name)]


@given(make=st.recursive(LEAF, nests, max_leaves=6))
def test_any_nest_is_taken_apart_into_its_leaves_and_computes_the_same(make: Any) -> None:
    model = nn.Sequential(make(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    captured = find_chain(model, (x,))
    assert [f".{name}" for name in names(captured)] == leaves(model, "")
    modules = dict(model.named_modules())
    assert all(layer is modules[name] for name, layer in zip(names(captured), captured.layers, strict=True))
    parameters = {name for layer in captured.graph.layers for name in layer.parameters}
    assert parameters == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    value, sent = x, []
    for name, layer in zip(names(captured), captured.layers, strict=True):
        value = layer(value)
        sent.append((f"{name} output", value.nbytes, value.requires_grad))
    assert torch.equal(value, model(x))
    assert [(value.name, value.bytes, value.gradient) for value in captured.graph.values] == sent[:-1]


def between(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda model, x: model.b(function(model.a(x)))


GLUE = (
    *map(between, (
        torch.relu, lambda h: h.view(2, 4), lambda h: h + 0, torch.relu_, lambda h: h.mul_(2), lambda h: h.detach_(),
        lambda h: h.detach(), lambda h: (h.register_hook(lambda g: g * 2), h)[1], lambda h: (h.data.mul_(2), h)[1],
        lambda h: h if h.sum() > -1e9 else -h, lambda h: (torch.rand(1), h)[1],
    )),
    lambda model, x: model.b(model.a(x * 2)),
    lambda model, x: F.log_softmax(model.b(model.a(x)), dim=1),
    lambda model, x: model.b(model.a(x) * 2 if model.training else model.a(x)),
    lambda model, x: model.b(model.a(x) if model.training else model.a(x) * 2),
    lambda model, x: (h := model.a(x), model.dropout(h), model.b(h))[2],  # in evaluation dropout's output is h itself
)  # fmt: skip


@pytest.mark.parametrize("call", GLUE)
def test_a_model_with_glue_around_its_modules_is_no_chain(call: Callable[[Any, Tensor], Tensor]) -> None:
    assert find_chain(glue(between(lambda h: h)), (torch.randn(2, 4),)) is not None
    assert find_chain(glue(call), (torch.randn(2, 4),)) is None


def pass_on(model: Any, x: Tensor) -> Tensor:
    model.b.gate = x.mean()
    return model.b(model.a(x))


def test_models_that_are_no_chains() -> None:
    two, add = Built(lambda _, x: (x + 1, x + 2)), Built(lambda _, x, y: x + y)
    splatted = Built(lambda model, x: model.add(*model.two(x)), two=two, add=add)
    gate = Built(lambda module, x: x if module.gate is None else x * module.gate, gate=None)
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled[0].compile(backend="eager")
    for model in (splatted, Built(pass_on, a=nn.Linear(4, 4), b=gate), compiled):
        assert find_chain(model, (torch.randn(2, 4),)) is None


def within(context: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def call(model: Any, x: Tensor) -> Tensor:
        with context():
            return between(lambda h: h)(model, x)

    return call


@pytest.mark.parametrize(
    "call",
    [
        within(torch.no_grad),
        within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        lambda model, x: model.b(checkpoint(model.a, x, use_reentrant=False)),
    ],
)
def test_a_frozen_or_checkpointed_part_is_not_taken_out_of_its_mode(call: Callable[[Any, Tensor], Tensor]) -> None:
    assert find_chain(glue(call), (torch.randn(2, 4),)) is None
    assert names(find_chain(nn.Sequential(glue(call), nn.Identity()), (torch.randn(2, 4),))) == ["0", "1"]


def test_modules_with_hooks_or_state_of_their_own_stay_one_layer() -> None:
    hooked, buffered, scaled, watched = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    buffered.register_buffer("scale", torch.ones(1))
    scaled.register_parameter("scale", nn.Parameter(torch.ones(1)))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    captured = find_chain(nn.Sequential(hooked, buffered, scaled, normed), (torch.randn(2, 4),))
    assert names(captured) == ["0", "1", "2", "3"]
    assert len(hooked._forward_hooks) == 1
    assert find_chain(hooked, (torch.randn(2, 4),)) is None
    watched.register_forward_hook(lambda module, args, output: None)
    captured = find_chain(nn.Sequential(watched, nn.Linear(4, 4)), (torch.randn(2, 4),))
    assert len(captured.layers) == 2, "the layers inside would not call the hook"
    assert find_chain(scaled, (torch.randn(2, 4),)) is None


def test_the_containers_of_torch_stay_one_layer_and_so_does_a_model_that_is_one() -> None:
    encoder, lstm = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 6, batch_first=True)
    model = nn.Sequential(nn.Embedding(10, 8), encoder, lstm, Built(lambda _, value: value[0]), nn.Linear(6, 2))
    layers = find_chain(model, (torch.randint(10, (3, 5)),)).graph.layers
    assert [layer.kind for layer in layers] == ["Embedding", "TransformerEncoderLayer", "LSTM", "Built", "Linear"]
    assert "1.self_attn.in_proj_weight" in layers[1].parameters
    (layer,) = pd.capture(nn.Linear(4, 2), (torch.randn(2, 4),)).graph.layers
    assert (layer.name, layer.parameters) == ("Linear", ("weight", "bias"))


def test_an_ordinary_class_with_several_inputs() -> None:
    parts = {"head": nn.Linear(3, 2), "mix": Built(lambda _, x, y: x * y), "unused": nn.Linear(9, 9)}
    model = Built(lambda model, x, y: model.head(model.mix(x, y)), **parts)
    graph = pd.capture(model, (torch.randn(2, 3), torch.randn(2, 3))).graph
    assert ([layer.name for layer in graph.layers], graph.edges) == (["mix", "head"], ((0, 1),))


def test_a_module_that_runs_twice_has_two_names_and_ties_only_if_it_has_state() -> None:
    relu, linear = nn.ReLU(), nn.Linear(4, 4)
    captured = pd.capture(nn.Sequential(linear, relu, nn.Linear(4, 4), relu, linear), (torch.randn(2, 4),))
    assert names(captured) == ["0", "1", "2", "1@2", "0@2"]
    assert captured.layers[1] is captured.layers[3]
    assert captured.graph.ties == ((0, 4),)
    assert captured.graph.layers[0].parameters == ("0.weight", "0.bias", "4.weight", "4.bias")
    norm = nn.BatchNorm1d(4, affine=False)
    assert pd.capture(nn.Sequential(norm, nn.ReLU(), norm), (torch.randn(2, 4),)).graph.ties == ((0, 2),)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_are_found_by_storage_on_meta_too(device: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)).to(device)
    model[2].weight = model[0].weight
    assert pd.capture(model, (torch.tensor([[1, 2]]),)).graph.ties == ((0, 2),)
    model[2].weight = nn.Parameter(model[0].weight.detach().view(5, 4))  # another object, the same numbers
    captured = pd.capture(model, (torch.tensor([[1, 2]]),))
    assert captured.graph.ties == captured.graph.inseparable == ((0, 2),), "whose gradients cannot be summed"
    model[2].weight = model[0].weight.requires_grad_(False)
    assert pd.capture(model, (torch.tensor([[1, 2]]),)).graph.ties == (), "a frozen weight ties nothing"


def test_a_chain_of_blocks_is_cut_inside_a_block() -> None:
    parts = {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
    block = Built(lambda block, x: x + block.down(F.relu(block.up(x))), **parts)
    model, x = nn.Sequential(block, nn.Linear(4, 3)), torch.randn(6, 4)
    assert [layer.name for layer in pd.profile(model, x, runs=1).graph.layers] == ["0", "1"]
    with pytest.raises(pd.PipelineError, match="finest=True"):
        pd.plan(pd.profile(model, x, runs=1), pd.Cluster.local(2), cuts=("0.down",))
    assert names(pd.capture(model, x, finest=True)) == ["0.up", "0.down", "1"]

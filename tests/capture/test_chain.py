"""Chains are found, everything else is no chain or stays one layer, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipedream.capture import Captured, capture
from pipedream.capture.chain import find_chain
from pipedream.core.errors import CaptureError


def names(captured: Captured) -> list[str]:
    return [layer.name for layer in captured.graph.layers]


def run(captured: Captured, *inputs: Any) -> Any:
    value = captured.layers[0](*inputs)
    for layer in captured.layers[1:]:
        value = layer(value)
    return value


class Line(nn.Module):
    """A forward that calls its children one after the other, in any order it likes."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.children_list = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children_list:
            x = child(x)
        return x


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Glue(nn.Module):
    """Two linear layers and something in between."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


# Random nestings of Sequential, ordinary lines and residual blocks; with them the names of their layers.
LEAF = st.sampled_from([lambda: nn.Linear(4, 4), lambda: nn.ReLU(), lambda: nn.BatchNorm1d(4), lambda: nn.Dropout(0.5)])


def nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    groups = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        groups.map(lambda makers: lambda: nn.Sequential(*(make() for make in makers))),
        groups.map(lambda makers: lambda: Line(*(make() for make in makers))),
        children.map(lambda make: lambda: Residual(make())),
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
    assert torch.equal(run(captured, x), model(x))
    parameters = {name for layer in captured.graph.layers for name in layer.parameters}
    assert parameters == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def test_an_ordinary_class_with_several_inputs() -> None:
    class Mix(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)
            self.mix = Mix()
            self.unused = nn.Linear(9, 9)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.mix(x, y))

    captured = capture(Model(), (torch.randn(2, 3), torch.randn(2, 3)))
    assert names(captured) == ["mix", "head"]
    assert [layer.kind for layer in captured.graph.layers] == ["Mix", "Linear"]
    assert captured.graph.layers[1].parameters == ("head.weight", "head.bias")
    assert captured.graph.edges == ((0, 1),)


@pytest.mark.parametrize(
    "between",
    [
        torch.relu,
        lambda h: h.view(2, 4),
        lambda h: h + 0,
        torch.relu_,
        lambda h: h.mul_(2),
        lambda h: h.detach_(),
        lambda h: h.detach(),
        lambda h: (h.register_hook(lambda g: g * 2), h)[1],
        lambda h: (h.data.mul_(2), h)[1],
        lambda h: h if h.sum() > -1e9 else -h,
        lambda h: (torch.rand(1), h)[1],
    ],
)
def test_a_model_with_glue_between_its_modules_is_no_chain(between: Any) -> None:
    assert find_chain(Glue(lambda h: h), (torch.randn(2, 4),)) is not None
    assert find_chain(Glue(between), (torch.randn(2, 4),)) is None


def test_a_model_with_glue_before_or_after_its_modules_is_no_chain() -> None:
    class Before(Glue):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x * 2))

    class After(Glue):
        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.b(self.a(x)), dim=1)

    assert find_chain(Before(None), (torch.randn(2, 4),)) is None
    assert find_chain(After(None), (torch.randn(2, 4),)) is None


def test_glue_in_one_mode_is_found() -> None:
    class Model(Glue):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h * 2 if self.training is self.between else h)

    for training in (True, False):
        assert find_chain(Model(training), (torch.randn(2, 4),)) is None


def test_dropout_that_is_called_but_not_used_is_no_chain() -> None:
    class Model(Glue):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.between(h)  # in evaluation mode its output is the very tensor h
            return self.b(h)

    assert find_chain(Model(nn.Dropout(0.5)), (torch.randn(2, 4),)) is None


def test_a_frozen_or_checkpointed_part_is_not_taken_out_of_its_mode() -> None:
    class Part(Glue):
        def forward(self, x: Tensor) -> Tensor:
            if self.between == "no_grad":
                with torch.no_grad():
                    return self.b(self.a(x))
            if self.between == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.b(self.a(x))
            return self.b(checkpoint(self.a, x, use_reentrant=False))

    for between in ("no_grad", "autocast", "checkpoint"):
        assert find_chain(Part(between), (torch.randn(2, 4),)) is None
        assert names(find_chain(nn.Sequential(Part(between), nn.Identity()), (torch.randn(2, 4),))) == ["0", "1"]


def test_modules_with_hooks_or_state_of_their_own_stay_one_layer() -> None:
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    buffered = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    buffered.register_buffer("scale", torch.ones(1))
    scaled = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    scaled.register_parameter("scale", nn.Parameter(torch.ones(1)))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    captured = find_chain(nn.Sequential(hooked, buffered, scaled, normed), (torch.randn(2, 4),))
    assert names(captured) == ["0", "1", "2", "3"]
    assert len(hooked._forward_hooks) == 1
    assert find_chain(hooked, (torch.randn(2, 4),)) is None
    seen: list[Tensor] = []
    watched = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    watched.register_forward_hook(lambda module, args, output: seen.append(output))
    captured = find_chain(nn.Sequential(watched, nn.Linear(4, 4)), (torch.randn(2, 4),))
    assert captured is not None
    assert len(captured.layers) == 2, "the layers inside would not call the hook"
    assert find_chain(scaled, (torch.randn(2, 4),)) is None


def test_the_containers_of_torch_stay_one_layer() -> None:
    class Last(nn.Module):
        def forward(self, value: tuple[Tensor, Any]) -> Tensor:
            return value[0][:, -1]

    model = nn.Sequential(
        nn.Embedding(10, 8),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.LSTM(8, 6, batch_first=True),
        Last(),
        nn.Linear(6, 2),
    )
    captured = find_chain(model, (torch.randint(10, (3, 5)),))
    assert [layer.kind for layer in captured.graph.layers] == [
        "Embedding", "TransformerEncoderLayer", "LSTM", "Last", "Linear",
    ]  # fmt: skip
    assert "1.self_attn.in_proj_weight" in captured.graph.layers[1].parameters


def test_an_output_that_is_splatted_makes_no_chain() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x + 2

    class Add(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.add = Two(), Add()

        def forward(self, x: Tensor) -> Tensor:
            return self.add(*self.two(x))

    assert find_chain(Model(), (torch.randn(2, 4),)) is None


def test_a_model_that_is_one_leaf_is_one_layer() -> None:
    captured = capture(nn.Linear(4, 2), (torch.randn(2, 4),))
    assert names(captured) == ["Linear"]
    assert captured.graph.layers[0].parameters == ("weight", "bias")


def test_a_module_that_runs_twice_has_two_names_and_ties_only_if_it_has_state() -> None:
    relu, linear = nn.ReLU(), nn.Linear(4, 4)
    captured = capture(nn.Sequential(linear, relu, nn.Linear(4, 4), relu, linear), (torch.randn(2, 4),))
    assert names(captured) == ["0", "1", "2", "1@2", "0@2"]
    assert captured.layers[1] is captured.layers[3]
    assert captured.graph.ties == ((0, 4),)
    assert captured.graph.layers[0].parameters == ("0.weight", "0.bias", "4.weight", "4.bias")
    assert captured.graph.cuts() == ()
    norm = nn.BatchNorm1d(4, affine=False)
    assert capture(nn.Sequential(norm, nn.ReLU(), norm), (torch.randn(2, 4),)).graph.ties == ((0, 2),)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_are_found_by_storage_on_meta_too(device: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)).to(device)
    model[2].weight = model[0].weight
    assert capture(model, (torch.tensor([[1, 2]]),)).graph.ties == ((0, 2),)
    model[2].weight = nn.Parameter(model[0].weight.detach().view(5, 4))  # another object, the same numbers
    captured = capture(model, (torch.tensor([[1, 2]]),))
    assert captured.graph.ties == captured.graph.whole == ((0, 2),), "whose gradients cannot be summed"
    assert captured.graph.cuts() == ()


def test_a_frozen_weight_ties_nothing() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight.requires_grad_(False)
    assert capture(model, (torch.tensor([[1, 2]]),)).graph.ties == ()


def test_the_model_and_the_sample_are_left_as_they_were() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.memory = x
            return x + self.calls

    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5), Counter())
    model[2].eval()
    x = torch.randn(8, 4)
    before = {name: (value, value.clone(), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    flags, attributes, generator = [m.training for m in model.modules()], dict(model[3].__dict__), torch.get_rng_state()
    copy = x.clone()
    capture(model, (x,))
    assert torch.equal(x, copy)
    after = model.state_dict(keep_vars=True)
    for name, (value, numbers, version) in before.items():
        assert after[name] is value
        assert torch.equal(value, numbers)
        assert value._version == version
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in model.modules()] == flags
    assert model[3].__dict__ == attributes
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_is_not_a_runnable_model_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"raised RuntimeError.*shape"):
        capture(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 5),))
    with pytest.raises(CaptureError, match="lazy"):
        capture(nn.Sequential(nn.LazyLinear(4)), (torch.randn(2, 5),))
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled[0].compile(backend="eager")
    assert find_chain(compiled, (torch.randn(2, 4),)) is None


def test_a_model_that_passes_things_on_beside_its_outputs_is_no_chain() -> None:
    class Gate(nn.Module):
        gate: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return x if self.gate is None else x * self.gate

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Gate()

        def forward(self, x: Tensor) -> Tensor:
            self.b.gate = x.mean()
            return self.b(self.a(x))

    assert find_chain(Model(), (torch.randn(2, 4),)) is None

"""Where models may be cut, what is refused and why, and what belongs to which layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import Built
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd

X = torch.randn(2, 4)
Step = Callable[[nn.ModuleList, Tensor], Any]


def glue(step: Step) -> Any:
    """Returns linear layers and the code between them."""
    parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    return Built(lambda model, x: step(model.parts, x), parts=parts, scale=nn.Parameter(torch.ones(4)))


def capture_both(model: nn.Module) -> tuple[pd.LayerGraph, Any]:
    """Returns the graph, and the cuts that are refused."""
    captured = pd.capture(model, X, finest=True)
    return captured.graph, captured.refused


def names(graph: pd.LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers]


def residual(parts: nn.ModuleList, x: Tensor) -> Tensor:
    first = parts[0](x)
    return parts[2](F.relu(parts[1](first)) + first) * 2


def test_a_layer_is_a_call_with_the_code_after_it_and_what_is_read_after_a_cut_crosses_it() -> None:
    graph, _ = capture_both(glue(residual))
    assert [(layer.name, layer.kind) for layer in graph.layers] == [(f"parts.{i}", "Linear") for i in range(3)]
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.layers[1].parameters == ("parts.1.weight", "parts.1.bias")
    starts = {call.name: call.start for call in graph.calls}
    crossing = [{value.name for value in graph.values if value.crosses(starts[name])} for name in names(graph)[1:]]
    assert crossing == [{"parts.0 output"}, {"parts.2 argument 0"}]
    assert all(value.bytes == X.nbytes and value.gradient for value in graph.values if value.born >= 0)


def written_later(parts: nn.ModuleList, x: Tensor) -> Tensor:
    first = parts[0](x)
    alias = first.view(2, 4)
    second = parts[1].requires_grad_(False)(alias)
    alias.mul_(2)
    return parts[2](first) + second


def nowhere_seen(parts: nn.ModuleList, x: Tensor) -> Tensor:
    first = parts[0](x) * 3
    return parts[2](parts[1](x)) + first


def in_a_loop(parts: nn.ModuleList, x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(parts[1](torch.tanh(parts[0](x))))
    return parts[2](x)


class Options:
    factor = 2


def hands_an_object_on() -> nn.Module:
    b = Built(lambda module, x: (x * module.scale, Options()), scale=nn.Parameter(torch.ones(4)))
    c = Built(lambda module, x, options: x * options.factor * module.scale, scale=nn.Parameter(torch.ones(4)))
    parts = nn.ModuleList([b, c, nn.Linear(4, 4)])
    return Built(lambda model, x: model.parts[2](model.parts[1](*model.parts[0](x))), parts=parts)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (glue(written_later), "written later through another tensor"),
        (glue(nowhere_seen), r"shape \[2, 4\] made by .* is read later, and no module has taken"),
        (glue(in_a_loop), "parts.0 is called 4 times in a loop"),
        (hands_an_object_on(), "an object of the class Options, which cannot be sent"),
    ],
)
def test_a_cut_is_refused_with_its_reason(model: nn.Module, reason: str) -> None:
    graph, refused = capture_both(model)
    assert "parts.1" not in names(graph)
    assert re.search(reason, refused["parts.1"])


def test_each_parameter_belongs_to_a_layer() -> None:
    def step(parts: nn.ModuleList, x: Tensor) -> Tensor:
        return parts[1](F.relu(parts[0](x)) * model.scale) + parts[0].bias

    model = glue(step)
    graph, _ = capture_both(model)
    # What nothing reads is a placeholder on the other stages.
    assert set(graph.glue) == {"scale", "parts.0.bias", "parts.2.weight", "parts.2.bias"}
    parameters = [set(layer.parameters) for layer in graph.layers]
    assert "scale" in parameters[0], "it is read before the next layer begins"
    assert "parts.0.bias" in parameters[0] & parameters[1], "both layers use it"
    assert {"parts.2.weight", "parts.2.bias"} <= parameters[0], "nothing uses them"
    assert graph.ties == ((0, 1),)
    assert set.union(*parameters) == {name for name, _ in model.named_parameters()}


def add_in_place(model: Any) -> None:
    model.count += 1


def replace_it(model: Any) -> None:
    model.count = model.count + 1


@pytest.mark.parametrize("writes", [None, add_in_place, replace_it])
def test_no_cut_parts_the_uses_of_a_buffer_that_is_written(writes: Callable[[Any], None] | None) -> None:
    """A constant one belongs to all layers that compute with it."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.a(x) + model.table
        if writes:
            writes(model)
        return model.b(x) + model.table * model.count

    buffers = {"table": nn.Buffer(torch.arange(4.0)), "count": nn.Buffer(torch.zeros(()))}
    graph, refused = capture_both(Built(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), **buffers))
    assert all("table" in layer.parameters for layer in graph.layers)
    assert names(graph) == (["a"] if writes else ["a", "b"])
    assert not writes or "count" in graph.layers[0].parameters
    assert bool(refused) is bool(writes)


def test_an_output_that_is_computed_from_the_inputs_alone_refuses_no_cut() -> None:
    graph, refused = capture_both(glue(lambda parts, x: (parts[1](parts[0](x)), (x > 0).sum())))
    assert names(graph) == ["parts.0", "parts.1"]
    assert not refused


@pytest.mark.parametrize("kind", [torch.float64, "torch.DoubleTensor", torch.float32])
def test_a_conversion_by_type_is_an_operation(kind: Any) -> None:
    """Of what a layer returns, of a parameter, and of what is computed from the inputs alone."""

    def step(parts: nn.ModuleList, x: Tensor) -> Tensor:
        mask = (x > 0).type(kind)
        y = parts[1](parts[0](x).type(kind).float())
        return parts[2](y) * mask * model.scale.type(kind) if y.type() == "torch.FloatTensor" else y

    model = glue(step)
    graph, refused = capture_both(model)
    assert names(graph) == [f"parts.{i}" for i in range(3)]
    assert not refused
    assert ["scale" in layer.parameters for layer in graph.layers] == [False, False, True]

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
from torch.utils.checkpoint import checkpoint

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


def capture_graph(model: nn.Module) -> pd.LayerGraph:
    return capture_both(model)[0]


def names(graph: pd.LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers]


def residual(parts: nn.ModuleList, x: Tensor) -> Tensor:
    first = parts[0](x)
    return parts[2](F.relu(parts[1](first)) + first) * 2


def test_a_layer_is_a_call_with_the_code_after_it() -> None:
    graph = capture_graph(glue(residual))
    assert names(graph) == ["parts.0", "parts.1", "parts.2"]
    assert [layer.kind for layer in graph.layers] == ["Linear"] * 3
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.layers[1].parameters == ("parts.1.weight", "parts.1.bias")


def test_what_crosses_a_cut_is_what_is_read_after_it() -> None:
    graph = capture_graph(glue(residual))
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


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (written_later, "written later through another tensor"),
        (nowhere_seen, r"shape \[2, 4\] made by .* is read later, and no module has taken"),
        (in_a_loop, "parts.0 is called 4 times in a loop"),
    ],
)
def test_a_cut_is_refused_with_its_reason(step: Step, reason: str) -> None:
    graph, refused = capture_both(glue(step))
    assert "parts.1" not in names(graph)
    assert re.search(reason, refused["parts.1"])


def test_an_object_that_cannot_be_sent_keeps_its_call_and_the_next_together() -> None:
    b = Built(lambda module, x: (x * module.scale, Options()), scale=nn.Parameter(torch.ones(4)))
    c = Built(lambda module, x, options: x * options.factor * module.scale, scale=nn.Parameter(torch.ones(4)))
    model = Built(
        lambda model, x: model.d(model.c(*model.b(model.a(x)))), a=nn.Linear(4, 4), b=b, c=c, d=nn.Linear(4, 4)
    )
    graph, refused = capture_both(model)
    assert "b" in names(graph)
    assert "c" not in names(graph)
    assert "an object of the class Options, which cannot be sent" in refused["c"]


def test_a_checkpointed_call_stays_whole() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    assert names(capture_graph(Built(forward, blocks=blocks))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_shared_weights_tie_their_layers_and_state_keeps_them_whole() -> None:
    model = glue(residual)
    model.parts[2].weight = model.parts[0].weight
    assert capture_graph(model).ties == ((0, 2),)
    assert capture_graph(model).inseparable == ()
    model.parts[0].weight.requires_grad_(False)
    assert capture_graph(model).ties == ()


def test_each_parameter_belongs_to_a_layer() -> None:
    def step(parts: nn.ModuleList, x: Tensor) -> Tensor:
        return parts[1](F.relu(parts[0](x)) * model.scale) + parts[0].bias

    model = glue(step)
    graph = capture_graph(model)
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


def test_a_model_of_one_call_is_one_layer() -> None:
    graph = capture_graph(glue(lambda parts, x: parts[0](x) * 2))
    assert names(graph) == ["Built"]
    assert graph.calls == ()
    assert set(graph.layers[0].parameters) == {name for name, _ in glue(residual).named_parameters()}


def test_an_output_that_is_computed_from_the_inputs_alone_refuses_no_cut() -> None:
    graph, refused = capture_both(glue(lambda parts, x: (parts[1](parts[0](x)), (x > 0).sum())))
    assert names(graph) == ["parts.0", "parts.1"]
    assert not refused

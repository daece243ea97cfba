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
from pipedream.capture.compare import split

X = torch.randn(2, 4)
Step = Callable[[nn.ModuleList, Tensor], Any]


class Glue(nn.Module):
    """Linear layers and the code between them."""

    def __init__(self, step: Step, count: int = 3) -> None:
        super().__init__()
        self.step = step
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.step(self.parts, x)


def capture_graph(model: nn.Module, inputs: Any = X) -> pd.LayerGraph:
    return split(model, inputs, (), True)[0]


def names(graph: pd.LayerGraph) -> list[str]:
    return [layer.name for layer in graph.layers]


def residual(parts: nn.ModuleList, x: Tensor) -> Tensor:
    first = parts[0](x)
    return parts[2](F.relu(parts[1](first)) + first) * 2


def test_a_layer_is_a_call_with_the_code_after_it() -> None:
    graph = capture_graph(Glue(residual))
    assert names(graph) == ["parts.0", "parts.1", "parts.2"]
    assert [layer.kind for layer in graph.layers] == ["Linear"] * 3
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.layers[1].parameters == ("parts.1.weight", "parts.1.bias")


def test_what_crosses_a_cut_is_what_is_read_after_it() -> None:
    graph = capture_graph(Glue(residual))
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


@pytest.mark.parametrize(
    ("step", "call", "reason"),
    [
        (written_later, "parts.1", "written later through another tensor"),
        (nowhere_seen, "parts.1", r"shape \[2, 4\] made by .* is read later, and no module has taken"),
        (in_a_loop, "parts.1", "parts.0 is called 4 times in a loop"),
    ],
)
def test_a_cut_is_refused_with_its_reason(step: Step, call: str, reason: str) -> None:
    graph, refused = split(Glue(step), X, (), True)
    assert call not in names(graph)
    assert re.search(reason, refused[call])


def test_a_checkpointed_call_stays_whole() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    assert names(capture_graph(Built(forward, blocks=blocks))) == ["blocks.0", "blocks.1", "blocks.2"]


def test_an_object_that_cannot_be_sent_keeps_its_call_and_the_next_together() -> None:
    class Options:
        factor = 2

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), Options()

    class Second(nn.Linear):
        def forward(self, x: Tensor, options: Any) -> Tensor:
            return super().forward(x) * options.factor

    parts = {"a": nn.Linear(4, 4), "b": First(4, 4), "c": Second(4, 4), "d": nn.Linear(4, 4)}
    model = Built(lambda model, x: model.d(model.c(*model.b(F.relu(model.a(x))))), **parts)
    graph, refused = split(model, X, (), True)
    assert "b" in names(graph)
    assert "c" not in names(graph)
    assert "an object of the class Options, which cannot be sent" in refused["c"]


def test_shared_weights_tie_their_layers_and_state_keeps_them_whole() -> None:
    model = Glue(residual)
    model.parts[2].weight = model.parts[0].weight
    assert capture_graph(model).ties == ((0, 2),)
    assert capture_graph(model).inseparable == ()
    model.parts[0].weight.requires_grad_(False)
    assert capture_graph(model).ties == ()


def test_each_parameter_belongs_to_a_layer() -> None:
    def step(parts: nn.ModuleList, x: Tensor) -> Tensor:
        return parts[1](F.relu(parts[0](x)) * model.scale) + parts[0].bias

    model = Glue(step)
    graph = capture_graph(model)
    # What nothing reads is a placeholder on the other stages.
    assert set(graph.glue) == {"scale", "parts.0.bias", "parts.2.weight", "parts.2.bias"}
    parameters = [set(layer.parameters) for layer in graph.layers]
    assert "scale" in parameters[0], "it is read before the next layer begins"
    assert "parts.0.bias" in parameters[0] & parameters[1], "both layers use it"
    assert {"parts.2.weight", "parts.2.bias"} <= parameters[0], "nothing uses them"
    assert graph.ties == ((0, 1),)
    assert set.union(*parameters) == {name for name, _ in model.named_parameters()}


class Scaled(nn.Module):
    """Uses a buffer in every step, and counts in another."""

    def __init__(self, writes: Callable[[Scaled], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.writes = writes
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.table
        self.writes(self)
        return self.b(x) + self.table * self.count


def test_a_constant_buffer_belongs_to_all_layers_that_compute_with_it() -> None:
    graph = capture_graph(Scaled(lambda model: None))
    assert names(graph) == ["a", "b"]
    assert all("table" in layer.parameters for layer in graph.layers)


def add_in_place(model: Scaled) -> None:
    model.count += 1


def replace_it(model: Scaled) -> None:
    model.count = model.count + 1


@pytest.mark.parametrize("writes", [add_in_place, replace_it])
def test_no_cut_parts_the_uses_of_a_buffer_that_is_written(writes: Callable[[Scaled], None]) -> None:
    graph, refused = split(Scaled(writes), X, (), True)
    assert names(graph) == ["a"]
    assert "count" in graph.layers[0].parameters
    assert refused


def test_a_model_of_one_call_is_one_layer() -> None:
    graph = capture_graph(Glue(lambda parts, x: parts[0](x) * 2))
    assert names(graph) == ["Glue"]
    assert graph.calls == ()
    assert set(graph.layers[0].parameters) == {name for name, _ in Glue(residual).named_parameters()}


def test_an_output_that_is_computed_from_the_inputs_alone_refuses_no_cut() -> None:
    graph, refused = split(Glue(lambda parts, x: (parts[1](parts[0](x)), (x > 0).sum())), X, (), True)
    assert names(graph) == ["parts.0", "parts.1"]
    assert not refused

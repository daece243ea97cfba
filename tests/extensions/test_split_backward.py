"""A backward in two halves does what one does: the same gradients, no more work, nothing twice."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from built import Built, in_loop
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipedream.extensions.split_backward import split as split_backward
from pipedream.runtime.stage import stage_module, versions

WIDTH = 4
CALLS: list[Any] = []


class Own(torch.autograd.Function):
    """A product by a function of the user's, which lets go of what it kept: there is no second run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.tensors = [(x.clone(), weight.clone())]
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        CALLS.append(ctx)
        x, weight = ctx.tensors.pop()
        return weight * gradients[0], (x * gradients[0]).sum(0)


OPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, y, w, v: F.linear(x, w, v),
    "tanh": lambda x, y, w, v: x.tanh(),
    "relu_": lambda x, y, w, v: (x * 1.0).relu_(),
    "add": lambda x, y, w, v: x + y,
    "mul": lambda x, y, w, v: x * y,
    "gain": lambda x, y, w, v: x * v,
    "bias": lambda x, y, w, v: x + v.unsqueeze(0),
    "norm": lambda x, y, w, v: F.layer_norm(x, (WIDTH,), v, w[0]),
    "cat": lambda x, y, w, v: torch.cat([x, y], 1)[:, 1 : WIDTH + 1],
    "attend": lambda x, y, w, v: torch.softmax(x @ y.T, 1) @ y,
    "own": lambda x, y, w, v: Own.apply(x, v),
    "drop": lambda x, y, w, v: F.dropout(x, 0.3),
    "detach": lambda x, y, w, v: x.detach() + y,
    "again": lambda x, y, w, v: checkpoint(lambda value: (value @ w).tanh(), x, use_reentrant=False),
    "row": lambda x, y, w, v: x[:, :1] * v + y.mean(0),
    "both": lambda x, y, w, v: torch.addcmul(x, v, v.exp()),
    "constant": lambda x, y, w, v: (w @ w)[: len(x)] + 0.0 * v,
    "twice": lambda x, y, w, v: F.linear(x.tanh(), (w * w).T, w[0]),
}
"""From two values, a matrix and a vector."""
Program = list[tuple[str, int, int, int]]
"""Operations, two values made before, and the number of the weights; "off" multiplies by what all inputs share."""


class Net(nn.Module):
    """A network that does what a program says."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.vectors = nn.ParameterList(torch.randn(WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        values = list(inputs)
        normed = [F.normalize(matrix) for matrix in self.matrices]
        for op, first, second, weight in self.program:
            x, y = values[first % len(values)], values[second % len(values)]
            w, v = self.matrices[weight], self.vectors[weight]
            values.append(x @ normed[weight] if op == "off" else OPS[op](x, y, w, v))
        return values[-1], values[len(values) // 2]


def both_ways(
    make: Callable[[], nn.Module], inputs: list[Tensor], wants: list[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Returns the gradients of what arrived and of the weights: of one backward, and of two halves."""
    answers = []
    for splits in (False, True):
        torch.manual_seed(2)
        net = make()
        weights = list(net.parameters())
        entered = [x.clone().requires_grad_(want) * 1.0 for x, want in zip(inputs, wants, strict=True)]
        arrived = [x for x in entered if x.requires_grad]
        results = [x.clone() for x in net(*entered)]
        outputs = [x for x in results if x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        gradients = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
        if not outputs:
            return [], []
        if splits:
            edges = [get_gradient_edge(x) for x in arrived]
            back, deferred = split_backward.split_backward(outputs, gradients, edges)
            before = [g is not None for g in back]
            assert all(weight.grad is None for weight in weights), "I leaves the weights alone"
            done = list(deferred.run())
            assert len({id(x) for x in done}) == len(done), "each weight is done once"
            assert before == [g is not None for g in back]
            answers.append([*back, *(weight.grad for weight in weights)])
        else:
            answers.append(list(torch.autograd.grad(outputs, [*arrived, *weights], gradients, allow_unused=True)))
    return answers[0], answers[1]


def assert_alike(whole: list[Tensor | None], halves: list[Tensor | None]) -> None:
    assert len(whole) == len(halves)
    for expected, two in zip(whole, halves, strict=True):
        assert (expected is None) == (two is None)
        if expected is not None and two is not None:
            torch.testing.assert_close(two, expected, rtol=1e-12, atol=1e-12)


STEPS = st.tuples(st.sampled_from([*OPS, "off"]), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2))


@given(st.lists(STEPS, min_size=1, max_size=12), st.lists(st.booleans(), min_size=1, max_size=2))
def test_halves_give_the_gradients_of_the_whole(program: Program, wants: list[bool]) -> None:
    """Branches, skips, shared weights, work in place, functions of weights, weights that are not used, inputs that
    want no gradient."""
    torch.manual_seed(3)
    assert_alike(*both_ways(lambda: Net(program), [torch.randn(3, WIDTH, dtype=torch.float64) for _ in wants], wants))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), (5, 4)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        (3, 2, 7, 7),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (2, 5, 8)),
    "recurrent": (lambda: Built(lambda self, x: self.net(x)[0], net=nn.LSTM(4, 4, 2, batch_first=True)), (2, 5, 4)),
    "cells": (lambda: Built(in_loop, cell=nn.LSTMCell(4, 4)), (2, 5, 4)),
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.Softmax(1)), (2, 5)),
}


def prepared(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, list[Tensor], list[Any]]:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    net = make().to(dtype)
    entered = torch.randn(shape, dtype=dtype, requires_grad=True) * 1.0
    return net, entered, [net(entered)], [get_gradient_edge(entered)]


@pytest.mark.parametrize("name", MODULES)
def test_halves_do_no_more_than_the_whole(name: str) -> None:
    """In floating-point operations, of matrix products and convolutions: each is made in one of the halves."""
    net, entered, outputs, edges = prepared(name)
    ones = [torch.ones_like(outputs[0])]
    with FlopCounterMode(display=False) as whole:
        expected = torch.autograd.grad(outputs, [entered, *net.parameters()], ones, retain_graph=True)
    with FlopCounterMode(display=False) as first:
        back, deferred = split_backward.split_backward(outputs, ones, edges)
    with FlopCounterMode(display=False) as second:
        list(deferred.run())
    assert first.get_total_flops() + second.get_total_flops() == whole.get_total_flops()
    assert name == "no weights" or 0 < second.get_total_flops() < whole.get_total_flops() * 2 / 3
    assert_alike(list(expected), [*back, *(weight.grad for weight in net.parameters())])


def test_a_kernel_that_makes_all_at_once_runs_once() -> None:
    """Single precision takes the fused kernel of the CPU; what it gives for the weights waits."""
    net, entered, outputs, edges = prepared("recurrent", torch.float32)
    ones = [torch.ones_like(outputs[0])]
    expected = torch.autograd.grad(outputs, [entered, *net.parameters()], ones, retain_graph=True)
    with torch.profiler.profile() as profile:
        back, deferred = split_backward.split_backward(outputs, ones, edges)
        list(deferred.run())
    kernels = [event.count for event in profile.key_averages() if event.key == "aten::mkldnn_rnn_layer_backward"]
    assert kernels in ([], [2]), "one a layer; none where torch has no such kernel"
    torch.testing.assert_close([*back, *(weight.grad for weight in net.parameters())], list(expected))


def through_own(self: Any, x: Tensor) -> tuple[Tensor]:
    return (self.b(Own.apply(self.a(x), self.v)),)


def checkpointed(self: Any, x: Tensor) -> tuple[Tensor]:
    def counted(value: Tensor) -> Tensor:
        CALLS.append(value)
        return self.b(self.a(value).tanh())

    return (checkpoint(counted, x, use_reentrant=False),)


def hooked(self: Any, x: Tensor) -> tuple[Tensor]:
    x = self.a(x)
    x.register_hook(lambda gradient: CALLS.append(x) or gradient * 0.5)
    return (self.b(x),)


@pytest.mark.parametrize(("forward", "calls"), [(through_own, 1), (checkpointed, 2), (hooked, 1)])
def test_what_the_user_wrote_is_called_once_each_way(forward: Any, calls: int) -> None:
    """A function's own backward, the forward of a checkpoint and its repetition, a hook on a tensor."""

    def make() -> nn.Module:
        parts = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH), "v": nn.Parameter(torch.randn(WIDTH))}
        return Built(forward, **parts).double()

    CALLS.clear()
    assert_alike(*both_ways(make, [torch.ones(3, WIDTH).double()], [True]))
    assert len(CALLS) == 2 * calls


def test_what_the_weights_do_not_need_is_freed_between_the_halves() -> None:
    """Of a linear layer what entered is kept, of an activation nothing; after W nothing at all is."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
    alive: list[weakref.ref[Any]] = []
    value = torch.randn(3, WIDTH, requires_grad=True) * 1.0
    edge = get_gradient_edge(value)
    for layer in net:
        value = layer(value)
        alive.append(weakref.ref(value.untyped_storage()))
    _, deferred = split_backward.split_backward([value], [torch.ones_like(value)], [edge])
    del value, edge
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, True, False, False]
    done = deferred.run()
    assert any(next(done) is weight for weight in net[2].parameters()), "the last layer's come first"
    assert alive[1]() is None, "freed while W goes on"
    list(done)


def test_a_graph_without_its_second_half_is_freed() -> None:
    """No circle of references holds it until the collector comes."""
    _, entered, outputs, edges = prepared("linear")
    storage = weakref.ref(entered.untyped_storage())
    gc.collect()
    gc.disable()
    try:
        halves = split_backward.split_backward(outputs, [torch.ones_like(outputs[0])], edges)
        del outputs, edges, entered, halves
        assert storage() is None
    finally:
        gc.enable()


def test_gradients_are_ready_one_after_the_other_and_whole() -> None:
    """A tied weight is ready when both its uses have been added; the last layer's come first."""
    tied, between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    layers = [("a", tied), ("b", between), ("c", nn.Sequential(nn.Tanh(), tied))]
    handles = {"a.weight": tied.weight, "a.bias": tied.bias, "b.weight": between.weight, "b.bias": between.bias}
    stage, ones = stage_module.StageModule(layers, handles, torch.device("cpu"), seed=0), [torch.ones(3, WIDTH)]
    noted = []
    for splits in (False, True):
        torch.manual_seed(0)
        weights = versions.Versions(handles, watched=True).acquire(0)
        value, graph_inputs = stage.enter("", (torch.randn(3, WIDTH),), (True,))
        output = stage.forward(value, weights.leaves, 0, is_first=False)
        saved = stage_module.SavedForward(weights, graph_inputs, (output,), (True,), 0)
        ready: list[tuple[int, Tensor]] = []
        note = lambda *gradient, ready=ready: ready.append(gradient)  # noqa: E731
        if splits:
            back = split_backward.backward_inputs(stage, saved, ones)
            assert (saved.outputs, ready) == ((), [])
            gradients = split_backward.backward_weights(stage, saved, [None] * 4, note)
        else:
            gradients, back = stage.backward(saved, ones, [None] * 4, note)
        assert gradients == [leaf.grad for leaf in weights.leaves.values()] == [None] * 4
        assert sorted(number for number, _ in ready) == [0, 1, 2, 3]
        noted.append((back, dict(ready)))
    assert {number for number, _ in ready[:2]} == {2, 3}, "the first use of the tied ones is still to come"
    torch.testing.assert_close(*noted)

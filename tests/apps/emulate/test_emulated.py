"""Emulated stages: how long they wait, and the sizes of their results."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import pipedream as pd
from pipedream.apps.emulate import emulated
from pipedream.extensions.split_backward import split

MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Returns time that passes only in sleep."""
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(emulated, "time", clock)
    return clock


def stage(replicas: int = 1) -> pd.Stage:
    seconds = {"forward_s": 0.04, "backward_s": 0.08, "update_s": 0.03}
    return pd.Stage(0, 1, replicas, **seconds, output_bytes=1000, activation_bytes=500, parameter_bytes=3 * MIB)


@pytest.mark.parametrize(("microbatches", "replicas"), [(1, 2), (2, 1)])
def test_passes_wait_and_make_what_is_sent(microbatches: int, replicas: int, clock: SimpleNamespace) -> None:
    """Gradients of a replicated stage come one after the other."""
    layer = emulated.EmulatedStage(stage(replicas), microbatches, sends=True)
    came: list[float] = []
    for weights in layer.parameters():
        weights.register_post_accumulate_grad_hook(lambda _: came.append(clock.now_s))
    arrived = torch.zeros(1, 7, requires_grad=True)
    output = layer(arrived)
    forward_s = clock.now_s
    output.sum().backward()
    assert forward_s == pytest.approx(0.04 / microbatches)
    pieces = 3 if replicas > 1 else 1
    assert came == pytest.approx([forward_s + 0.08 / microbatches * piece / pieces for piece in range(1, pieces + 1)])
    assert clock.now_s == came[-1]
    assert output.shape == (1, 250 // microbatches)  # 4 bytes each
    assert arrived.grad is not None
    assert arrived.grad.shape == (1, 7)
    assert sum(weights.grad.nbytes for weights in layer.parameters() if weights.grad is not None) == 3 * MIB


def test_a_split_backward_waits_half_and_half(clock: SimpleNamespace) -> None:
    """The first half leaves the weights alone; where nothing that arrived wants a gradient, it has nothing to do."""
    for wants, halves in ((True, (0.04, 0.04)), (False, (0.0, 0.08))):
        layer = emulated.EmulatedStage(stage(replicas=2), 1, sends=True, splits_backward=True)
        arrived = torch.zeros(1, 7, requires_grad=wants) * 1.0
        edges = [get_gradient_edge(arrived)] if wants else []
        output = layer(arrived)
        start_s = clock.now_s
        back, deferred = split.split_backward([output], [torch.zeros_like(output)], edges)
        middle_s = clock.now_s
        assert all(weights.grad is None for weights in layer.parameters())
        assert not wants or (back[0] is not None and back[0].shape == (1, 7))
        done = [weights.numel() for weights in deferred.run()]
        assert done == [weights.numel() for weights in reversed(layer.weights)]
        assert (middle_s - start_s, clock.now_s - middle_s) == pytest.approx(halves)

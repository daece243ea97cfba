"""Emulated stages: how long they wait, and the sizes of their results."""

from __future__ import annotations

import time

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from pipedream.core.plan.stage import Stage
from pipedream.runtime.stage.emulated import (
    EmulatedOptimizer,
    EmulatedStage,
    make_emulated_batch,
    make_emulated_model,
    make_emulated_optimizer,
)
from pipedream.runtime.stage.split_backward import split_backward

MIB = 1 << 20


def stage(replicas: int = 1, parameter_bytes: int = 3 * MIB) -> Stage:
    return Stage(
        0,
        1,
        replicas,
        forward_s=0.04,
        backward_s=0.08,
        update_s=0.03,
        output_bytes=1000,
        activation_bytes=500,
        parameter_bytes=parameter_bytes,
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_passes_wait_for_their_seconds_and_make_what_is_sent(microbatches: int) -> None:
    layer = EmulatedStage(stage(), microbatches, sends=True)
    passes = []
    for _ in range(4):
        layer.zero_grad()
        arrived = torch.zeros(1, 7, requires_grad=True)
        start = time.perf_counter()
        output = layer(arrived)
        middle = time.perf_counter()
        output.sum().backward()
        passes.append((middle - start, time.perf_counter() - middle))
    for seconds, measured_s in zip((0.04, 0.08), zip(*passes, strict=True), strict=True):
        assert seconds / microbatches <= min(measured_s) < 1.6 * seconds / microbatches  # a busy machine wakes late
    assert output.shape == (1, 250 // microbatches)  # 4 bytes each
    assert arrived.grad is not None
    assert arrived.grad.shape == (1, 7)
    assert sum(weights.grad.nbytes for weights in layer.parameters() if weights.grad is not None) == 3 * MIB


def test_a_split_backward_waits_half_and_half() -> None:
    """The first half leaves the weights alone; where nothing that arrived wants a gradient, it has nothing to do."""
    torch.ones(1, requires_grad=True).backward(torch.ones(1))  # autograd imports what it needs
    for wants, halves in ((True, (0.04, 0.04)), (False, (0.0, 0.08))):
        layer = EmulatedStage(stage(replicas=2), 1, sends=True, splits_backward=True)
        arrived = torch.zeros(1, 7, requires_grad=wants) * 1.0
        edges = [get_gradient_edge(arrived)] if wants else []
        output = layer(arrived)
        start = time.perf_counter()
        back, deferred = split_backward([output], [torch.zeros_like(output)], edges)
        middle = time.perf_counter()
        assert all(weights.grad is None for weights in layer.parameters())
        assert not wants or (back[0] is not None and back[0].shape == (1, 7))
        done = [weights.numel() for weights in deferred.run()]
        assert done == [weights.numel() for weights in reversed(layer.weights)]
        for seconds, measured_s in zip(halves, (middle - start, time.perf_counter() - middle), strict=True):
            assert 0.99 * seconds <= measured_s < 1.6 * seconds + 0.02  # a busy machine wakes late


def test_gradients_of_a_replicated_stage_come_one_after_the_other() -> None:
    layer = EmulatedStage(stage(replicas=2), 1, sends=False)
    came: list[float] = []
    for weights in layer.parameters():
        weights.register_post_accumulate_grad_hook(lambda _: came.append(time.perf_counter()))
    output = layer(torch.zeros(1, 1))
    start = time.perf_counter()
    output.sum().backward()
    assert len(came) == 3
    for before, at in zip([start, *came], came, strict=False):
        assert at - before >= 0.99 * 0.08 / 3


def test_stage_without_weights_still_has_a_backward() -> None:
    layer = EmulatedStage(stage(parameter_bytes=0), 1, sends=True)
    output = layer(torch.zeros(1, 1))
    assert output.requires_grad


def test_update_waits_and_changes_nothing() -> None:
    model = make_emulated_model([stage(), stage()], 1)
    named = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("stage1")]
    optimizer = make_emulated_optimizer([stage(), stage()])(named)
    assert isinstance(optimizer, EmulatedOptimizer)
    model(make_emulated_batch(1)[0]).sum().backward()
    took = []
    for _ in range(3):
        start = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - start)
    assert 0.03 <= min(took) < 0.05
    assert all(not parameter.any() for parameter in model.parameters())

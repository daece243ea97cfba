"""Emulated stages: what they wait, and how large what they make is."""

from __future__ import annotations

import time

import pytest
import torch

from pipedream.core.plan import Stage
from pipedream.runtime.emulated import EmulatedStage, Waiting, emulated_batch, emulated_model, emulated_optimizer

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
        made = layer(arrived)
        middle = time.perf_counter()
        made.sum().backward()
        passes.append((middle - start, time.perf_counter() - middle))
    for seconds, found in zip((0.04, 0.08), zip(*passes, strict=True), strict=True):
        assert seconds / microbatches <= min(found) < 1.6 * seconds / microbatches  # a busy machine wakes late
    assert made.shape == (1, 250 // microbatches)  # 4 bytes each
    assert arrived.grad is not None
    assert arrived.grad.shape == (1, 7)
    assert sum(weights.grad.nbytes for weights in layer.parameters() if weights.grad is not None) == 3 * MIB


def test_gradients_of_a_replicated_stage_come_one_after_the_other() -> None:
    layer = EmulatedStage(stage(replicas=2), 1, sends=False)
    came: list[float] = []
    for weights in layer.parameters():
        weights.register_post_accumulate_grad_hook(lambda _: came.append(time.perf_counter()))
    made = layer(torch.zeros(1, 1))
    start = time.perf_counter()
    made.sum().backward()
    assert len(came) == 3
    for before, at in zip([start, *came], came, strict=False):
        assert at - before >= 0.99 * 0.08 / 3


def test_stage_without_weights_still_has_a_backward() -> None:
    layer = EmulatedStage(stage(parameter_bytes=0), 1, sends=True)
    made = layer(torch.zeros(1, 1))
    assert made.requires_grad


def test_update_waits_and_changes_nothing() -> None:
    model = emulated_model([stage(), stage()], 1)
    named = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("stage1")]
    optimizer = emulated_optimizer([stage(), stage()])(named)
    assert isinstance(optimizer, Waiting)
    model(emulated_batch(1)[0]).sum().backward()
    took = []
    for _ in range(3):
        start = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - start)
    assert 0.03 <= min(took) < 0.05
    assert all(not parameter.any() for parameter in model.parameters())

"""Emulated stages: how long they wait, and the sizes of their results."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import pipedream as pd
from pipedream.runtime.stage import emulated
from pipedream.runtime.stage.split_backward import split_backward

MIB = 1 << 20


class Clock:
    """Time that passes only in sleep."""

    now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(emulated, "time", SimpleNamespace(perf_counter=lambda: clock.now_s, sleep=clock.sleep))
    return clock


def stage(replicas: int = 1, parameter_bytes: int = 3 * MIB) -> pd.Stage:
    seconds = {"forward_s": 0.04, "backward_s": 0.08, "update_s": 0.03}
    sizes = {"output_bytes": 1000, "activation_bytes": 500, "parameter_bytes": parameter_bytes}
    return pd.Stage(0, 1, replicas, **seconds, **sizes)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_passes_wait_for_their_seconds_and_make_what_is_sent(microbatches: int, clock: Clock) -> None:
    layer = emulated.EmulatedStage(stage(), microbatches, sends=True)
    arrived = torch.zeros(1, 7, requires_grad=True)
    output = layer(arrived)
    forward_s = clock.now_s
    output.sum().backward()
    assert forward_s == pytest.approx(0.04 / microbatches)
    assert clock.now_s - forward_s == pytest.approx(0.08 / microbatches)
    assert output.shape == (1, 250 // microbatches)  # 4 bytes each
    assert arrived.grad is not None
    assert arrived.grad.shape == (1, 7)
    assert sum(weights.grad.nbytes for weights in layer.parameters() if weights.grad is not None) == 3 * MIB


def test_a_split_backward_waits_half_and_half(clock: Clock) -> None:
    """The first half leaves the weights alone; where nothing that arrived wants a gradient, it has nothing to do."""
    for wants, halves in ((True, (0.04, 0.04)), (False, (0.0, 0.08))):
        layer = emulated.EmulatedStage(stage(replicas=2), 1, sends=True, splits_backward=True)
        arrived = torch.zeros(1, 7, requires_grad=wants) * 1.0
        edges = [get_gradient_edge(arrived)] if wants else []
        output = layer(arrived)
        start_s = clock.now_s
        back, deferred = split_backward([output], [torch.zeros_like(output)], edges)
        middle_s = clock.now_s
        assert all(weights.grad is None for weights in layer.parameters())
        assert not wants or (back[0] is not None and back[0].shape == (1, 7))
        done = [weights.numel() for weights in deferred.run()]
        assert done == [weights.numel() for weights in reversed(layer.weights)]
        assert (middle_s - start_s, clock.now_s - middle_s) == pytest.approx(halves)


def test_gradients_of_a_replicated_stage_come_one_after_the_other(clock: Clock) -> None:
    layer = emulated.EmulatedStage(stage(replicas=2), 1, sends=False)
    came: list[float] = []
    for weights in layer.parameters():
        weights.register_post_accumulate_grad_hook(lambda _: came.append(clock.now_s))
    output = layer(torch.zeros(1, 1))
    start_s = clock.now_s
    output.sum().backward()
    assert came == pytest.approx([start_s + 0.08 * piece / 3 for piece in (1, 2, 3)])


def test_stage_without_weights_still_has_a_backward() -> None:
    assert emulated.EmulatedStage(stage(parameter_bytes=0), 1, sends=True)(torch.zeros(1, 1)).requires_grad


def test_update_waits_and_changes_nothing(clock: Clock) -> None:
    model = emulated.make_emulated_model([stage(), stage()], 1)
    named = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("stage1")]
    optimizer = emulated.make_emulated_optimizer([stage(), stage()])(named)
    assert isinstance(optimizer, emulated.EmulatedOptimizer)
    model(emulated.make_emulated_batch(1)[0]).sum().backward()
    start_s = clock.now_s
    optimizer.step()
    assert clock.now_s - start_s == pytest.approx(0.03)
    assert all(not parameter.any() for parameter in model.parameters())

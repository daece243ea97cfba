"""A stage that does its forward again trains to the bit as one that keeps its activations."""

import gc
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import zoo
from built import Built, Watched
from cases import Case, check_same, run
from marks import slow
from torch import Tensor, nn
from torch.nn import functional as F
from training import train

import pipedream as pd

CASES = [
    Case("mlp", "pipedream", 3),
    Case("cnn", "pipedream_2bw", 3, microbatches=3),
    Case("transformer", "1f1b", 3, microbatches=4, optimizer="adamw"),
    Case("lstm", "pipedream", 1, dtype=torch.float32),
    Case("mlp", "pipedream", 3, dtype=torch.float32, autocast=torch.bfloat16),
    *(slow(Case(a, "pipedream", 3)) for a in zoo.NAMES[1:]),
    *(slow(Case(a, "1f1b", 3, microbatches=4, optimizer="adamw")) for a in zoo.NAMES[:3]),
    slow(Case("cnn", "naive", 4)),
    slow(Case("transformer", "pipedream_vertical_sync", 3)),
    slow(Case("cnn", "pipedream", 2, replicas=(2, 1), update_delay=(1, 0), depth=(3, 1))),
    slow(Case("cnn", "pipedream", 2, replicas=(1, 3), evaluate_at=())),
    slow(Case("mlp", "pipedream_2bw", 2, replicas=(2, 1), microbatches=4)),
    slow(Case("mlp", "1f1b", 3, microbatches=3, clip_grad_norm=0.1, scheduled=True, ema=0.9)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recomputation_changes_no_bit(case: Case) -> None:
    check_same(run(replace(case, recompute=True)), run(case), 0)


def wander(self: Any, x: Tensor) -> Tensor:
    """Its output depends on a buffer that each forward moves, and it writes into its input."""
    self.calls += 1
    if self.training and self.calls > self.start:
        self.count.add_(1.0)
    if x.requires_grad:  # not the loader's own batch, whose microbatches are views of it
        x.mul_(0.9)
    return x * self.weight * torch.cos(self.count) * self.constant


def wandering(start: int = 0) -> nn.Module:
    buffers = {"count": nn.Buffer(torch.zeros(())), "constant": nn.Buffer(torch.ones(4))}
    return Built(wander, weight=nn.Parameter(torch.ones(4)), start=start, calls=0, **buffers)


def noisy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output + 0.1 * torch.rand_like(output), batch[1])


def stages_of(sizes: tuple[int, ...], recompute: tuple[bool, ...]) -> pd.Plan:
    ends = list(accumulate(sizes))
    rows = zip((0, *ends), ends, recompute, strict=False)
    stages = (pd.Stage(a, b, names=tuple(map(str, range(a, b))), recompute=again) for a, b, again in rows)
    return pd.Plan(tuple(stages), tuple(range(len(sizes), 0, -1)), pd.Cluster.flat(len(sizes)))


def trained(
    recompute: bool, layers: list[nn.Module], schedule: str = "pipedream", *, check: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(*layers, nn.Linear(4, 4), nn.Tanh())
    data = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(5)] * 2
    plan = stages_of((2, len(model) - 2), recompute=(recompute, recompute))
    state = train(model, plan, [(x.clone(), y) for x, y in data], schedule=schedule, loss=noisy, check=check).state
    return state, torch.rand(3)


@pytest.mark.parametrize("schedule", ["pipedream", "1f1b"])
def test_buffers_that_are_read_inputs_that_are_written_and_a_loss_that_draws(schedule: str) -> None:
    state, drawn = trained(True, [wandering(), nn.Tanh(), wandering()], schedule)
    expected, after = trained(False, [wandering(), nn.Tanh(), wandering()], schedule)
    assert list(state) == list(expected)
    for name in expected:
        assert torch.equal(state[name], expected[name]), name
    assert torch.equal(drawn, after), "the user's generator goes on where it would"
    assert state["0.count"] == 10 * (1 if schedule == "pipedream" else 6)  # of 8 microbatches 2 are empty


def test_a_buffer_that_begins_to_move_later_is_an_error() -> None:
    with pytest.raises(pd.errors.WorkerError, match="buffer 'count', which its first microbatch did not"):
        trained(True, [wandering(start=3), nn.Tanh()], check=False)  # which runs forwards of its own


def noted(name: str, calls: list[str], fails_at: int = 0) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        calls.append(name)
        if len(calls) == fails_at:
            raise RuntimeError("out of luck")
        return x * self.weight

    return Built(forward, weight=nn.Parameter(torch.ones(4)))


def test_a_stage_recomputes_while_it_waits_for_gradients() -> None:
    calls: list[str] = []
    trained(True, [noted("first", calls), nn.Tanh(), noted("second", calls)], "naive", check=False)
    assert calls[:4] == ["first", "first", "second", "second"]
    assert calls == calls[:4] * 10


def test_what_fails_when_recomputed_is_a_backward() -> None:
    layers = [noted("first", [], fails_at=4), nn.Tanh(), nn.Identity()]
    with pytest.raises(pd.errors.WorkerError, match="out of luck") as caught:
        trained(True, layers, "naive", check=False)
    assert "stage 0, 0B1" in str(caught.value)


@pytest.mark.parametrize(("recompute", "most"), [(True, 1), (False, 3)])
def test_only_inputs_wait(recompute: bool, most: int) -> None:
    gc.disable()  # what is freed is freed at once, and not by chance
    try:
        watched = Watched()
        model = nn.Sequential(nn.Linear(4, 4), watched, nn.Linear(4, 4), nn.Linear(4, 4))
        plan = stages_of((2, 1, 1), recompute=(recompute, False, False))
        data = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(8)]
        train(model, plan, data, schedule="pipedream", loss=F.mse_loss)
        assert watched.most == most
    finally:
        gc.enable()

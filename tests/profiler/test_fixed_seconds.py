"""The fixed part of a layer's seconds: known ones are found, and splitting a minibatch pays for them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipedream as pd
from pipedream.core.errors import ProfileError
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.plan.plan import Plan
from pipedream.profiler.measure import fixed_s, part_of
from pipedream.workflows import plan as planning
from pipedream.workflows.methods import score

WHOLE = [(1.0, 0.0), (3.0, 0.0), (2.0, 0.5)]


def test_the_fixed_part_of_known_seconds() -> None:
    """Of 8 samples t = 1: all fixed; t = 3: 1 fixed, 2 of them the samples'; t = 2: 0.4, less than it scatters."""
    halves = (1.0, 2.0, 1.2)
    assert fixed_s(lambda part: halves, (torch.ones(8),), 8, WHOLE, warmup=1, runs=3) == [1.0, 1.0, 0.0]
    # Of 3 samples the half is 1: t(3) = 3 = f + 3 k, t(1) = 2 = f + k: f = 1.5.
    assert fixed_s(lambda part: (2.0,), (torch.ones(3),), 3, WHOLE[1:2], warmup=0, runs=1) == [1.5]
    # A quarter: t(8) = 3 = f + 8 k, t(2) = 0.6 = f + 2 k: f = -0.2.
    quarters = fixed_s(lambda part: (0.6,), (torch.ones(8),), 8, WHOLE[1:2], warmup=0, runs=1, parts=4)
    assert quarters == pytest.approx([-0.2])


def test_what_cannot_be_halved_has_no_fixed_part() -> None:
    def fails(part: Any) -> list[float]:
        raise ProfileError("a layer knows its batch")

    assert fixed_s(fails, (torch.ones(8),), 8, WHOLE, warmup=1, runs=3) == [0.0] * 3
    assert fixed_s(fails, (torch.ones(1),), 1, WHOLE, warmup=1, runs=3) == [0.0] * 3
    table, mask = torch.ones(5, 2), torch.ones(8, 8)
    halves = part_of((mask, table, 3), 8, 4)
    assert (halves[0].shape, halves[1].shape, halves[2]) == ((4, 8), (5, 2), 3)


class Waits(nn.Module):
    """Takes some time whatever the batch, and some for each sample."""

    def __init__(self, fixed_s: float, each_s: float) -> None:
        super().__init__()
        self.seconds = fixed_s, each_s
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds[0] + self.seconds[1] * x.shape[0])
        return x * self.weight


def test_a_layer_of_known_fixed_time_is_measured() -> None:
    model = nn.Sequential(Waits(0.04, 0.0), Waits(0.0, 0.01), Waits(0.02, 0.005))
    profile = pd.profile(model, torch.ones(8, 2), warmup=1, runs=3)
    fixed = [layer.forward_fixed_s for layer in profile.layers]
    assert fixed == pytest.approx([0.04, 0.0, 0.02], abs=0.012)
    assert Profile.from_json(profile.to_json()) == profile


def test_splitting_pays_the_fixed_part_each_time() -> None:
    """Two stages of 1 + 1 s of which 0.5 + 0.5 are fixed, in m microbatches: (m + 1)(1 / m + 1) s under GPipe."""
    layer = LayerProfile(1.0, 1.0, 0, 0, forward_fixed_s=0.5, backward_fixed_s=0.5)
    profile = Profile.of_chain((layer,) * 2, batch=64)
    for m in (1, 2, 4, 8):
        plan = planning.plan(profile, pd.Cluster.flat(2), schedule="gpipe", microbatches=m, shape="straight")
        assert score(plan).period_s == pytest.approx((m + 1) * (1 / m + 1))
    best = planning.plan(profile, pd.Cluster.flat(2), schedule="auto", shape="straight")
    assert best.microbatches in (1, 2), "finer splits cost more than they hide"
    assert Plan.from_json(best.to_json()) == best
    with pytest.raises(ValueError, match="cannot be greater"):
        LayerProfile(1.0, 1.0, 0, 0, forward_fixed_s=2.0)


def test_layers_that_are_faster_in_small_batches_are_planned_by_the_microbatch() -> None:
    """3 s at once and 4 x 0.25 s in parts: PipeDream's cut is after the first layer, that of 1F1B in the middle."""
    slow = LayerProfile(3.0, 3.0, 0, 0, forward_fixed_s=-2 / 3, backward_fixed_s=-2 / 3)
    profile = Profile.of_chain((slow, *(LayerProfile(1.0, 1.0, 0, 0),) * 3), batch=64)
    profile = replace(profile, parts=4)
    assert Profile.from_json(profile.to_json()) == profile
    assert [profile.in_parts(m).forward_s for m in (1, 2, 4, 8)] == pytest.approx([6.0, 6.0 - 2 / 3, 4.0, 4.0])
    for schedule, m, cut, period_s in (("pipedream", None, 1, 6.0), ("gpipe", 4, 2, 5.0), ("gpipe", 8, 2, 4.5)):
        plan = planning.plan(profile, pd.Cluster.flat(2), schedule=schedule, microbatches=m, shape="straight")
        assert plan.stages[1].first == cut
        assert score(plan).period_s == pytest.approx(period_s)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches=0 was given; give at least 1"),
        ({"microbatches": 4, "device": "meta"}, "no microbatch can be measured; leave out microbatches=4"),
    ],
)
def test_microbatches_that_cannot_be_measured(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        pd.profile(nn.Sequential(nn.Linear(2, 2)), torch.ones(8, 2), **options)

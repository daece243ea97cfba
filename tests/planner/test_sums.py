"""Plans for replicas that agree by less: what their sums cost, in the planner, the plan and the simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import pipedream as pd
from pipedream.core.errors import PlanError
from pipedream.core.model.matrices import Matrices
from pipedream.core.plan.sums import SumMethod
from pipedream.plan_request import PlanRequest
from pipedream.simulator import costs
from pipedream.workflows.plan import plan_and_compare
from pipedream.workflows.simulate import simulate

WIDE = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 4))
FACTORS = 4 * (2 * (1024 + 256))  # numbers of rank 4; the last layer is too small
BIASES = 1024 + 256 + 4 + 4 * 256
SLOW = pd.Cluster.flat(2, 1e6, 1e-3)


def profile() -> pd.Profile:
    measured = pd.profile(WIDE, torch.randn(8, 256), runs=2)
    layers = (replace(layer, forward_s=0.01, backward_s=0.02) for layer in measured.layers)
    return replace(measured, layers=tuple(layers))


@pytest.fixture(scope="module")
def wide() -> pd.Profile:
    return profile()


def test_a_profile_knows_the_shapes_of_its_weights(wide: pd.Profile) -> None:
    assert wide.matrices == (
        Matrices(1024, 256, 1, 4 << 18),
        Matrices(256, 1024, 1, 4 << 18),
        Matrices(4, 256, 1, 4 << 10),
    )
    assert pd.Profile.from_json(wide.to_json()) == wide


@pytest.mark.parametrize(
    ("sums", "numbers"),
    [
        ("bfloat16", (2 * (1 << 18) + BIASES) / 2),
        ("powersgd:4", FACTORS + BIASES),
        ("every:8", (2 * (1 << 18) + BIASES) / 8),
        ("diloco:30", (2 * (1 << 18) + BIASES) / 30),
    ],
)
def test_what_is_sent_is_what_the_plan_counts(wide: pd.Profile, sums: str, numbers: float) -> None:
    full, plan = (pd.plan(wide, SLOW, shape="data-parallel", sums=how) for how in ("full", sums))
    assert plan.sums == sums
    assert plan.cluster == full.cluster
    (size,) = costs(plan).sum_bytes
    assert size == pytest.approx(4 * numbers)
    (whole,) = costs(full).sum_bytes
    periods = [simulate(p, minibatches=9).spans[-1].end_s for p in (full, plan)]
    saved_s = (whole - size) / 1e6
    assert periods[0] - periods[1] == pytest.approx(saved_s * 5, rel=0.1)  # five rounds of two minibatches
    assert plan.costs.sync_s[0] < full.costs.sync_s[0]
    again = replace(full, sums=sums)
    assert again.period_s == pytest.approx(plan.period_s)


def test_cheap_sums_make_data_parallelism_worth_it(wide: pd.Profile) -> None:
    slow = replace(wide, layers=tuple(replace(layer, forward_s=0.1, backward_s=0.2) for layer in wide.layers))

    def answer(sums: str) -> tuple[str, str]:
        comparison = plan_and_compare(slow, PlanRequest(SLOW, schedule="pipedream", sums=sums))
        return comparison.plan.config, comparison.verdict

    config, verdict = answer("full")
    assert config != "2"
    config, verdict = answer("powersgd:4")
    assert config == "2"
    assert "with sums=powersgd:4 (approximate)" in verdict


def test_replicas_hold_errors_and_outer_weights(wide: pd.Profile) -> None:
    full, low_rank, outer = (
        pd.plan(wide, SLOW, shape="data-parallel", sums=sums).stages[0].peak_bytes
        for sums in ("full", "powersgd:4", "diloco:8")
    )
    weights = wide.parameter_bytes
    assert low_rank >= full + weights
    assert outer >= low_rank + weights


def test_shapes_are_needed_for_powersgd(wide: pd.Profile) -> None:
    old = replace(wide, layers=tuple(replace(layer, matrices=()) for layer in wide.layers))
    with pytest.raises(PlanError, match="does not say which shapes weights have; profile the model again"):
        pd.plan(old, SLOW, shape="data-parallel", sums="powersgd:4")
    assert pd.plan(old, SLOW, shape="data-parallel", sums="bfloat16").sums == "bfloat16"


def test_a_plan_without_replicas_keeps_no_sums(wide: pd.Profile) -> None:
    assert pd.plan(wide, SLOW, shape="straight", sums="every:8").sums == "full"


def test_half_precision_weights_are_not_halved_again() -> None:
    assert SumMethod("bfloat16").costs(100, (), 2.0).share == 1.0
    assert SumMethod("bfloat16").costs(100, (), 8.0).share == 0.25

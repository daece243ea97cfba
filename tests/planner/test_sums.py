"""Plans for replicas that agree by less: what their sums cost, in the planner, the plan and the simulation."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from marks import slow
from torch import nn

import pipedream as pd
from pipedream.apps.emulate.emulate import build_emulated_pipeline, make_emulated_batches, scale_plan
from pipedream.simulator import costs
from tests.planner.planned import compare

WIDE = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 4))
FACTORS = 4 * (2 * (1024 + 256))  # numbers of rank 4; the last layer is too small
BIASES = 1024 + 256 + 4 + 4 * 256
SPARSE = 7 * (2 * 64 * 82 + 21 + 26 + 1) // 4 + 8 * (2 * 64 + 2)  # bytes: of 2% of each chunk, of the biases together
SLOW = pd.Cluster.flat(2, 1e6, 1e-3)


def with_seconds(profile: pd.Profile, forward_s: float) -> pd.Profile:
    """Returns the profile with layers that take the same seconds, twice as many backward."""
    times = {"forward_s": forward_s, "backward_s": 2 * forward_s, "forward_fixed_s": 0.0, "backward_fixed_s": 0.0}
    return replace(profile, layers=tuple(replace(layer, **times) for layer in profile.layers), notes=())


@pytest.fixture(scope="module")
def wide() -> pd.Profile:
    return with_seconds(pd.profile(WIDE, torch.randn(8, 256), runs=2), 0.01)


def parallel(profile: pd.Profile, sums: str = "full") -> pd.Plan:
    return pd.plan(profile, SLOW, shape="data-parallel", sums=sums)


@pytest.mark.parametrize(
    ("sums", "numbers"),
    [
        ("bfloat16", (2 * (1 << 18) + BIASES) / 2),
        ("powersgd:4", FACTORS + BIASES),
        ("every:8", (2 * (1 << 18) + BIASES) / 8),
        ("diloco:30", (2 * (1 << 18) + BIASES) / 30),
        ("sparse:8,0.02", SPARSE / 4 / 8),
    ],
)
def test_what_is_sent_is_what_the_plan_counts(wide: pd.Profile, sums: str, numbers: float) -> None:
    full, plan = (parallel(wide, how) for how in ("full", sums))
    assert str(plan.choices.sums) == sums
    assert plan.cluster == full.cluster
    (size,) = costs(plan).sum_bytes
    assert size == pytest.approx(4 * numbers)
    (whole,) = costs(full).sum_bytes
    periods = [pd.simulate(p, minibatches=9).spans[-1].end_s for p in (full, plan)]
    saved_s = (whole - size) / 1e6
    assert periods[0] - periods[1] == pytest.approx(saved_s * 5, rel=0.1)  # five rounds of two minibatches
    assert plan.costs.sync_s[0] < full.costs.sync_s[0]
    assert full.choosing(sums=sums).period_s == pytest.approx(plan.period_s)
    kept = {"powersgd:4": 1, "diloco:30": 2, "sparse:8,0.02": 2}.get(sums, 0)  # errors; also outer weights
    assert plan.stages[0].peak_bytes >= full.stages[0].peak_bytes + kept * wide.parameter_bytes


@pytest.mark.parametrize("updates", [8, 30])
def test_a_backward_hides_the_slices_of_averages_that_overlap(wide: pd.Profile, updates: int) -> None:
    plans = [parallel(wide, sums) for sums in ("every:1000000", f"diloco:{updates},overlap=1")]
    alone_s, ends_s = (pd.simulate(plan, minibatches=9).spans[-1].end_s for plan in plans)
    visible_s = max(0.0, 4 * (2 * (1 << 18) + BIASES) / 1e6 / updates - plans[1].stages[0].backward_s)
    assert (visible_s > 0) == (updates == 8)
    assert ends_s - alone_s == pytest.approx(5 * visible_s, abs=0.02)
    assert plans[1].period_s - plans[0].period_s == pytest.approx(visible_s / 2, abs=0.002)


def test_sums_chosen_for_a_finished_plan_need_their_memory(wide: pd.Profile) -> None:
    plan = parallel(wide)
    full = replace(plan, cluster=replace(plan.cluster, memory_bytes=plan.stages[0].peak_bytes))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with pd.Pipeline(WIDE, full, loss=nn.MSELoss(), optimizer=optimizer, sums="every:4") as pipeline:
        assert pipeline.plan.stages[0].peak_bytes == plan.stages[0].peak_bytes
    with pytest.raises(pd.PipelineError, match=r"stage 0 of the plan .* needs .*, a worker has"):
        pd.Pipeline(WIDE, full, loss=nn.MSELoss(), optimizer=optimizer, sums="diloco:4")


def test_cheap_sums_make_data_parallelism_worth_it(wide: pd.Profile) -> None:
    profile = with_seconds(wide, 0.1)
    full, cheap = (compare(profile, SLOW, schedule="pipedream", sums=sums) for sums in ("full", "powersgd:4"))
    assert full.plan.config != "2"
    assert cheap.plan.config == "2"
    assert "with sums=powersgd:4 (approximate)" in cheap.verdict


@pytest.mark.parametrize(
    ("width", "forwards_s", "config", "order"),
    [(2, (0.1,) * 8, "2-2", (0, 2, 1, 3)), slow(3, (0.4, 0.2), "4-2", (0, 3, 1, 4, 2, 5))],
)
def test_rare_sums_cross_sites(width: int, forwards_s: tuple[float, ...], config: str, order: tuple[int, ...]) -> None:
    layers = tuple(pd.LayerProfile(seconds, 2 * seconds, 1_000_000, 1_000_000) for seconds in forwards_s)
    profile = pd.Profile.of_chain(layers, batch=8)
    fast, sites = (pd.Cluster((pd.Level(width, 1e8, 1e-4), pd.Level(2, rate, 1e-4))) for rate in (1e8, 2e6))
    request = {"schedule": "1f1b", "shape": "pipeline", "all_workers": True, "sums": "diloco:30"}
    plan, near = pd.plan(profile, sites, **request), pd.plan(profile, fast, **request)
    assert (plan.config, plan.worker_order) == (config, order)
    for stage in range(2):  # replica j is in site j modulo 2, so that a minibatch stays where it is
        assert [worker // width for worker in plan.workers_of(stage)] == [0, 1] * (plan.replicas[stage] // 2)
    rates = [pd.metrics.run_metrics(pd.simulate(candidate, minibatches=60)).samples_per_s for candidate in (plan, near)]
    assert rates[0] > 0.9 * rates[1]
    assert pd.plan(profile, sites, **request | {"sums": "full"}).worker_order == ()


def test_shapes_are_needed_for_powersgd(wide: pd.Profile) -> None:
    old = replace(wide, layers=tuple(replace(layer, matrices=()) for layer in wide.layers))
    with pytest.raises(pd.errors.PlanError, match="does not say which shapes weights have; profile the model again"):
        parallel(old, "powersgd:4")
    plan = parallel(old, "bfloat16")
    assert str(plan.choices.sums) == "bfloat16"
    estimated, exact = (p.choosing(sums="powersgd:4") for p in (plan, parallel(wide)))
    assert costs(estimated).sum_bytes[0] == pytest.approx(costs(exact).sum_bytes[0], rel=0.7)  # as one square matrix


@pytest.mark.parametrize("sums", ["bfloat16", "powersgd:4", "every:2", "diloco:3", "sparse:2,0.02"])
def test_emulated_replicas_agree_as_planned(wide: pd.Profile, sums: str) -> None:
    with build_emulated_pipeline(scale_plan(parallel(wide, sums), 1e-3)) as pipeline:
        assert len(list(pipeline.train(make_emulated_batches(pipeline, 6)))) == 6
        assert str(pipeline.plan.choices.sums) == sums
        shapes = {tuple(tensor.shape) for tensor in pipeline.state_dict().values()}
    assert ((1024, 256) in shapes) == (sums == "powersgd:4")
    assert sum(torch.Size(shape).numel() for shape in shapes) >= 1 << 18


def test_a_plan_shows_its_sums_and_scales_no_bytes_of_factors(wide: pd.Profile) -> None:
    plan = parallel(wide, "powersgd:4")
    assert "sums: powersgd:4, 50.2 kB an update in the mean (approximate)" in str(plan)
    assert "sums:" not in str(plan.choosing(sums="full"))
    with pytest.raises(pd.PipelineError, match=r"byte scale 0\.1 was asked for with sums='powersgd:4'"):
        scale_plan(plan, byte_scale=0.1)

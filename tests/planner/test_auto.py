"""The choice of a method against trying every way by hand, and what it says."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from drawn import runtime_costs
from hypothesis import example, given, settings, strategies as st
from marks import slow

import pipedream as pd
from pipedream.workflows import methods
from tests.planner.planned import compare, random_chain, search_plan

FLUSHING = ("1f1b", "gpipe", "naive")

SLOWEST_LAST = (1.0, 1.5863973238461657, 27, 19), (1.6445223326150744, 1.0, 13, 8), (2.0, 1.0, 0, 0)
SETTLES_LATE = pd.Profile.of_chain(tuple(pd.LayerProfile(*row) for row in SLOWEST_LAST), batch=1)
"""As deep as can be its first updates come faster than its slowest stage allows for long."""


@st.composite
def profiles(draw: st.DrawFn) -> pd.Profile:
    sizes = st.integers(0, 40), st.integers(0, 40), st.integers(0, 100)
    layer = st.builds(pd.LayerProfile, st.floats(0.1, 2.0), st.floats(0.1, 4.0), *sizes)
    layers = draw(st.lists(layer, min_size=2, max_size=5))
    if draw(st.booleans()):  # a small batch takes less time per sample
        layers = [replace(layer, backward_fixed_s=-layer.backward_s / 2) for layer in layers]
    elif draw(st.booleans()):
        layers = [replace(layer, forward_fixed_s=layer.forward_s / 4) for layer in layers]
    batch, fixed_s = draw(st.sampled_from([1, 4, 6])), draw(st.sampled_from([0.0, 0.3]))
    update = {"update_s": 0.5, "update_fixed_s": fixed_s, "runtime": draw(runtime_costs(1.0))}
    return pd.Profile.of_chain(tuple(layers), batch=batch, **update)


@pytest.mark.slow
@settings(max_examples=2)
@example(SETTLES_LATE, 3, 20.0, None, True)
@given(profiles(), st.integers(1, 3), st.sampled_from([2.0, 20.0, 1e9]), st.sampled_from([None, 300]), st.booleans())
def test_none_is_faster(profile: pd.Profile, workers: int, rate: float, memory: int | None, asynchronous: bool) -> None:
    cluster = pd.Cluster.flat(workers, rate, memory_bytes=memory)
    request = {"schedule": "auto", "allow_asynchronous": asynchronous}
    names = tuple(methods.select_methods(allow_asynchronous=True)) if asynchronous else FLUSHING
    equal = ["-".join([str(workers // stages)] * stages) for stages in range(2, workers + 1)]
    shapes, seconds = ("any", "data-parallel", "1", *equal), []  # of every way that `choose` may take
    for name, m, shape, depth, delay in product(names, (1, 2, 4), shapes, ("noam", "auto"), (0, 1)):
        if m > profile.batch or (delay and name not in ("pipedream", "pipedream_vertical_sync")):
            continue
        how = {"schedule": name, "microbatches": m, "shape": shape, "in_flight": depth, "update_delay": delay}
        with suppress(pd.PipelineError):
            seconds.append(methods.score(pd.plan(profile, cluster, **how)).period_s)
    if not seconds:
        with pytest.raises(pd.PipelineError, match="no method works"):
            compare(profile, cluster, **request)
        return
    comparison = compare(profile, cluster, **request)
    best = comparison.candidates[0]
    assert best.period_s == pytest.approx(min(seconds))
    assert methods.score(comparison.plan).period_s == best.period_s
    assert (comparison.plan.schedule, comparison.plan.microbatches) == (best.schedule, best.microbatches)
    assert memory is None or max(stage.peak_bytes for stage in comparison.plan.stages) <= memory
    simulated = [candidate.period_s for candidate in comparison.candidates if candidate.period_s is not None]
    assert min(simulated) == pytest.approx(simulated[0])
    for candidate in comparison.candidates:
        assert candidate.period_s is None or candidate.period_s >= candidate.least_s * (1 - 1e-9), "it is no bound"


def test_halves_of_a_backward_are_not_compared() -> None:
    """Their seconds are not known; by half of a backward each, ZB-H2 would be the fastest of all."""
    assert list(methods.select_methods()) == list(FLUSHING)
    assert not set(methods.select_methods(allow_asynchronous=True)) & {"zb_h1", "zb_h2"}
    with pytest.raises(pd.PipelineError, match="compare zb_h1, but a profile does not have the seconds of the halves"):
        compare(CHAIN, pd.Cluster.flat(2), "1f1b", "zb_h1", schedule="auto")


LAYER = pd.LayerProfile(1.0, 2.0, output_bytes=1000, parameter_bytes=1000, activation_bytes=960)
CHAIN = pd.Profile.of_chain((LAYER,) * 6, batch=8)


def test_a_late_method_is_taken_only_if_allowed() -> None:
    plan = pd.plan(CHAIN, pd.Cluster.flat(2), schedule="auto", microbatches=4)
    two = pd.plan(CHAIN, pd.Cluster.flat(2, 500.0), schedule="auto", microbatches=4, allow_asynchronous=True)
    assert pd.schedules.build(plan.schedule, plan).flushes
    assert not pd.schedules.build(two.schedule, two).flushes
    assert "learn differently" in two.note
    assert "learn differently" not in plan.note


def test_memory_decides_between_methods() -> None:
    """Where messages are slow, the deepest is fastest; with less memory a shallower one, at last the naive one."""
    plans, memory = [], None
    for _ in range(3):
        cluster = pd.Cluster.flat(2, 1e4, memory_bytes=memory)
        plans.append(pd.plan(CHAIN, cluster, schedule="auto", shape="1-1", microbatches=8))
        memory = max(stage.peak_bytes for stage in plans[-1].stages) - 1
    assert [plan.schedule for plan in plans] == ["1f1b", "1f1b", "naive"]
    assert plans[1].in_flight < plans[0].in_flight


@pytest.mark.slow
def test_searches_for_slower_links_are_made_within_the_memory_too() -> None:
    """Without them the answer is 1-1-1-1, which takes 1.4 times as long."""
    profile = pd.Profile.load(Path(__file__).parents[2] / "benchmarks" / "gpu" / "h200" / "vgg16.json")
    cluster = pd.Cluster((pd.Level(2, 1.25e9), pd.Level(2, 1.25e8)), memory_bytes=1.9e9)
    comparison = compare(profile, cluster, schedule="auto", microbatches=4, shape="pipeline")
    best = comparison.candidates[0]
    assert (best.config, best.shape) == ("1-1-2", "pipeline, as if links were 4 times slower")
    (other,) = {c.period_s for c in comparison.candidates if c.config == "1-1-1-1" and c.period_s is not None}
    assert best.period_s < 0.75 * other
    assert "links were 4 times slower" in str(comparison)


@pytest.mark.parametrize("rate", [1000.0, slow(1e-3), slow(300.0), slow(3000.0)])
def test_never_slower_than_one_worker(rate: float) -> None:
    """Minibatches of one sample cannot be split, and a flush leaves all workers but one idle."""
    plan = pd.plan(replace(CHAIN, batch=1), pd.Cluster.flat(3, rate), schedule="auto")
    assert methods.score(plan).period_s <= CHAIN.forward_s + CHAIN.backward_s + CHAIN.update_s + CHAIN.loss_s + 1e-9
    assert plan.workers == 1
    assert "a minibatch of one sample cannot be split" in plan.note
    assert "cannot be split" not in pd.plan(CHAIN, pd.Cluster.flat(2, rate), schedule="auto").note


def test_what_is_said_is_kept() -> None:
    plan = pd.plan(CHAIN, pd.Cluster.flat(4), schedule="auto", microbatches=4, shape="2-2", in_flight=(2, 1))
    assert (plan.config, plan.microbatches, plan.in_flight) == ("2-2", 4, (2, 1))
    with pytest.raises(pd.PipelineError, match="chooses the stages"):
        pd.plan(CHAIN, pd.Cluster.flat(2), schedule="auto", cuts=(3,))
    with pytest.raises(pd.PipelineError, match="no method works with what was asked on 4 workers"):
        pd.plan(CHAIN, pd.Cluster.flat(4), schedule="auto", microbatches=2, shape="data-parallel")


# -- large models ------------------------------------------------------------------------------------------------------
# Too large for the dynamic program: neighbouring layers are joined, and the replicas found are cut anew.


@given(st.randoms(use_true_random=False), st.integers(3, 12), st.integers(2, 8))
def test_a_coarse_plan_is_near_the_best_of_its_replicas(draw: random.Random, layers: int, workers: int) -> None:
    profile, cluster = random_chain(draw, layers), pd.Cluster.flat(workers, draw.choice([1e8, 1e9, 1e10]))
    all_workers = draw.random() < 0.5
    small = search_plan(profile, cluster, shape="pipeline", all_workers=all_workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipedream.planner.search._MAX_STATES", 16.0 * workers**2)  # four parts at most
        large = search_plan(profile, cluster, shape="pipeline", all_workers=all_workers)
    assert large.bound_s <= small.slowest_stage_s <= large.slowest_stage_s
    assert not all_workers or large.workers == workers
    assert large.slowest_stage_s == search_plan(profile, cluster, shape=large.replicas).slowest_stage_s
    if layers > 6:
        assert f"of {layers - 1} cuts were tried, with layers joined between them" in large.note
        assert "best found" in large.note


def test_a_thousand_layers_on_a_thousand_workers() -> None:
    """The replicas are powers of two or three times one, and the plan is near its bound."""
    draw = random.Random(0)
    layers = tuple(
        pd.LayerProfile(draw.random() * 1e-2, draw.random() * 2e-2, draw.randrange(10**7), draw.randrange(10**8))
        for _ in range(1000)
    )
    cluster = pd.Cluster(tuple(pd.Level(width, rate) for width, rate in ((8, 1e11), (16, 1e10), (8, 2.5e9))))
    planned = search_plan(pd.Profile.of_chain(layers), cluster)
    assert planned.workers <= 1024
    assert {count & -count for count in planned.replicas} <= {1 << k for k in range(11)}
    assert all(count & -count in (count, count // 3) for count in planned.replicas)
    assert planned.gap < 0.05
    assert all(before.first < after.first for before, after in pairwise(planned.stages))

"""Bisection against the dynamic program, its bound against every plan, and its time."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from every_plan import fits
from marks import seeds

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level, SumCosts, Workers
from pipedream.core.model.profile import LayerProfile, Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.schedule.occupancy import stash
from pipedream.planner import SearchSpace, pipeline_search
from pipedream.planner.bisection import TOLERANCE, Bisection
from pipedream.planner.dynamic_program.recurrence import RECOMPUTE, DynamicProgram, replicated_states
from pipedream.planner.feasibility import RelaxedLine, StageNeeds, period_s
from pipedream.planner.workers import WorkerLine
from tests.planner.planned import search_plan


def random_chain(draw: random.Random, layers: int) -> Profile:
    launches = draw.choice([[0.0], [0.0, 1e-2, 4e-2]])
    return Profile.of_chain(
        tuple(
            LayerProfile(
                draw.choice([0.0, 1e-3, 1e-2]) * draw.random(),
                draw.random() * 2e-2,
                draw.choice([0, 10**6, 10**7]) * draw.randrange(1, 5),
                draw.choice([0, 10**6, 10**8]),
                draw.randrange(10**8),
                forward_launch_s=draw.choice(launches),
            )
            for _ in range(layers)
        ),
        input_shapes=((draw.choice([0, 1000]),),),
        update_s=0.01,
        update_fixed_s=draw.choice([0.0, 0.0078125]),
        optimizer_bytes=draw.choice([0, 10**8]),
        runtime=RuntimeCosts(
            *(draw.choice([0.0, 1e-3]) * draw.random() for _ in range(2)), 0.0, draw.choice([0.0, 1e-3])
        ),
    )


def random_space(draw: random.Random, cluster: Cluster) -> SearchSpace:
    versions: Any = draw.choice([stash, lambda in_flight, update_delay: 2, lambda in_flight, update_delay: 1])
    profile = random_chain(draw, draw.randint(2, 14))
    return SearchSpace.of(
        profile, cluster, versions=versions, microbatches=draw.choice([1, 2]), update_delay=draw.choice([0, 1])
    )


def both(draw: random.Random, cluster: Cluster, whole: bool) -> tuple[float, Any, SearchSpace]:
    """The best period by the dynamic program, infinite where nothing fits, and what bisection finds."""
    space, recompute = random_space(draw, cluster), draw.choice([*RECOMPUTE])
    states, line = replicated_states(cluster.workers), WorkerLine.of(cluster)
    starts = tuple(state for state in states if state[0] == cluster.workers) if whole else None
    exact = DynamicProgram(space, states, starts, allow_single_stage=False, line=line, recompute=recompute)
    return min(exact.periods.values()), Bisection(space, line, recompute, whole).best(), space


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 4, 10))
def test_is_optimal_on_one_level_without_latency(seed: int) -> None:
    draw = random.Random(seed)
    planned = refused = limited = 0
    for _ in range(25):
        memory = draw.choice([None, None, 10**8, 3 * 10**8, 10**9])
        cluster = Cluster.flat(draw.randint(2, 12), draw.choice([1e8, 1e9, 1e10]), 0.0, memory)
        best, got, _ = both(draw, cluster, whole=False)
        if np.isinf(best):
            refused += 1
            assert got is None
            continue
        planned += 1
        limited += memory is not None
        assert got.bound_s <= best <= got.slowest_stage_s <= best * (1 + 2 * TOLERANCE)
    assert planned > 10
    assert min(refused, limited) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 4, 10))
def test_its_bound_is_one_on_any_cluster(seed: int) -> None:
    """On levels, uneven machines and unlike workers: never above the best, and the plan never below."""
    draw = random.Random(seed)
    gaps = []
    for _ in range(15):
        sizes = draw.choice([(), (4, 2, 3)])
        latency_s = draw.choice([0.0, 1e-5, 1e-3])
        levels = (
            Level(4, draw.choice([1e9, 1e10]), latency_s, sizes=sizes),
            Level(3, draw.choice([1e8, 1e9, 1e10]), draw.choice([0.0, 1e-4]), sum_bytes_per_s=draw.choice([None, 2e9])),
        )
        memory = draw.choice([None, 3 * 10**8, 10**9])
        workers = Cluster(levels).workers
        kinds = (Workers(4, "a", 2.0, memory), Workers(workers - 4, "b", 1.0, memory and memory // 2))
        cluster = Cluster(
            levels, memory, kinds=kinds if draw.random() < 0.4 else (), sums=draw.choice(["ring", "tree"])
        )
        best, got, space = both(draw, cluster, whole=draw.random() < 0.3)
        if got is None:
            continue
        assert got.bound_s <= best * (1 + 1e-12)
        assert got.slowest_stage_s >= best * (1 - 1e-12)
        assert fits(space, got)
        gaps.append(got.slowest_stage_s / best - 1)
    assert len(gaps) > 5
    assert min(gaps) < 2 * TOLERANCE  # it finds good plans, not bounds alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 3, 4))
def test_relaxed_seconds_are_below_the_true_ones_and_fall(seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster((Level(4, 1e10, 1e-4), Level(3, 1e9, 1e-3), Level(2, 2e8)), sums=draw.choice(["ring", "tree"]))
    sum_costs = draw.choice([SumCosts(), SumCosts(0.5, work_s_per_byte=1e-9), SumCosts(0.1, 3.0, False, 1e-9)])
    cluster = replace(cluster, sum_costs=sum_costs)
    space, line = random_space(draw, cluster), WorkerLine.of(cluster)
    relaxed = RelaxedLine(line)
    needs = StageNeeds.of(space, line, "never")
    costs = needs.costs[False]
    count = len(costs.first)
    for low, high in relaxed.spans:
        before = np.full(count, np.inf)
        for replicas in range(low, high + 1):
            seconds = period_s(costs, relaxed.sites(np.full(count, replicas)), cluster)
            assert (seconds <= before * (1 + 1e-12)).all()
            before = seconds
            for first in range(cluster.workers - replicas + 1):
                sites = line.site_arrays(np.full(count, first), np.full(count, replicas))
                true = period_s(costs, sites, cluster)
                (site,) = line.site_list(np.array([first]), np.array([replicas]))
                ends = needs.places[costs.first], needs.places[costs.last]
                assert true == pytest.approx(space.period_s(space.passes_s(*ends), *ends, site), rel=1e-12)
                assert (seconds <= true * (1 + 1e-12)).all()


def test_large_models_are_planned_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster = random_chain(random.Random(3), 12), Cluster.flat(8, 1e9)
    small = search_plan(profile, cluster, shape="pipeline")
    assert small.note.startswith("optimal among pipelines of 2 to 8 stages")
    monkeypatch.setattr(pipeline_search, "_MAX_STATES", 0)
    large = search_plan(profile, cluster, shape="pipeline")
    assert large.note.startswith("best found among pipelines of 2 to 8 stages")
    assert large.slowest_stage_s == pytest.approx(small.slowest_stage_s, rel=2 * TOLERANCE)
    assert large.gap is not None
    assert 0 <= large.gap < 2 * TOLERANCE
    assert str(large).splitlines()[-1].startswith("proven bound ")
    assert search_plan(profile, cluster, shape="pipeline", all_workers=True).workers == 8
    with pytest.raises(PlanError, match="none of the pipelines of 2 to 8 stages fits"):
        search_plan(profile, Cluster.flat(8, 1e9, memory_bytes=10), shape="pipeline")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "widths", "limit_s"),
    [(300, (8, 4, 8), 30), pytest.param(1000, (8, 16, 8), 60, marks=pytest.mark.long)],
)
def test_many_layers_on_three_levels_in_seconds(count: int, widths: tuple[int, ...], limit_s: float) -> None:
    """Several times what it needs, for machines differ."""
    draw = random.Random(0)
    layers = tuple(
        LayerProfile(draw.random() * 1e-2, draw.random() * 2e-2, draw.randrange(10**7), draw.randrange(10**8))
        for _ in range(count)
    )
    rates = (1e11, 1e10, 2.5e9)
    cluster = Cluster(tuple(Level(width, rate) for width, rate in zip(widths, rates, strict=True)))
    start = time.process_time()
    best = search_plan(Profile.of_chain(layers), cluster)
    assert time.process_time() - start < limit_s
    assert best.workers <= cluster.workers
    assert best.gap is not None
    assert best.gap < 0.02

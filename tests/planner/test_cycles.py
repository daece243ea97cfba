"""Replica counts with a small common multiple: every plan can run, and is the fastest of those that can."""

import random
from dataclasses import replace
from math import lcm

import pytest
from every_plan import exhaustive
from hypothesis import given, strategies as st
from programs import program_of

import pipedream as pd
from pipedream.extensions.meshes.search import MeshSearch
from pipedream.planner import SearchSpace, cycles
from pipedream.planner.dynamic_program.recurrence import tie_break_key
from pipedream.planner.pipeline_search import PipelineSearch
from tests.planner.planned import random_chain, search_plan


def cycle_of(plan: pd.Plan) -> int:
    return lcm(*plan.replicas)


@given(st.randoms(use_true_random=False), st.integers(2, 5), st.integers(2, 6), st.booleans())
def test_is_the_fastest_with_so_short_a_cycle(draw: random.Random, layers: int, workers: int, whole: bool) -> None:
    cluster = pd.Cluster.flat(workers, draw.choice([1e8, 1e9]), 0.0, draw.choice([None, 4 * 10**7]))
    space = SearchSpace.of(random_chain(draw, layers, 10**6), cluster)

    def among(plan: pd.Plan) -> bool:
        return len(plan.stages) > 1 and cycle_of(plan) <= most and (not whole or plan.workers == workers)

    for most in (1, 2, 3, 5, 6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cycles, "CYCLE_LIMITS", (most,))
            got = PipelineSearch.of(space).best_pipeline(whole)
        try:
            best = exhaustive(space, among)
        except pd.errors.PlanError:
            assert got is None or cycle_of(got) > most  # refused when its memory is counted
            continue
        assert tie_break_key(got) == tie_break_key(best)
        fastest = PipelineSearch.of(space).best_pipeline(whole)
        assert got.bound_s == fastest.slowest_stage_s
        if cycle_of(fastest) <= most:
            assert got == fastest


def test_meshes_have_replicas_with_so_short_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_chain(random.Random(0), 6, 10**6)
    cluster = pd.Cluster.flat(5, 1e9)
    free = MeshSearch.of(profile, cluster, [pd.Mesh()]).best("pipeline")
    assert cycle_of(free) > 2
    monkeypatch.setattr(cycles, "CYCLE_LIMITS", (2,))
    got = MeshSearch.of(profile, cluster, [pd.Mesh()]).best("pipeline")
    assert cycle_of(got) <= 2
    assert got.slowest_stage_s == search_plan(profile, cluster, shape="pipeline").slowest_stage_s
    assert got.bound_s == free.slowest_stage_s


@given(st.randoms(use_true_random=False), st.integers(4, 10), st.sampled_from(["pipedream", "pipedream_2bw", "1f1b"]))
def test_every_plan_builds_its_program(draw: random.Random, workers: int, schedule: str) -> None:
    profile = replace(random_chain(draw, draw.randint(3, 8), 10**6), batch=64)
    options = {"shape": draw.choice(["any", "pipeline"]), "strategy": draw.choice(["search", "simulate"])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cycles, "CYCLE_LIMITS", (4, 10))
        patch.setattr("pipedream.core.schedule.lowering.MAX_PROVED", 10)
        planned = pd.plan(profile, pd.Cluster.flat(workers, draw.choice([1e8, 1e9])), schedule=schedule, **options)
        program_of(planned.schedule, planned, planned.microbatches)


def test_counts_that_cannot_be_proved_are_refused() -> None:
    with pytest.raises(pd.errors.PlanError, match="repeats after 4221 microbatches"):
        search_plan(random_chain(random.Random(0), 2, 10**6), pd.Cluster.flat(130, 1e9), shape=(67, 63))

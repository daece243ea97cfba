"""The dynamic program against every partition, and on the places that are left of it."""

import random
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import pytest
from every_plan import every_plan, exhaustive, peak_bytes
from hypothesis import assume, given, strategies as st
from marks import few, seeds
from programs import program_of

import pipedream as pd
from pipedream.core.plan.choices import Choices
from pipedream.extensions.meshes.search import MeshSearch
from pipedream.planner import PlanSearch, SearchSpace, cycles
from pipedream.planner.dynamic_program import pruning, recurrence
from pipedream.planner.workers import WorkerLine, list_orders
from tests.planner.planned import (
    RULES,
    chains,
    random_chain,
    random_profile,
    random_tree,
    replicated_states,
    search_plan,
)


def of_stages(space: SearchSpace, stages: int) -> recurrence.DynamicProgram:
    return recurrence.DynamicProgram(space, recurrence.straight_states(stages), ((stages, 1),))


def least_bytes(program: recurrence.DynamicProgram) -> int:
    """The least memory, equal on all workers, with which some plan fits."""
    small = program.space.cluster.with_memory(lambda memory: 1)
    return replace(program, space=replace(program.space, cluster=small)).shortage.need_bytes


def _kind(
    draw: random.Random, workers: int
) -> tuple[tuple[recurrence.State, ...], tuple[recurrence.State, ...] | None, bool, Any]:
    """A set of states, where they start, whether one stage is allowed, and the plans that this means."""
    kind = draw.choice(["any", "any", "pipeline", "all workers", "straight", "counts"])
    if kind == "any":
        return replicated_states(workers), None, True, lambda plan: True
    if kind == "pipeline":
        return replicated_states(workers), None, False, lambda plan: len(plan.stages) > 1
    if kind == "all workers":
        starts = tuple(state for state in replicated_states(workers) if state[0] == workers)
        return replicated_states(workers), starts, False, lambda plan: len(plan.stages) > 1 and plan.workers == workers
    counts = (1,) * draw.randint(1, workers)
    if kind == "counts":
        counts = tuple(draw.choice([1, 1, 2, 3]) for _ in range(draw.randint(1, 3)))
        counts = counts if sum(counts) <= workers else (workers,)
    return recurrence.states_of_counts(counts), ((sum(counts), counts[0]),), True, lambda plan: plan.replicas == counts


@pytest.mark.parametrize("seed", seeds(1, 7, 20))
def test_equals_exhaustive_search(seed: int) -> None:
    """In value and in plan, ties included, over 1,200 chains, 60 of them in the default run."""
    draw = random.Random(seed)
    planned = refused = 0
    for _ in range(60):
        profile, limit = random_profile(draw, draw.randint(1, 6)), draw.choice([None, None, 10, 20, 30, 45, 70])
        rate, latency_s = draw.choice([0.3, 1.0, 4.0, 1e9]), draw.choice([0.0, 0.0, 0.5, 3.0])
        cluster = pd.Cluster.flat(draw.randint(1, 5), rate, latency_s, limit)
        how = {"occupancy": draw.choice(list(RULES.values())), "microbatches": draw.choice([1, 2, 3])}
        space = SearchSpace.of(profile, cluster, update_delay=draw.choice([0, 0, 1]), **how)
        states, starts, whole, among = _kind(draw, cluster.workers)
        pipelines = recurrence.DynamicProgram(space, states, starts, whole)
        try:
            best = exhaustive(space, among)
        except pd.errors.PlanError:
            refused += 1
            assert pipelines.best() is None
            continue
        planned += 1
        assert pipelines.best() == best
        assert min(pipelines.periods.values()) == best.slowest_stage_s
    assert planned > 18
    assert refused > 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 3, 5))
def test_least_need_is_that_of_the_leanest_plan(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        profile, delay = random_profile(draw, draw.randint(1, 5)), draw.choice([0, 1])
        space = SearchSpace.of(profile, pd.Cluster.flat(4), microbatches=2, update_delay=delay)
        needs = {candidate: peak_bytes(space, candidate) for candidate in every_plan(space)}
        assert least_bytes(recurrence.DynamicProgram(space, replicated_states(4))) == min(needs.values())
        for stages in range(1, max(len(candidate.stages) for candidate in needs) + 1):
            of_these = [need for candidate, need in needs.items() if candidate.replicas == (1,) * stages]
            assert least_bytes(of_stages(space, stages)) == min(of_these)


@given(chains(), st.integers(1, 5), st.floats(0.0, 1.5), st.sampled_from(sorted(RULES)))
def test_memory_limit_is_obeyed_to_the_byte(profile: pd.Profile, stages: int, share: float, rule: str) -> None:
    assume(stages <= len(profile.layers))
    free = SearchSpace.of(profile, pd.Cluster.flat(5), occupancy=RULES[rule])
    least = least_bytes(of_stages(free, stages))
    limit = max(1, int(least * share))
    straight = partial(search_plan, profile, shape=(1,) * stages, occupancy=RULES[rule])
    if limit < least:
        with pytest.raises(pd.errors.PlanError, match=rf"\({least} bytes\)"):
            straight(pd.Cluster.flat(5, memory_bytes=limit))
        return
    best = straight(pd.Cluster.flat(5, memory_bytes=limit))
    assert max(stage.peak_bytes for stage in best.stages) <= limit
    assert best.slowest_stage_s >= of_stages(free, stages).best().slowest_stage_s


@pytest.mark.parametrize("seed", seeds(1, 5, 10))
def test_the_best_plan_stays(seed: int) -> None:
    """Of 400 graphs and chains, the plan and not only its period, at any family of plans, any memory, one to three
    levels and workers that may differ."""
    draw = random.Random(seed)
    fewer = 0
    for _ in range(40):
        cluster, profile = random_tree(draw), random_profile(draw, draw.randint(8, 16), draw.choice([1, 3, 3]))
        space = SearchSpace.of(profile, cluster, update_delay=draw.choice([0, 0, 1]))
        workers = cluster.workers
        counts = recurrence.states_of_counts((2, 1)[: workers - 1])
        states = draw.choice([replicated_states(workers), recurrence.straight_states(workers), counts])
        starts = None if draw.random() < 0.5 else tuple(state for state in states if state[0] == states[-1][0])
        line = WorkerLine.of(cluster, draw.choice(list_orders(cluster, 100)[0]))
        space = replace(space, choices=Choices(recompute=draw.choice(["never", "never", "auto", "always"])))
        full = recurrence.DynamicProgram(space, states, starts, draw.random() < 0.5, line)
        pruned = pruning.prune_places(full, enough=4, first=draw.choice([4, 30]), little=0.0)
        assert pruned.best() == full.best()
        fewer += len(pruned.space.positions) < len(space.positions)
    assert fewer > 5


# -- cycles -----------------------------------------------------------------------------------------------------------
# Replica counts with a small common multiple: every plan can run, and is the fastest of those that can.


def cycle_of(plan: pd.Plan) -> int:
    return lcm(*plan.replicas)


@few
@given(st.randoms(use_true_random=False), st.integers(2, 5), st.integers(2, 6), st.booleans())
def test_is_the_fastest_with_so_short_a_cycle(draw: random.Random, layers: int, workers: int, whole: bool) -> None:
    cluster = pd.Cluster.flat(workers, draw.choice([1e8, 1e9]), 0.0, draw.choice([None, 4 * 10**7]))
    space = SearchSpace.of(random_chain(draw, layers, 10**6), cluster)

    def among(plan: pd.Plan) -> bool:
        return len(plan.stages) > 1 and cycle_of(plan) <= most and (not whole or plan.workers == workers)

    for most in (1, 2, 3, 5, 6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cycles, "CYCLE_LIMITS", (most,))
            got = PlanSearch(space, whole).best_pipeline
        try:
            best = exhaustive(space, among)
        except pd.errors.PlanError:
            assert got is None or cycle_of(got) > most  # refused when its memory is counted
            continue
        assert recurrence.tie_break_key(got) == recurrence.tie_break_key(best)
        fastest = PlanSearch(space, whole).best_pipeline
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

"""Cuts, replicas and meshes together, against every plan; and never slower than one mesh for all."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, product
from typing import Any

import pytest
from drawn import meshed_cluster, meshed_profile
from marks import seeds

import pipedream as pd
from pipedream.core.plan.choices import Choices
from pipedream.extensions.meshes import search as mesh_search
from pipedream.extensions.meshes.program import MESH_PROGRAMS, MeshPeriods, MeshProgram
from pipedream.extensions.meshes.space import MeshSpace, StageChoice
from pipedream.planner import SearchSpace
from tests.planner.planned import plan_or_words


def drawn(draw: random.Random, most: int = 4, **how: Any) -> tuple[pd.Profile, pd.Cluster, list[pd.Mesh]]:
    """Returns a profile, a cluster and the meshes of both; `how`: see `meshed_cluster`."""
    profile, cluster = meshed_profile(draw, most), meshed_cluster(draw, **how)
    meshes = [pd.Mesh(), *(pd.Mesh(rank.mesh) for rank in profile.ranks)]
    return profile, cluster, [mesh for mesh in meshes if mesh.size <= cluster.workers]


def every_choice(space: MeshSpace, recompute: str = "never") -> Iterator[tuple[StageChoice, ...]]:
    """All stages on all meshes, on any number of ranks, whether or not they fit."""
    end, ranks = len(space.profile.layers), space.cluster.workers
    again = {"never": (False,), "auto": (False, True), "always": (True,)}[recompute]
    kinds = [(r, mesh) for mesh in space.meshes for r in range(1, ranks // mesh.size + 1)]
    for stages in range(1, min(end, ranks) + 1):
        for cuts in combinations(range(1, end), stages - 1):
            spans = list(zip((0, *cuts), (*cuts, end), strict=True))
            for row in product(kinds, repeat=stages):
                if sum(r * mesh.size for r, mesh in row) > ranks:
                    continue
                for redoes in product(again, repeat=stages):
                    rows = zip(spans, row, redoes, strict=True)
                    yield tuple(StageChoice(*span, *kind, redo) for span, kind, redo in rows)


def exhaustive_s(space: MeshSpace, *, single: bool, all_ranks: bool, recompute: str) -> float:
    """The seconds of the best plan; infinite if none fits."""
    least_s = float("inf")
    for choices in every_choice(space, recompute):
        firsts = [*accumulate((choice.ranks for choice in choices), initial=0)]
        unused = space.cluster.workers - firsts.pop()
        rows = zip(firsts, choices, strict=True)
        lies = all(space.site_at(unused + first, row.replicas, row.mesh) is not None for first, row in rows)
        is_allowed = (len(choices) > 1 or single) and not (unused and all_ranks)
        if is_allowed and lies and mesh_search.fits_rank_memory(space, choices):
            least_s = min(least_s, space.plan_of(choices).slowest_stage_s)
    return least_s


@pytest.mark.parametrize("seed", seeds(4, 23, 60))
def test_equals_exhaustive_search(seed: int) -> None:
    """Flat and on two levels, with and without a limit on memory; and the bounds are bounds."""
    draw = random.Random(seed)
    profile, cluster, meshes = drawn(draw, limited=seed % 2 == 1, levels=1 + seed // 2 % 2)
    all_ranks, single = draw.random() < 0.3, draw.random() < 0.7
    recompute = draw.choice(["never", "never", "auto"])
    choices = Choices(recompute=recompute)
    base = SearchSpace.of(profile, cluster, choices=choices, update_delay=draw.choice([0, 0, 1]))
    space = MeshSpace.over(base, meshes)
    best_s = exhaustive_s(space, single=single, all_ranks=all_ranks, recompute=recompute)
    options = {"all_ranks": all_ranks, "allow_single_stage": single}
    programs = [MeshProgram(space, how, **options) for how in MESH_PROGRAMS]  # type: ignore[arg-type]
    below, exact, above = (float("inf") if (best := program.best()) is None else best[0] for program in programs)
    assert exact == pytest.approx(best_s)
    assert below <= best_s * (1 + 1e-9)
    assert above >= best_s * (1 - 1e-9)
    if best_s < float("inf"):
        answer = programs[1].best()
        assert mesh_search.fits_rank_memory(space, answer[1])
        assert space.plan_of(answer[1]).slowest_stage_s == pytest.approx(best_s)
        search = mesh_search.MeshSearch.of(profile, cluster, meshes, choices=choices, all_ranks=all_ranks,
                               update_delay=space.update_delay)  # fmt: skip
        plan = search._search(search.space, "any" if single else "pipeline")
        assert plan.slowest_stage_s == pytest.approx(best_s), "without the meshes that others beat"
        assert plan.ranks == cluster.workers or not all_ranks


@pytest.mark.parametrize("seed", seeds(4, 23, 60))
def test_large_searches_are_bounded(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exact program: the best plan is between the bound and what is found, which fits whenever one does."""
    monkeypatch.setattr(mesh_search, "_MAX_WORK", 0.0)
    draw = random.Random(seed)
    profile, cluster, meshes = drawn(draw, limited=True, levels=1 + seed % 2)
    recompute, all_ranks = draw.choice(["never", "never", "auto", "always"]), draw.random() < 0.3
    search = mesh_search.MeshSearch.of(
        profile, cluster, meshes, choices=Choices(recompute=recompute), all_ranks=all_ranks
    )
    best_s = exhaustive_s(search.space, single=True, all_ranks=all_ranks, recompute=recompute)
    try:
        plan = search._search(search.space, "any")
    except pd.errors.PlanError:
        assert best_s == float("inf")
        return
    assert mesh_search.fits_rank_memory(search.space, search.space.choices_of(plan))
    assert plan.bound_s <= best_s * (1 + 1e-9)
    assert plan.slowest_stage_s >= best_s * (1 - 1e-9)
    assert plan.ranks == cluster.workers or not all_ranks


@pytest.mark.parametrize("seed", seeds(6, 24, 60))
def test_searches_that_share_tables_find_what_each_finds_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was searched before: other shapes, slower links, and with memory kept free for messages."""
    draw = random.Random(seed)
    monkeypatch.setattr(mesh_search, "_MAX_WORK", draw.choice([0.0, 3e8]))
    profile, cluster, meshes = drawn(draw, 6, limited=seed % 3 > 0, levels=1 + seed % 2)
    choices, delay = Choices(recompute=draw.choice(["never", "auto"])), draw.choice([0, 1])
    make = partial(mesh_search.MeshSearch.of, profile, cluster, meshes, choices=choices, update_delay=delay)
    shared = make()
    for shape, link_factor in product(("any", "pipeline", (1, 1)), (1.0, 4.0)):
        assert plan_or_words(shared, shape, link_factor) == plan_or_words(make(), shape, link_factor)


@pytest.mark.parametrize("seed", range(8))
def test_a_period_is_kept_if_a_plan_can(seed: int) -> None:
    """Where each rank's own bytes are all that crosses a boundary."""
    profile, cluster, meshes = drawn(random.Random(seed), limited=True, levels=1 + seed % 2)

    def silent(costs: Any) -> Any:
        return replace(costs, layers=tuple(replace(layer, output_bytes=0) for layer in costs.layers))

    profile = replace(silent(profile), ranks=tuple(map(silent, profile.ranks)), input_shapes=())
    periods = MeshPeriods(space := MeshSpace.over(SearchSpace.of(profile, cluster), meshes))
    best = MeshProgram(space).best()
    if best is None:
        assert periods.within(float("inf")) is None
        return
    choices = periods.within(best[0] * (1 + 1e-9))
    assert mesh_search.fits_rank_memory(space, choices)
    assert space.plan_of(choices).slowest_stage_s == pytest.approx(best[0])
    assert best[0] == 0 or periods.within(best[0] * (1 - 1e-9)) is None

"""One worker, data parallelism or a pipeline: the choice, its promise and its refusals."""

import random
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations, product
from typing import Any

import pytest
from every_plan import best_plans
from hypothesis import example, given, strategies as st
from marks import few, seeds

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.plan.choices import Choices
from pipedream.planner import PlanSearch, SearchSpace, spare_memory
from pipedream.planner.workers import list_orders
from tests.planner.planned import RULES, plan_or_words, random_profile, random_tree, search_plan

LAYER = pd.LayerProfile(1.0, 2.0, output_bytes=10, parameter_bytes=1000, activation_bytes=100)
EIGHT = pd.Profile.of_chain((LAYER,) * 8)
SHORT = pd.Profile.of_chain(tuple(pd.LayerProfile(1.0, 1.0, *row) for row in [(20, 50, 0), (20, 50, 10), (1, 50, 10)]))


profiles = st.builds(random_profile, st.randoms(use_true_random=False), st.integers(1, 7))
limits = st.integers(20, 300)
clusters = st.builds(
    pd.Cluster.flat, st.integers(2, 6), st.sampled_from([0.1, 1.0, 10.0]), st.just(0.2), st.none() | limits
)
CROWDED = pd.Cluster.flat(4, 10.0, 0.2, 375)
"""Where the messages of `SHORT` do not fit at first."""


@given(profiles, clusters, limits)
def test_never_loses_to_replicas_alike_if_memory_is_low(profile: pd.Profile, cluster: pd.Cluster, memory: int) -> None:
    cluster, workers = replace(cluster, memory_bytes=memory), cluster.workers
    for stages in (count for count in range(2, workers + 1) if workers % count == 0 and count <= len(profile.layers)):
        equal = plan_or_words(PlanSearch.of(profile, cluster), (workers // stages,) * stages)
        if isinstance(equal, pd.Plan):
            assert search_plan(profile, cluster).slowest_stage_s <= equal.slowest_stage_s * (1 + 1e-9)
    with suppress(pd.PipelineError):
        assert search_plan(profile, cluster, all_workers=True).workers == workers


@few
@given(profiles, clusters, st.sampled_from(["never", "auto", "always"]), st.booleans())
@example(SHORT, CROWDED, "never", True)
def test_shared_tables_find_alike(profile: pd.Profile, cluster: pd.Cluster, recompute: str, all_workers: bool) -> None:
    """Whatever was searched before: other shapes, slower links, and with memory kept free for messages."""
    how = {"choices": Choices(recompute=recompute), "all_workers": all_workers, "update_delay": 1}
    make = partial(PlanSearch.of, profile, cluster, **how)
    shared = make()
    for shape, link_factor in product(("any", "pipeline", (1, 1), (cluster.workers,), "straight"), (1.0, 4.0)):
        assert plan_or_words(shared, shape, link_factor) == plan_or_words(make(), shape, link_factor)


@given(profiles, clusters, st.sampled_from([1.0, 4.0]))
@example(SHORT, CROWDED, 1.0)
def test_what_cannot_win_is_left_out(profile: pd.Profile, cluster: pd.Cluster, link_factor: float) -> None:
    """The same plan with all searches that keep memory free; and under its own seconds as a limit."""
    best = partial(PlanSearch.of(profile, cluster).best, "any", link_factor=link_factor)
    try:
        plan = best()
    except pd.PipelineError:
        return
    original = spare_memory._spare_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spare_memory, "_spare_memory", lambda *args, rival_s=0.0: original(*args))
        assert best() == plan
    assert best(limit_s=plan.slowest_stage_s) == plan
    limit_s = plan.slowest_stage_s * (1 - 1e-6)
    assert best(limit_s=limit_s).slowest_stage_s >= limit_s


ANY = "fastest predicted among one worker, data parallelism and pipelines of 2 to 4 stages"


@pytest.mark.parametrize(
    ("layers", "workers", "rate", "shape", "config", "note"),
    [
        (8, 4, 100.0, "any", "1-1-1-1", ANY),
        (7, 4, 1e9, "any", "4", ANY),
        (8, 4, 1e9, "pipeline", "1-1-1-1", "optimal among pipelines of 2 to 4 stages"),
        (8, 4, 1e9, "straight", "1-1-1-1", "optimal among straight pipelines of 4 stages"),
        (8, 4, 100.0, "data-parallel", "4", "data parallelism was asked for"),
        (8, 1, 1e9, "pipeline", "1", "one worker"),
    ],
)
def test_links_and_shapes_decide(layers: int, workers: int, rate: float, shape: str, config: str, note: str) -> None:
    best = search_plan(pd.Profile.of_chain((LAYER,) * layers), pd.Cluster.flat(workers, rate), shape=shape)
    assert (best.config, best.note) == (config, note)


SIDE_BY_SIDE = pd.LayerGraph((pd.Layer("a", "Linear"), pd.Layer("b", "Linear")), ())
PAIR = pd.Profile("net", SIDE_BY_SIDE, (pd.LayerProfile(1.0, 1.0, 1, 1),) * 2, batch=1)
TIED = pd.Profile("tied", pd.LayerGraph.chain(SIDE_BY_SIDE.layers, ties=((0, 1),)), (LAYER,) * 2, batch=1)


@pytest.mark.parametrize(
    ("profile", "workers", "options", "says"),
    [
        (EIGHT, 4, {"shape": "triangle"}, "unknown shape 'triangle'; give any, pipeline, straight, data-parallel, or "),
        (EIGHT, 4, {"shape": "1-0"}, "unknown shape '1-0'"),
        (EIGHT, 4, {"shape": "4-1"}, "a plan 4-1 was asked for: it takes 5 workers, the cluster has 4; ask for fewer"),
        (EIGHT, 4, {"shape": (1,) * 9}, "straight pipeline of 9 stages .*: it takes 9 workers, the cluster has 4"),
        (EIGHT, 4, {"update_delay": 2}, "update delay 2 was asked for; give 0 .* or 1"),
        (TIED, 2, {"shape": "straight"}, "2 layers can be cut at 0 places"),
        # Two layers side by side have two cuts, of which no pipeline uses both.
        (PAIR, 3, {"shape": "straight"}, "cannot be cut into that many stages"),
    ],
)
def test_refuses_shapes_and_lags(profile: pd.Profile, workers: int, options: dict[str, Any], says: str) -> None:
    with pytest.raises(pd.PipelineError, match=says):
        search_plan(profile, pd.Cluster.flat(workers), **options)
    assert search_plan(PAIR, pd.Cluster.flat(2), shape="straight").config == "1-1"


@pytest.mark.parametrize("shape", ["any", "pipeline"])
def test_a_model_that_cannot_be_cut(shape: str) -> None:
    best = search_plan(TIED, pd.Cluster.flat(2), shape=shape)
    assert (best.config, len(best.stages)) == ("2", 1)
    assert best.note == f"the model cannot be cut; fastest of its plans of one stage; {TIED.ties_in_words()}"


def test_says_the_least_need_when_nothing_fits() -> None:
    says = (
        r"none of the plans \(one worker, data parallelism and pipelines of 2 to 4 stages\) fits: .*"
        r"\((\d+) bytes\), a worker has 100 B; give more memory"
    )
    with pytest.raises(pd.errors.PlanError, match=says) as caught:
        search_plan(EIGHT, pd.Cluster.flat(4, memory_bytes=100))
    least, enough = map(int, re.findall(r"\((\d+) bytes\)", str(caught.value)))
    assert least <= enough <= 1.01 * least
    assert search_plan(EIGHT, pd.Cluster.flat(4, memory_bytes=enough)).workers >= 1
    with pytest.raises(pd.errors.PlanError, match="none of the plans"):
        search_plan(EIGHT, pd.Cluster.flat(4, memory_bytes=least - 1))


# -- orders of workers -------------------------------------------------------------------------------------------------
# Over levels, uneven machines and unlike workers, against every plan there is.


def through_the_tree(cluster: pd.Cluster) -> list[tuple[int, ...]]:
    """All orders, found by trying: those that leave no component and come back to it."""
    sites = []
    for order in permutations(range(cluster.workers)):
        for level in range(1, len(cluster.levels)):
            row = [cluster.component(level, worker) for worker in order]
            if sum(a != b for a, b in pairwise(row)) != len(set(row)) - 1:
                break
        else:
            sites.append(order)
    return sites


@pytest.mark.parametrize("seed", seeds(1, 3, 8))
def test_equals_exhaustive_search_over_levels(seed: int) -> None:
    """In value and in plan, ties broken: on trees of up to three levels."""
    draw, chains = random.Random(seed), 12
    planned = crowded = 0
    for _ in range(chains):
        profile = random_profile(draw, draw.randint(1, 4), draw.choice([1, 1, 3]))
        cluster = random_tree(draw)
        options: dict[str, Any] = {"occupancy": draw.choice(list(RULES.values()))}
        options |= {"microbatches": draw.choice([1, 2]), "update_delay": draw.choice([0, 1])}
        recompute = draw.choice(["never", "auto", "always"])
        options["choices"] = Choices(recompute=recompute)
        orders = list_orders(cluster, 50)[0]
        if len(orders) > 6:
            continue
        least, best = best_plans(SearchSpace.of(profile, cluster, **options), orders=orders, recompute=recompute)
        got = plan_or_words(PlanSearch.of(profile, cluster, **options), "any")
        if isinstance(got, str):
            # Messages of neighbours, and what an update delay adds, are known of a whole plan only.
            words = "the least that any of them needs" if least is None else "at depth noam stage"
            assert words in got if best is None else best != least
            crowded += best is not None
            continue
        assert best is not None
        if best != least:
            crowded += 1
            assert got.first_stage_over_memory is None
            assert got.bound_s <= best.slowest_stage_s <= got.slowest_stage_s
            continue
        assert replace(got, note="", bound_s=0.0) == best
        assert got.bound_s == got.slowest_stage_s
        assert pd.Plan.from_json(got.to_json()) == got
        planned += 1
    assert planned > chains // 4
    assert crowded < chains // 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 3, 4))
def test_no_order_of_unlike_workers_is_better(seed: int) -> None:
    """The classes of orders that are tried hold the best of all orders through the tree."""
    draw = random.Random(seed)
    tried = 0
    while tried < 6:
        profile, cluster = random_profile(draw, draw.randint(1, 4)), random_tree(draw)
        if cluster.workers > 4 or not (cluster.kinds or any(level.sizes for level in cluster.levels)):
            continue
        least, best = best_plans(SearchSpace.of(profile, cluster), orders=through_the_tree(cluster))
        if best is None or best != least:
            continue
        tried += 1
        assert search_plan(profile, cluster).slowest_stage_s == best.slowest_stage_s


def test_orders_are_told_up_to_symmetry() -> None:
    def count(cluster: pd.Cluster, most: int = 1000) -> tuple[int, str]:
        orders, kind = list_orders(cluster, most)
        assert orders[0] == tuple(range(cluster.workers))
        assert len(set(orders)) == len(orders)
        assert all(sorted(order) == list(range(cluster.workers)) for order in orders)
        return len(orders), kind

    fast, slow = Workers(2, "fast", 2.0), Workers(2, "slow")
    assert count(pd.Cluster((pd.Level(4, 1.0), pd.Level(4, 1.0)))) == (1, "")
    assert count(pd.Cluster((pd.Level(4, 1.0),), kinds=(fast, slow))) == (6, "in any of 6 orders of those that differ")
    assert count(pd.Cluster((pd.Level(2, 1.0), pd.Level(2, 1.0)), kinds=(fast, slow)))[0] == 2
    assert count(pd.Cluster((pd.Level(2, 1.0, sizes=(2, 1, 1)), pd.Level(3, 1.0))))[0] == 3
    mixed = (Workers(1, "a", 2.0), Workers(1, "b"), Workers(1, "a", 2.0), Workers(1, "b"))
    assert count(pd.Cluster((pd.Level(2, 1.0), pd.Level(2, 1.0)), kinds=mixed))[0] == 4
    many = pd.Cluster((pd.Level(20, 1.0),), kinds=(Workers(10, "a"), Workers(10, "b", 2.0)))
    assert count(many) == (2, "in the cluster's order or any of 2 that keep like ones adjacent")
    assert count(many, 1) == (1, "in the cluster's order only")

"""Plans over levels, uneven machines and unlike workers, against every plan there is."""

import random
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import pytest
from every_plan import best_plans
from marks import seeds

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.plan.choices import Choices
from pipedream.planner import PlanSearch, SearchSpace
from pipedream.planner.workers import list_orders
from tests.planner.planned import plan_or_words, random_profile, random_tree, search_plan


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
        kept: Any = draw.choice([None, lambda in_flight, update_delay: 2, lambda in_flight, update_delay: 1])
        options: dict[str, Any] = {} if kept is None else {"versions": kept}
        options |= {"microbatches": draw.choice([1, 2]), "update_delay": draw.choice([0, 1])}
        recompute = draw.choice(["never", "auto", "always"])
        options["choices"] = Choices(recompute=recompute)
        space = SearchSpace.of(profile, cluster, **options)
        orders = list_orders(cluster, 50)[0]
        if len(orders) > 6:
            continue
        least, best = best_plans(space, orders=orders, recompute=recompute)
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
        space = SearchSpace.of(profile, cluster)
        least, best = best_plans(space, orders=through_the_tree(cluster))
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

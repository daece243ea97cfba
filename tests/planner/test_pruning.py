"""The search on the places that are left finds what the search on all of them finds."""

import random
from dataclasses import replace

import pytest
from drawn import inner_site
from marks import seeds

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.plan.choices import Choices
from pipedream.planner import SearchSpace
from pipedream.planner.dynamic_program.pruning import fewest_workers, prune_places
from pipedream.planner.dynamic_program.recurrence import DynamicProgram, states_of_counts, straight_states
from pipedream.planner.workers import WorkerLine, list_orders
from tests.planner.planned import replicated_states


def random_profile(draw: random.Random) -> pd.Profile:
    count = draw.randint(8, 16)
    layers = tuple(
        pd.LayerProfile(draw.random(), draw.random(), draw.randrange(9), draw.choice([0, draw.randrange(9)]), 3)
        for _ in range(count)
    )
    rest = {"loss_s": [0.0, 0.5], "update_s": [0.5, 1.0], "update_fixed_s": [0.0, 0.5]}
    chain = pd.Profile.of_chain(layers, **{name: draw.choice(values) for name, values in rest.items()})
    if draw.random() < 0.3:
        return chain
    edges = {(max(0, j - draw.randint(1, 3)), j) for j in range(1, count) for _ in range(2)}
    return replace(chain, graph=pd.LayerGraph(chain.graph.layers, tuple(sorted(edges))))


def random_cluster(draw: random.Random) -> pd.Cluster:
    memory, latency_s = draw.choice([None, None, 60, 100]), draw.choice([0.0, 0.1])
    if draw.random() < 0.5:
        return pd.Cluster.flat(draw.randint(2, 5), draw.choice([1.0, 5.0, 1e9]), latency_s, memory)
    levels = pd.Level(2, draw.choice([5.0, 1e9]), latency_s), pd.Level(2, draw.choice([1.0, 5.0]), latency_s)
    kinds = (Workers(2, speed=draw.choice([0.5, 2.0])), Workers(2, memory_bytes=memory)) if draw.random() < 0.5 else ()
    return pd.Cluster(levels, None if kinds else memory, kinds=kinds)


@pytest.mark.parametrize("seed", seeds(3, 5, 10))
def test_the_best_plan_stays(seed: int) -> None:
    """Of 200 graphs and chains, the plan and not only its period, at any family of plans, any memory, one or two levels
    and workers that may differ."""
    draw = random.Random(seed)
    fewer = 0
    for _ in range(20):
        cluster = random_cluster(draw)
        space = SearchSpace.of(random_profile(draw), cluster, update_delay=draw.choice([0, 0, 1]))
        workers = cluster.workers
        counts = states_of_counts((2, 1)[: workers - 1])
        states = draw.choice([replicated_states(workers), straight_states(workers), counts])
        starts = None if draw.random() < 0.5 else tuple(state for state in states if state[0] == states[-1][0])
        line = WorkerLine.of(cluster, draw.choice(list_orders(cluster, 100)[0]))
        recompute = draw.choice(["never", "never", "auto", "always"])
        space = replace(space, choices=Choices(recompute=recompute))
        full = DynamicProgram(space, states, starts, draw.random() < 0.5, line)
        pruned = prune_places(full, enough=4, first=draw.choice([4, 30]), little=0.0)
        assert pruned.best() == full.best()
        fewer += len(pruned.space.positions) < len(space.positions)
    assert fewer > 5


def test_counts_the_fewest_workers() -> None:
    """Layers of 3, 1, 1 and 3 s, at most 2 s a stage: two workers for 3 s, one for both of 1 s."""
    profile = pd.Profile.of_chain(tuple(pd.LayerProfile(seconds, 0.0, 0, 0) for seconds in (3.0, 1.0, 1.0, 3.0)))
    space = SearchSpace.of(profile, pd.Cluster.flat(8))
    sites = {count: [inner_site(space.cluster, count)] for count in range(1, 9)}
    before, after = fewest_workers(space, 2.0, sites, 8)
    assert before.tolist() == [0, 2, 2, 3, 4]  # 3 + 1 s take two workers, as 3 s do; all 8 s take four
    assert after.tolist() == [4, 3, 2, 2, 0]
    assert fewest_workers(space, 0.5, sites, 8)[0].tolist() == [0, 9, 9, 9, 9]

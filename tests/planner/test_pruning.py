"""The search on the places that are left finds what the search on all of them finds."""

import random
from dataclasses import replace

import pytest
from marks import seeds

from pipedream.core.plan.choices import Choices
from pipedream.planner import SearchSpace
from pipedream.planner.dynamic_program.pruning import prune_places
from pipedream.planner.dynamic_program.recurrence import DynamicProgram, states_of_counts, straight_states
from pipedream.planner.workers import WorkerLine, list_orders
from tests.planner.planned import random_profile, random_tree, replicated_states


@pytest.mark.parametrize("seed", seeds(3, 5, 10))
def test_the_best_plan_stays(seed: int) -> None:
    """Of 400 graphs and chains, the plan and not only its period, at any family of plans, any memory, one to three
    levels and workers that may differ."""
    draw = random.Random(seed)
    fewer = 0
    for _ in range(40):
        cluster, profile = random_tree(draw), random_profile(draw, draw.randint(8, 16), draw.choice([1, 3, 3]))
        space = SearchSpace.of(profile, cluster, update_delay=draw.choice([0, 0, 1]))
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

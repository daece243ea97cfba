"""The plan of one search, and random layers to plan for."""

import random
from itertools import combinations, product
from typing import Any

from hypothesis import strategies as st

import pipedream as pd
from pipedream.core.hardware.cluster import Workers
from pipedream.core.model.profile import TiedParameters
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.schedule.occupancy import STASHING, fill_depth
from pipedream.plan_request import PlanRequest
from pipedream.planner import Comparison, PlanSearch
from pipedream.workflows.plan import plan_and_compare

Shape = str | tuple[int, ...]
RULES = {
    "stash": STASHING,
    "double_buffer": fill_depth(lambda in_flight, update_delay: 2),
    "flush": fill_depth(lambda in_flight, update_delay: 1),
}


def search_plan(
    profile: pd.Profile, cluster: pd.Cluster, *, shape: Shape = "any", in_flight: Shape = "noam", **of_search: Any
) -> pd.Plan:
    """Returns the fastest plan; `of_search` are arguments of `PlanSearch.of`."""
    return PlanSearch.of(profile, cluster, **of_search).best(shape, in_flight)


def plan_or_words(search: Any, shape: Shape, link_factor: float = 1.0) -> pd.Plan | str:
    """Returns what a search finds, or why it finds nothing."""
    try:
        return search.best(shape, link_factor=link_factor)
    except pd.PipelineError as error:
        return str(error)


def compare(profile: pd.Profile, cluster: pd.Cluster, *names: str, **request: Any) -> Comparison:
    """Returns all plans that the door compares, of these methods with `schedule="auto"`."""
    return plan_and_compare(profile, PlanRequest(cluster, **request), names)


def random_chain(draw: random.Random, layers: int, most_bytes: int = 10**7) -> pd.Profile:
    """Returns layers of up to 10 ms forward, and outputs of up to so many bytes."""

    def layer() -> pd.LayerProfile:
        seconds = draw.random() * 1e-2, draw.random() * 2e-2
        return pd.LayerProfile(*seconds, draw.randrange(most_bytes), draw.randrange(10**7), 10**6)

    return pd.Profile.of_chain(tuple(layer() for _ in range(layers)))


def chains(least: int = 1) -> st.SearchStrategy[pd.Profile]:
    """Draws layers of any seconds and bytes."""
    cost, size = st.floats(0.0, 1e3, allow_subnormal=False), st.integers(0, 10**12)
    layers = st.lists(st.builds(pd.LayerProfile, cost, cost, size, size, size), min_size=least, max_size=10).map(tuple)
    return st.builds(pd.Profile.of_chain, layers, update_s=cost, optimizer_bytes=size, loss_s=cost)


def random_profile(draw: random.Random, layers: int, width: int = 1) -> pd.Profile:
    """Returns layers with small costs, so that equal ones are common, at times with ties and a skip.

    Each reads one of the `width` layers before it, or several. Seconds are sums of powers of two, or none: equal sums
    must still be equal.
    """
    choose = draw.choice
    seconds, launches = choose([[0, 1, 1, 2, 3], [0.0, 0.1, 0.1, 0.2, 0.7]]), choose([[0.0], [0.0], [0.0, 0.5, 4.0]])
    costs = seconds, seconds, [0, 1, 1, 2, 5], [0, 0, 1, 4, 9], [0, 1, 3, 8, 20]
    passes = ("forward_launch_s", "backward_launch_s")
    rows = [pd.LayerProfile(*map(choose, costs), **{name: choose(launches) for name in passes}) for _ in range(layers)]
    edges = {(max(0, i - draw.randint(1, width)), i) for i in range(1, layers) for _ in range(width)}
    pairs = [*combinations(range(layers), 2)]
    if layers > 2 and draw.random() < 0.3:
        edges.add(choose(pairs))
    ties = (choose(pairs),) if layers > 2 and draw.random() < 0.3 else ()
    tied: tuple[TiedParameters, ...] = ()
    if ties and draw.random() < 0.5:  # separated, by a method whose stages all make the same updates
        tied, ties = (TiedParameters(("w",), ties[0], min(rows[ties[0][0]].parameter_bytes, 4)),), ()
    graph = pd.LayerGraph(tuple(pd.Layer(f"l{i}", "Layer") for i in range(layers)), tuple(sorted(edges)), ties)
    some = [0.0] if draw.random() < 0.6 else [0.0, 0.1, 1.0, 2.0]
    runtime = RuntimeCosts(*(choose(some) for _ in range(5)), overlap_device=draw.random() < 0.3)
    update_s = choose([0.0, 1.0, 2.5])
    rest = {"update_s": update_s, "update_fixed_s": update_s * choose([0, 0.5, 1]), "copy_s": choose([0.0, 1.0, 4.0])}
    rest |= {"optimizer_bytes": choose([0, 7, 20]), "loss_s": choose([0.0, 1.0]), "tied": tied, "runtime": runtime}
    return pd.Profile("random", graph, tuple(rows), batch=4, input_shapes=((choose([0, 1, 4]),),), **rest)


SHAPES: tuple[Any, ...] = (
    ((4, ()),), ((5, ()),), ((2, ()), (2, ())), ((3, ()), (2, ())), ((2, ()), (1, ()), (2, ())),
    ((2, ()), (2, (1, 2)), (2, ())), ((3, (3, 1)), (2, ())), ((2, (1, 2, 2)), (3, ())),
)  # fmt: skip
RATES = ([0.25, 0.5, 1.0, 4.0, 1e9], [0.0, 0.0, 0.25], [None, None, 0.5], [None, None, 2.0])


def random_tree(draw: random.Random) -> pd.Cluster:
    """One to three levels, slower outward and sometimes not, at times uneven machines, unlike workers, or both."""
    levels = tuple(pd.Level(width, *map(draw.choice, RATES), sizes) for width, sizes in draw.choice(SHAPES))
    limit = draw.choice([None, None, 20, 40, 60, 90])
    bare = pd.Cluster(levels, limit, all_reduce=draw.choice(["ring", "ring", "tree"]))
    if draw.random() < 0.5:
        return bare
    first, speeds = draw.randint(1, bare.workers - 1), (draw.choice([1.0, 0.5]), draw.choice([1.0, 2.0]))
    slow = Workers(first, "slow", speeds[0], limit)
    fast = Workers(bare.workers - first, "fast", speeds[1], limit and 2 * limit)
    return pd.Cluster(levels, kinds=(slow, fast), all_reduce=bare.all_reduce)


def every_downset(graph: pd.LayerGraph) -> list[tuple[bool, ...]]:
    """Returns all sets of layers that may run before the others, tried by definition; the smallest first."""
    return sorted(
        (
            row
            for row in product([False, True], repeat=len(graph.layers))
            if all(row[a] or not row[b] for a, b in graph.edges)
            and all(len({row[i] for i in group}) == 1 for group in graph.ties)
        ),
        key=sum,
    )


def replicated_states(workers: int) -> tuple[tuple[int, int], ...]:
    """Returns the states of all plans on at most this many workers."""
    return tuple((w, r) for w in range(1, workers + 1) for r in range(1, w + 1))

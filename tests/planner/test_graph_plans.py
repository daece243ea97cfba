"""Plans of graphs whose cuts carry several values, against every chain of downsets."""

import random
from dataclasses import replace

import numpy as np
import pytest
from marks import seeds

import pipedream as pd
from pipedream.core.model.profile import TiedParameters
from pipedream.core.plan.cost import Site
from pipedream.planner import SearchSpace, cuts
from tests.planner.planned import every_downset, search_plan


def random_graph(draw: random.Random) -> pd.Profile:
    """A graph of a few layers; costs are whole numbers, so that sums are exact in any order."""
    count = draw.randint(1, 7)
    width = draw.choice([1, 2, 3])
    edges = {(max(0, j - draw.randint(1, width)), j) for j in range(1, count) for _ in range(2) if draw.random() < 0.8}
    costs = [0.0, 0.0, 1.0, 2.0, 5.0], [0.0, 0.0, 1.0, 3.0, 9.0], [0, 1, 3, 10], [0, 0, 2, 8], [0, 1, 3]
    layers = tuple(pd.LayerProfile(*map(draw.choice, costs)) for _ in range(count))
    ties = (tuple(draw.sample(range(count), 2)),) if count > 2 and draw.random() < 0.2 else ()
    graph = pd.LayerGraph(tuple(pd.Layer(f"l{i}", "Layer") for i in range(count)), tuple(sorted(edges)), ties)
    return pd.Profile("graph", graph, layers, batch=1, loss_s=draw.choice([0.0, 1.0]))


def with_tied(draw: random.Random, profile: pd.Profile) -> pd.Profile:
    """The same with parameters that several layers use; the first of each counts their bytes."""
    layers, tied = list(profile.layers), []
    for _ in range(draw.choice([1, 1, 2])):
        users = tuple(sorted(draw.sample(range(len(layers)), min(len(layers), draw.choice([2, 2, 3])))))
        size = draw.choice([1, 2, 8])
        trained, first = draw.random() < 0.8, layers[users[0]]
        frozen_bytes = first.frozen_bytes + size * (not trained)
        layers[users[0]] = replace(first, parameter_bytes=first.parameter_bytes + size, frozen_bytes=frozen_bytes)
        tied.append(TiedParameters((f"w{len(tied)}",), users, size, trained=trained))
    return replace(profile, layers=tuple(layers), tied=tuple(tied))


def least_period(profile: pd.Profile, cluster: pd.Cluster) -> float:
    """The best of all chains of downsets, with any replicas: by definition, without the planner's sums."""
    layers, downsets = profile.layers, every_downset(profile.graph)
    losses = [0.0] * (len(layers) - 1) + [profile.loss_s]
    readers = [[b for a, b in profile.graph.edges if a == i] for i in range(len(layers))]
    crossing = [
        sum(layer.output_bytes for i, layer in enumerate(layers) if row[i] and any(not row[b] for b in readers[i]))
        for row in downsets
    ]
    inside = np.array(downsets)
    best = np.full((cluster.workers + 1, len(downsets)), np.inf)
    best[:, -1] = 0.0
    i, j = (index.ravel() for index in np.indices((len(downsets),) * 2))
    forms = (~inside[i] | inside[j]).all(axis=1) & (i != j)
    i, j = i[forms], j[forms]
    between = inside[j] & ~inside[i]
    weights = between @ np.array([layer.trained_bytes for layer in layers])
    summed_s = np.zeros(len(weights))
    for tied in profile.tied:
        members = between[:, tied.layers]
        weights = weights + tied.trained * tied.parameter_bytes * (members.any(axis=1) & ~between[:, tied.layers[0]])
        # At least two holders: two messages there and back, each of half of the bytes.
        least_s = 2 * (2 * cluster.latency_s + tied.parameter_bytes / 2 / cluster.bandwidth_bytes_per_s)
        summed_s = summed_s + tied.trained * least_s * (members.any(axis=1) & ~members.all(axis=1))
    link = cluster.bandwidth_bytes_per_s, cluster.latency_s
    backward_s = [layer.backward_s + loss for layer, loss in zip(layers, losses, strict=True)]
    passes = between @ np.array([layer.forward_s for layer in layers]), between @ np.array(backward_s)
    received = np.where(i == 0, 0, np.array(crossing)[i])
    sent = received, np.where(j == len(downsets) - 1, 0, np.array(crossing)[j])
    costs = [
        Site.of(pd.Cluster.flat(r + 2, *link), range(1, r + 1), 0, r + 1).period_s(*passes, summed_s, weights, *sent)
        for r in range(1, cluster.workers + 1)
    ]
    for workers in range(1, cluster.workers + 1):
        for replicas in range(1, workers + 1):
            np.minimum.at(best[workers], i, np.maximum(costs[replicas - 1], best[workers - replicas][j]))
    return float(best[-1][0])


def check_stages(plan: pd.Plan, profile: pd.Profile) -> None:
    """Stages hold each layer once, and nothing reads what runs in a later one."""
    names = [name for stage in plan.stages for name in stage.names]
    assert sorted(names) == sorted(layer.name for layer in profile.graph.layers)
    owner = {name: s for s, stage in enumerate(plan.stages) for name in stage.names}
    place = {name: i for i, name in enumerate(names)}
    layers = profile.graph.layers
    for a, b in profile.graph.edges:
        assert owner[layers[a].name] <= owner[layers[b].name]
        assert place[layers[a].name] < place[layers[b].name]
    for group in profile.graph.ties:
        assert len({owner[layers[i].name] for i in group}) == 1
    for stage in plan.stages:
        assert tuple(names[stage.first : stage.last]) == stage.names


@pytest.mark.parametrize("seed", seeds(1, 3, 8))
def test_tied_parameters_count_in_each_of_their_stages(seed: int) -> None:
    """The value, and the bytes and holders of the plan, by definition."""
    draw = random.Random(seed)
    separated = 0
    for _ in range(60):
        profile = random_graph(draw)
        if len(profile.layers) < 2:
            continue
        profile = with_tied(draw, profile).without_tied_groups()
        cluster = pd.Cluster.flat(draw.randint(2, 4), draw.choice([0.3, 4.0, 64.0, 1e9]), draw.choice([0.0, 0.5]))
        best = search_plan(profile, cluster, shape=draw.choice(["any", "pipeline"]))
        least_s = least_period(profile, cluster)
        assert best.slowest_stage_s >= least_s * (1 - 1e-12)
        if best.note.startswith("fastest predicted among"):
            assert best.slowest_stage_s == pytest.approx(least_s, rel=1e-12)
        first = {name: s for s, stage in enumerate(best.stages) for name in stage.names}
        names = [layer.name for layer in profile.graph.layers]
        sizes = [0] * len(best.stages)
        for name, layer in zip(names, profile.layers, strict=True):
            sizes[first[name]] += layer.parameter_bytes
        holders = [sorted({first[names[i]] for i in tied.layers}) for tied in profile.tied]
        for tied, stages in zip(profile.tied, holders, strict=True):
            for s in set(stages) - {first[names[tied.layers[0]]]}:
                sizes[s] += tied.parameter_bytes
        assert [stage.parameter_bytes for stage in best.stages] == sizes
        rows = zip(profile.tied, holders, strict=True)
        expected = [(tied.names, tuple(stages)) for tied, stages in rows if tied.trained and len(stages) > 1]
        assert [(tied.names, tied.stages) for tied in best.tied_weights] == expected
        separated += bool(expected)
    assert separated > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 4, 10))
def test_equals_every_chain_of_downsets(seed: int) -> None:
    """600 graphs, 60 of them in the default run: the value, its bound, and that it is the plan's own."""
    draw = random.Random(seed)
    wide = 0
    for _ in range(60):
        profile = random_graph(draw)
        cluster = pd.Cluster.flat(draw.randint(1, 4), draw.choice([0.3, 1.0, 4.0, 1e9]), draw.choice([0.0, 0.5]))
        best = search_plan(profile, cluster)
        assert best.slowest_stage_s == least_period(profile, cluster)
        assert best.bound_s == best.slowest_stage_s
        check_stages(best, profile)
        cuts, edges = [stage.first for stage in best.stages[1:]], profile.graph.edges
        wide += any(source < cut - 1 for cut in cuts for source, target in edges if source < cut <= target)
    assert wide > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 3, 5))
def test_with_too_many_cuts_the_bound_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each graph only one order is searched: never better than the best, which is never below the bound."""
    monkeypatch.setattr(cuts, "MAX_DOWNSETS", 3)
    draw = random.Random(seed)
    several = best = told = 0
    for _ in range(60):
        profile = random_graph(draw)
        cluster = pd.Cluster.flat(draw.randint(1, 4), draw.choice([0.3, 1.0, 4.0, 1e9]))
        planned = search_plan(profile, cluster)
        least = least_period(profile, cluster)
        assert planned.bound_s <= least <= planned.slowest_stage_s
        check_stages(planned, profile)
        words = "optimal" if planned.bound_s == planned.slowest_stage_s else "of a proven bound"
        if "cuts were tried" in planned.note:
            assert words in planned.note
            told += 1
        several += len(planned.stages) > 1
        best += planned.slowest_stage_s == least
    assert several > 12
    assert best > 36
    assert told > 12


def test_where_memory_counts_free_layers_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that costs nothing may still keep bytes, so that the cuts without it are not all that matter."""
    first, view, last = (pd.LayerProfile(*row) for row in ((1.0, 1.0, 4, 0, 1), (0, 0, 1, 0, 9), (1.0, 1.0, 1, 0, 1)))
    graph = pd.LayerGraph(tuple(pd.Layer(f"l{i}", "Layer") for i in range(6)), tuple((0, i) for i in range(1, 6)))
    profile = pd.Profile("views", graph, (first, *[view] * 4, last), batch=1)
    limited = pd.Cluster.flat(2, 1e9, memory_bytes=100)
    assert len(SearchSpace.of(profile, limited).positions) == 33  # nothing, the first, and then any of five
    monkeypatch.setattr(cuts, "MAX_DOWNSETS", 10)
    few = SearchSpace.of(profile, limited)
    assert (len(few.positions), few.is_complete) == (3, False)  # the views, read by nobody, run at once
    assert SearchSpace.of(profile, pd.Cluster.flat(2, 1e9)).is_complete

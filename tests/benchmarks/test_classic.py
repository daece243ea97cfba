"""The original planner's arithmetic: against a slow reading of its equations, and against its published answers."""

import math
from functools import cache

import pytest
from hypothesis import given, strategies as st
from marks import published
from paper_tables.classic import classic, solve
from paper_tables.classic_states import CutStates
from paper_tables.graph_txt import GraphNode, GraphText

import pipedream as pd

Cut = frozenset[int]


def slow_cuts(graph: GraphText) -> dict[Cut, Cut]:
    """Every state of a graph, as what has run -> the nodes whose outputs cross, with sets and from the definitions."""
    edges = list(graph.edges)
    nodes = [i for i in range(len(graph.nodes))]
    sources = [i for i in nodes if graph.nodes[i].is_input and all(b != i for _, b in edges)]
    nodes = [i for i in nodes if i not in sources]
    edges = [(a, b) for a, b in edges if a in nodes and b in nodes]
    sinks = [i for i in nodes if graph.nodes[i].kind.startswith("__getitem__") and all(a != i for a, _ in edges)]
    nodes = [i for i in nodes if i not in sinks]
    edges = [(a, b) for a, b in edges if a in nodes and b in nodes]

    @cache
    def past(node: int) -> Cut:
        return frozenset({a for a, b in edges if b == node}.union(*(past(a) for a, b in edges if b == node)))

    def augmented(state: Cut) -> Cut:
        extra = {a for node in state for a, b in edges if a in past(node) and b not in past(node) and b != node}
        return state | extra

    first = frozenset({next(i for i in nodes if all(b != i for _, b in edges))})
    states, queue = {first: augmented(first)}, [first]
    for state in queue:
        for node in augmented(state):
            for target in {b for a, b in edges if a == node} - state:
                if any(target in past(other) for other in augmented(state)):
                    continue
                moved = augmented(state) - {node} | {target}
                after = frozenset(x for x in moved if not any(x in past(y) for y in moved))
                if after not in states:
                    states[after] = augmented(after)
                    queue.append(after)
    return {state.union(*(past(node) for node in state)): crossing for state, crossing in states.items()}


def slow_seconds(graph: GraphText, levels: tuple[pd.Level, ...], order: list[Cut], *, straight: bool = False) -> float:
    """The recurrence as written in the module, over the states in a given order."""
    cuts = slow_cuts(graph)
    assert set(order) == set(cuts)
    count = len(order)
    total = [sum((graph.nodes[n].forward_ms + graph.nodes[n].backward_ms) / 1000 for n in cut) for cut in order]
    weight_bytes = [sum(graph.nodes[n].parameter_bytes for n in cut) for cut in order]
    sends = [sum(graph.nodes[n].output_bytes for n in cuts[cut]) for cut in order]

    def parameters(i: int, j: int) -> float:
        return weight_bytes[j] - (weight_bytes[i - 1] if i else 0.0)

    cost = {(i, j): total[j] - (total[i - 1] if i else 0.0) for i in range(count) for j in range(i, count)}
    below, last = 1, count - 1
    for level in levels:
        best: dict[tuple[int, int, int], float] = {}
        rate = level.bandwidth_bytes_per_s
        for m in range(1, level.width + 1):
            for i, j in cost:
                choices = [(cost[i, j] + 4 * (m - 1) * parameters(i, j) / (rate * m) / below) / m]
                if straight and m > 1:
                    choices = [math.inf]
                most = min(m, 2) if straight else m
                for k in range(i, j):
                    for q in range(1, most if order[k] < order[j] else 1):
                        end = (cost[k + 1, j] + 4 * (q - 1) * parameters(k + 1, j) / (rate * q)) / q
                        waits = [2 * sends[s] / (rate * q) for s in (k, j) if s != last]
                        choices.append(max(best[i, k, m - q], end, *waits))
                best[i, j, m] = min(choices)
        cost = {(i, j): best[i, j, level.width] for i, j in cost}
        below = level.width
    return cost[0, last]


@st.composite
def graphs(draw: st.DrawFn) -> GraphText:
    count = draw(st.integers(1, 7))
    few = st.integers(0, 40).map(lambda n: n / 8)
    sizes = st.integers(0, 40).map(lambda n: n * 100.0)
    words = st.sampled_from(["Conv2d", "Add", "hidden", "Input0", "__getitem__(0)"])
    nodes = [GraphNode(f"n{i}", draw(words), draw(few), draw(few), (draw(sizes),), draw(sizes)) for i in range(count)]
    nodes[draw(st.integers(0, count - 1))] = GraphNode("layer", "Conv2d", 1.0, 1.0, (100.0,), 100.0)
    order = draw(st.permutations(range(count)))
    pairs = [(order[a], order[b]) for a in range(count) for b in range(a + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=9)) if pairs else []
    return GraphText(tuple(nodes), tuple(edges))


levels = st.lists(st.builds(pd.Level, st.integers(1, 4), st.sampled_from([1e5, 1e6, 1e7])), min_size=1, max_size=3)


@given(graphs(), levels, st.booleans())
def test_seconds_are_those_of_the_equations(graph: GraphText, network: list[pd.Level], straight: bool) -> None:
    states = CutStates.of(graph)
    order = [frozenset(n for n in range(len(graph.nodes)) if done >> n & 1) for done in states.done]
    assert all(list(before) == [i for i in range(j) if order[i] < order[j]] for j, before in enumerate(states.before))
    expected = slow_seconds(graph, tuple(network), order, straight=straight)
    seconds = solve(states, tuple(network), straight=straight)[-1].seconds(0, len(states) - 1, network[-1].width)
    assert seconds == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(graphs(), levels)
def test_the_plan_holds_each_layer_once(graph: GraphText, network: list[pd.Level]) -> None:
    if solve(CutStates.of(graph), tuple(network))[-1].table[-1, -1, 0] <= 0:
        with pytest.raises(pd.PipelineError, match="layers take no time"):
            classic(graph, pd.Cluster(tuple(network)))
        return
    answer = classic(graph, pd.Cluster(tuple(network)))
    names = [name for stage in answer.plan.stages for name in stage.names]
    assert sorted(names) == sorted(layer.name for layer in graph.profile().graph.layers)
    owner = {name: s for s, stage in enumerate(answer.plan.stages) for name in stage.names}
    for a, b in graph.edges:
        ends = graph.nodes[a].name, graph.nodes[b].name
        assert ends[0] not in owner or owner[ends[0]] <= owner[ends[1]]
    if "seconds are of no plan" not in answer.plan.note:
        assert answer.plan.workers == math.prod(level.width for level in network)


@pytest.mark.parametrize(
    ("model", "widths", "rates", "seconds", "config"),
    [
        ("vgg16", (4,), (1e9,), 0.205520896, "3-1"),
        ("vgg16", (4, 4), (12e9, 1.25e9), 0.066888752, None),
        ("resnet50", (8, 2), (30e9, 3.125e9), 0.031988747, None),
        ("alexnet", (4, 4), (12e9, 1.25e9), 0.015099494, None),
        # These come from running the published program.
        ("gnmt", (3, 2, 2), (12e9, 5e9, 1e9), 0.013566999999999996, None),
        # And these with --straight_pipeline.
        ("vgg16", (4, 4), (12e9, 1.25e9), 0.23559, "straight"),
        ("gnmt", (8,), (1.25e9,), 0.019285, "straight"),
    ],
)
def test_published_answers(
    model: str, widths: tuple[int, ...], rates: tuple[float, ...], seconds: float, config: str | None
) -> None:
    graph, workers = GraphText.load(published(model)), math.prod(widths)
    answer = classic(graph, pd.Cluster(tuple(map(pd.Level, widths, rates))), straight=config == "straight")
    assert answer.slowest_stage_s == pytest.approx(seconds, abs=1e-9)
    assert answer.plan.workers == workers
    expected = "-".join(["1"] * workers) if config == "straight" else config
    assert expected in (None, answer.plan.config)


def test_replicated_pipelines_are_flattened_and_said() -> None:
    """Inside a machine two stages, and two machines that each hold the pipeline."""
    layer = pd.LayerProfile(1.0, 1.0, output_bytes=10, parameter_bytes=1000)
    answer = classic(pd.Profile.of_chain((layer, layer)), pd.Cluster((pd.Level(2, 100.0), pd.Level(2, 1e9))))
    assert (answer.plan.config, answer.slowest_stage_s) == ("2-2", pytest.approx(1.000001, abs=1e-9))
    assert "stages 0 to 1 are 2 pipelines side by side, written as replicas" in answer.plan.note
    alone = classic(pd.Profile.of_chain((layer,)), pd.Cluster((pd.Level(2, 100.0), pd.Level(2, 1e9)))).plan
    assert (alone.config, "side by side" in alone.note) == ("4", False)


def test_ties_go_to_one_stage_then_to_the_first_cut() -> None:
    assert classic(pd.Profile.of_chain((pd.LayerProfile(1.0, 0.0, 0, 0),) * 4), pd.Cluster.flat(2)).plan.config == "2"
    heavy, free = pd.LayerProfile(4.0, 0.0, 0, 4_000), pd.LayerProfile(0.0, 0.0, 0, 0)
    plan = classic(pd.Profile.of_chain((heavy, free, heavy)), pd.Cluster.flat(2, 1e3)).plan
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 1), (1, 3)]

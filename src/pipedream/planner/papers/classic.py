"""The original PipeDream's planner, with its own arithmetic, so that its published answers can be reproduced.

github msr-fiddle/pipedream, ``optimizer_graph_hierarchical.py`` with ``--activation_compression_ratio 1``. The cuts are
those of `classic_states`, the recurrence is in `classic_levels`; docs/cost_models.md lists the known defects of both.
To train, plan with the other planner (`search`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph_txt import GraphText, in_order
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_seconds
from pipedream.planner.papers.classic_levels import LevelTable, alone_s, solve
from pipedream.planner.papers.classic_states import CutStates
from pipedream.planner.tables.method_occupancy import VersionsRule, stash
from pipedream.planner.tables.plan_depth import apply_depth
from pipedream.planner.tables.search_space import SearchSpace


@dataclass(frozen=True)
class Classic:
    """An answer of the original planner.

    Attributes:
        plan: the stages of all levels, flattened; its own properties (`Plan.slowest_stage_s`) are predicted by this
            library's cost model.
        slowest_stage_s: seconds per minibatch by the classic cost model.
        one_worker_s, data_parallel_s: the same for one worker, and for one stage on all workers.
    """

    plan: Plan
    slowest_stage_s: float
    one_worker_s: float
    data_parallel_s: float


def classic(
    graph: GraphText | Profile,
    cluster: Cluster,
    *,
    straight: bool = False,
    versions: VersionsRule = stash,
    in_flight: str | tuple[int, ...] = "noam",
) -> Classic:
    """Finds the original planner's answer.

    Args:
        graph: a graph.txt, or a profile, whose loss and update the classic model ignores.
        cluster: its levels and bandwidths count; latency does not.
        straight: one worker for each stage, as many stages as workers (the original's ``--straight_pipeline``).
        versions: of the weights, for the peak bytes of the plan; they limit nothing.
        in_flight: of the plan; the classic model has no depth.

    Raises:
        PlanError: a memory limit, which the classic model cannot keep, machines of unequal sizes, too many workers or
            states, a profile of no seconds, or too few cuts for a straight pipeline.
    """
    if cluster.is_limited:
        raise PlanError(
            "the classic cost model was asked for with a memory limit, which the published planner does not keep; "
            "leave the limit out, or plan with --cost-model pipedream"
        )
    if any(level.sizes for level in cluster.levels):
        raise PlanError(
            "the classic cost model was asked for machines of unequal sizes, which the published planner does not "
            "support; give one width for each level, or plan with --cost-model pipedream"
        )
    text = GraphText.of(graph) if isinstance(graph, Profile) else graph
    states = CutStates.of(text)
    tables = solve(states, cluster.levels, straight=straight)
    end = len(states) - 1
    seconds = tables[-1].seconds(0, end, cluster.levels[-1].width)
    if seconds == np.inf:
        raise PlanError(
            f"the classic cost model was asked for a straight pipeline of {cluster.workers} stages, but this graph "
            "cannot be cut into as many; use fewer workers, or leave the shape out"
        )
    stages = _flatten(tables, 0, end, 1)
    if seconds <= 0:
        raise PlanError(
            "the classic cost model was asked for a graph whose layers take no time; give a profile with measured "
            "seconds"
        )
    note = f"classic cost model: {format_seconds(seconds)} per minibatch{_describe_nests(stages)}"
    if any(states.done[a.last] & ~states.done[b.last] for a, b in pairwise(stages)):
        note += "; it leaves a branch and later returns to it, so these seconds are of no plan"
    if cluster.latency_s:
        note += "; latency does not count"
    plan = _plan(graph, text, cluster, states, stages, versions, in_flight)
    total, weight_bytes = float(states.compute_s[-1]), float(states.parameter_bytes[-1])
    return Classic(replace(plan, note=note), seconds, total, _compute_data_parallel_s(total, weight_bytes, cluster))


@dataclass(frozen=True)
class _ClassicStage:
    """A run of states; `nest` is (first state, copies) of a pipeline that is replicated as a whole."""

    first: int
    last: int
    replicas: int
    nest: tuple[int, int] | None = None


def _flatten(tables: list[LevelTable], i: int, j: int, outer: int) -> list[_ClassicStage]:
    """The stages of states i to j on all components of the outermost level, `outer` copies of each."""
    stages: list[_ClassicStage] = []
    *inner, table = tables
    for first, last, components in table.stages(i, j):
        copies = outer * components
        within = _flatten(inner, first, last, copies) if inner else [_ClassicStage(first, last, copies)]
        if components > 1 and len(within) > 1:
            within = [replace(stage, nest=(first, components)) for stage in within]
        stages += within
    return stages


def _describe_nests(stages: list[_ClassicStage]) -> str:
    """Names copies of a whole pipeline, which a list of stages cannot show."""
    nests: dict[tuple[int, int], list[int]] = {}
    for s, stage in enumerate(stages):
        if stage.nest is not None:
            nests.setdefault(stage.nest, []).append(s)
    return "".join(
        f"; stages {members[0]} to {members[-1]} are {copies} pipelines side by side, written as replicas"
        for (_, copies), members in nests.items()
    )


def _plan(
    graph: GraphText | Profile,
    text: GraphText,
    cluster: Cluster,
    states: CutStates,
    stages: list[_ClassicStage],
    versions: VersionsRule,
    in_flight: str | tuple[int, ...],
) -> Plan:
    """Nodes are ordered by stage, so that they can run in this order."""
    owner = _assign_owners(text, [states.done[stage.last] for stage in stages])
    order = in_order(len(owner), text.edges, key=lambda i: owner[i])
    places = {node: place for place, node in enumerate(order)}
    if isinstance(graph, Profile) and order == list(range(len(order))):
        profile = graph
    else:
        edges = tuple((places[source], places[target]) for source, target in text.edges)
        profile = GraphText(tuple(text.nodes[i] for i in order), edges).profile()
    numbers = dict(zip((node.name for node in text.nodes), owner, strict=True))
    counts = Counter(numbers[layer.name] for layer in profile.graph.layers)
    stages = [stage for s, stage in enumerate(stages) if counts[s]]  # leaves out stages whose nodes have all run before
    cuts = tuple(accumulate(counts[s] for s in sorted(counts)))[:-1]
    space = SearchSpace.of(profile, cluster, versions=versions, downsets=())
    crossing = np.array(space.crossing)
    for cut, stage in zip(cuts, stages, strict=False):
        crossing[cut] = round(states.output_bytes[stage.last])
    space = replace(space, crossing=crossing)
    return apply_depth(space, space.plan(cuts, tuple(stage.replicas for stage in stages)), in_flight)


def _assign_owners(text: GraphText, done: list[int]) -> list[int]:
    """A node that no state contains goes to the last stage that it reads from."""
    owner = [0] * len(text.nodes)
    producers: list[list[int]] = [[] for _ in text.nodes]
    for source, target in text.edges:
        producers[target].append(source)
    for i in in_order(len(text.nodes), text.edges):
        stage = next((s for s, ran in enumerate(done) if ran >> i & 1), None)
        owner[i] = max((owner[p] for p in producers[i]), default=0) if stage is None else stage
    return owner


def _compute_data_parallel_s(seconds: float, weight_bytes: float, cluster: Cluster) -> float:
    below = 1
    for level in cluster.levels:
        seconds = float(alone_s(seconds, weight_bytes, level.width, level, below))
        below = level.width
    return seconds

"""The original PipeDream's planner, with its own arithmetic, so that its published answers can be reproduced.

github msr-fiddle/pipedream, ``optimizer_graph_hierarchical.py`` with ``--activation_compression_ratio 1``;
README.md lists the known defects. To train, plan with `pipedream.plan`.

The cuts are those of `classic_states`. The recurrence runs level by level of the network, exact and vectorised. With
C_ij the seconds of states i to j on one component, w_ij their parameter bytes, o_k the bytes that cross state k, B the
bandwidth, W the width of the level below (1 at the innermost), and A the seconds of the slowest stage on m components:

    alone(i, j, m) = (C_ij + 4 (m-1) w_ij / (B m) / W) / m
    last(k, j, q)  = max((C_(k+1)j + 4 (q-1) w_(k+1)j / (B q)) / q, 2 o_k / (B q), and, unless j is the last state,
                         2 o_j / (B q))
    A(i, j, m)     = min(alone(i, j, m), min over k before j, k >= i, and q < m of max(A(i, k, m-q), last(k, j, q)))

C of the next level is A(i, j, all m). As published, compute and synchronisation are added, where the paper takes the
maximum; W is the width of one level, not a product, and only applies to a stage that is alone; all m components are
used. If state i - 1 does not come before j, C_ij is a difference of unrelated sums (it may be negative).

A straight pipeline has no replicas (``--straight_pipeline``): alone is infinite for m > 1, and q is 1.

Ties: a stage that is alone, then the smallest k in the order of the states, then the smallest q.

For a block of starts i, a pair (k, q) is evaluated only if max(least A of the block, last) is less than the worst value
that the block has so far; another pair could not lower any minimum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from paper_tables.classic_states import CutStates
from paper_tables.graph_txt import GraphText

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Level
from pipedream.core.model.graph import in_order
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_seconds
from pipedream.planner.arrays import FloatArray, IntArray, Seconds
from pipedream.planner.tables.search_space import SearchSpace, apply_depth

_BLOCK = 96
_MIN_BLOCK = 24
_MAX_ENTRIES = 1 << 27  # of a table, 8 bytes each: a gigabyte
_CHUNK = 1 << 15  # rows of a block that are gathered at a time


@dataclass(frozen=True, eq=False)
class LevelTable:
    """A(i, j, m) of one level.

    Attributes:
        inner_width: W, the width of the level below; 1 at the innermost.
        cost: C as cost[i, j].
        starts: the i of each row, sorted by the compute before it, so that neighbours have similar A.
        table: A as table[m - 1, j, row of i]; infinite where j < i, or if no pipeline has that many stages.
    """

    states: CutStates
    level: Level
    inner_width: int
    cost: FloatArray
    starts: IntArray
    table: FloatArray
    straight: bool = False

    @cached_property
    def rows(self) -> IntArray:
        """The row of each i."""
        return np.argsort(self.starts)

    def seconds(self, i: int, j: int, m: int) -> float:
        """Returns A(i, j, m)."""
        return float(self.table[m - 1, j, self.rows[i]])

    def stages(self, i: int, j: int) -> list[tuple[int, int, int]]:
        """Returns the best stages from state i to j on all components, as (first state, last state, components)."""
        stages = []
        m, end = self.level.width, j
        while (split := self._split(i, end, m)) is not None:
            k, q = split
            stages.append((k + 1, end, q))
            end, m = k, m - q
        return [(i, end, m), *reversed(stages)]

    def _split(self, i: int, j: int, m: int) -> tuple[int, int] | None:
        row = self.rows[i]
        value = self.table[m - 1, j, row]
        if m == 1 or value == _compute_alone(self, j)[m - 1, row]:
            return None
        before = self.states.before[j]
        before = before[before >= i]
        max_q = 1 if self.straight else m - 1  # of the last stage
        first_part = self.table[m - 2 :: -1, before, row][:max_q]
        best = np.maximum(first_part, _compute_last(self, j, before)[:max_q])
        k, q = np.argwhere((best == value).T)[0]
        return int(before[k]), int(q) + 1


def solve(states: CutStates, levels: tuple[Level, ...], *, straight: bool = False) -> list[LevelTable]:
    """Returns the tables of all levels, innermost first; the outermost has only the row i = 0. Raises PlanError."""
    count = len(states)
    before_s = np.concatenate([[0.0], states.compute_s[:-1]])
    cost = states.compute_s[None, :] - before_s[:, None]
    tables: list[LevelTable] = []
    inner_width = 1
    for number, level in enumerate(levels):
        starts = np.argsort(before_s, kind="stable") if number < len(levels) - 1 else np.array([0])
        if count * level.width * max(len(starts), level.width) > _MAX_ENTRIES:
            raise PlanError(
                f"the classic planner was asked for {level.width} components at level {number + 1} and a graph of "
                f"{count} states; its tables would not fit the memory; give fewer, or use pipedream.plan"
            )
        table = np.full((level.width, count, len(starts)), np.inf)
        tables.append(LevelTable(states, level, inner_width, cost, starts, table, straight))
        _fill_table(tables[-1])
        cost = table[-1][:, tables[-1].rows].T
        inner_width = level.width
    return tables


def alone_s(cost_s: Seconds, weight_bytes: Seconds, m: int | IntArray, level: Level, inner_width: int) -> Seconds:
    """Returns alone(i, j, m), given C_ij, w_ij, m and W, as numbers or arrays."""
    sync_s = (4 * (m - 1) * weight_bytes) / (level.bandwidth_bytes_per_s * m) / inner_width
    return (cost_s + sync_s) / m


def _compute_alone(level_table: LevelTable, j: int) -> FloatArray:
    """Returns alone(i, j, m) as [m - 1, row of i] for all i; meaningless where j < i."""
    m = np.arange(1, level_table.level.width + 1)[:, None]
    weight_bytes = (
        level_table.states.parameter_bytes[j]
        - np.concatenate([[0.0], level_table.states.parameter_bytes[:-1]])[level_table.starts]
    )
    seconds = np.asarray(
        alone_s(level_table.cost[level_table.starts, j], weight_bytes, m, level_table.level, level_table.inner_width)
    )
    return np.where(m == 1, seconds, np.inf) if level_table.straight else seconds


def _compute_last(level_table: LevelTable, j: int, before: IntArray) -> FloatArray:
    """Returns last(k, j, q) as [q - 1, position of k in `before`] for all q less than the width."""
    states, rate = level_table.states, level_table.level.bandwidth_bytes_per_s
    q = np.arange(1, level_table.level.width)[:, None]
    weight_bytes = states.parameter_bytes[j] - states.parameter_bytes[before]
    seconds: FloatArray = (level_table.cost[before + 1, j] + (4 * (q - 1) * weight_bytes) / (rate * q)) / q
    seconds = np.maximum(seconds, 2.0 * states.output_bytes[before] / (rate * q))
    if j < len(states) - 1:
        seconds = np.maximum(seconds, 2.0 * states.output_bytes[j] / (rate * q))
    return seconds


def _divide_blocks(level_table: LevelTable) -> list[slice]:
    """Returns blocks of rows; one ends early where the compute before its starts changes, for good bounds."""
    cost = level_table.cost[level_table.starts, -1]
    blocks, begin, rows = [], 0, len(cost)
    for row in range(1, rows + 1):
        size = row - begin
        if row == rows or size == _BLOCK or (size >= _MIN_BLOCK and cost[row] != cost[row - 1]):
            blocks.append(slice(begin, row))
            begin = row
    return blocks


def _fill_table(level_table: LevelTable) -> None:
    table, width = level_table.table, level_table.level.width
    _, count, rows = table.shape
    flat = table.reshape(width * count, rows)
    blocks = _divide_blocks(level_table)
    first_starts = [int(level_table.starts[block].min()) for block in blocks]
    block_minima = np.full((len(blocks), width * count), np.inf)
    pairs = [(m, q) for m in range(2, width + 1) for q in range(1, 2 if level_table.straight else m)]
    m_index = np.array([m - 1 for m, _ in pairs], dtype=np.intp)
    q_index = np.array([q - 1 for _, q in pairs], dtype=np.intp)
    rest_row = (m_index - q_index - 1) * count
    for j in range(count):
        before = level_table.states.before[j]
        seconds = np.where(level_table.starts <= j, _compute_alone(level_table, j), np.inf)
        if width > 1 and len(before):
            split = level_table.starts <= before[-1]
            best = np.where(split, seconds, -np.inf)  # rows that cannot be split decide nothing
            last_s = _compute_last(level_table, j, before)
            pair, place = np.nonzero(last_s[q_index] < best.max(axis=1)[m_index][:, None])
            groups = np.searchsorted(m_index[pair], np.arange(1, width + 1))
            choices = _Choices(m_index[pair], rest_row[pair] + before[place], last_s[q_index[pair], place], groups)
            for b, block in enumerate(blocks):
                if first_starts[b] <= before[-1]:
                    choices.lower(best[:, block], flat[:, block], block_minima[b])
            seconds = np.where(split, best, seconds)
        table[:, j] = seconds
        for b, block in enumerate(blocks):
            if first_starts[b] <= j:
                block_minima[b, j::count] = seconds[:, block].min(axis=1)


@dataclass(frozen=True, eq=False)
class _Choices:
    """The pairs (k, q) of one j that are worth evaluating, by increasing m.

    Attributes:
        m_index: m - 1.
        row: row of A(., k, m-q) in the flat table.
        seconds: last(k, j, q).
        groups: where each m begins, from m = 2 on, and the end.
    """

    m_index: IntArray
    row: IntArray
    seconds: FloatArray
    groups: IntArray

    def lower(self, best: FloatArray, flat: FloatArray, least: FloatArray) -> None:
        """Lowers best[m - 1, i] to A(i, j, m) for a block of starts i, whose least A is `least`."""
        low = np.maximum(least[self.row], self.seconds)
        first = [a + int(low[a:b].argmin()) for a, b in pairwise(self.groups) if a < b]
        # The most promising pair of each m comes first, because it rules out most of the others.
        rows = np.maximum(flat[self.row[first]], self.seconds[first, None])
        best[self.m_index[first]] = np.minimum(best[self.m_index[first]], rows)
        chosen = np.flatnonzero(low < best.max(axis=1)[self.m_index])
        for begin in range(0, len(chosen), _CHUNK):
            part = chosen[begin : begin + _CHUNK]
            rows = flat[self.row[part]]
            np.maximum(rows, self.seconds[part, None], out=rows)
            borders = np.searchsorted(part, self.groups)
            used = np.flatnonzero(borders[1:] > borders[:-1])
            lowest = np.minimum.reduceat(rows, borders[used], axis=0)
            best[used + 1] = np.minimum(best[used + 1], lowest)


@dataclass(frozen=True)
class Classic:
    """An answer of the original planner.

    Attributes:
        plan: the stages of all levels, flattened; its own properties (`Plan.slowest_stage_s`) are predicted by this
            library's cost model.
        slowest_stage_s: seconds per minibatch by the classic cost model.
        one_worker_s, data_parallel_s: seconds per minibatch of one worker, and of one stage on all workers.
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
) -> Classic:
    """Finds the original planner's answer.

    Args:
        graph: a graph.txt, or a profile; the classic model ignores its loss and update.
        cluster: only its levels and bandwidths count.
        straight: one worker for each stage, as many stages as workers (the original's ``--straight_pipeline``).

    Raises:
        PlanError: a memory limit, which the classic model cannot keep, machines of unequal sizes, too many workers or
            states, a profile of no seconds, or too few cuts for a straight pipeline.
    """
    if cluster.is_limited:
        raise PlanError(
            "the classic planner was asked for with a memory limit, which the published one does not keep; leave the "
            "limit out, or use pipedream.plan"
        )
    if any(level.sizes for level in cluster.levels):
        raise PlanError(
            "the classic planner was asked for machines of unequal sizes, which the published one does not support; "
            "give one width for each level, or use pipedream.plan"
        )
    text = GraphText.of(graph) if isinstance(graph, Profile) else graph
    states = CutStates.of(text)
    tables = solve(states, cluster.levels, straight=straight)
    end = len(states) - 1
    seconds = tables[-1].seconds(0, end, cluster.levels[-1].width)
    if seconds == np.inf:
        raise PlanError(
            f"the classic planner was asked for a straight pipeline of {cluster.workers} stages, but this graph "
            "cannot be cut into as many; use fewer workers, or leave it out"
        )
    stages = _flatten(tables, 0, end, 1)
    if seconds <= 0:
        raise PlanError(
            "the classic planner was asked for a graph whose layers take no time; give a profile with measured seconds"
        )
    note = f"classic cost model: {format_seconds(seconds)} per minibatch{_describe_nests(stages)}"
    if any(states.done[a.last] & ~states.done[b.last] for a, b in pairwise(stages)):
        note += "; it leaves a branch and later returns to it, so these seconds are of no plan"
    if cluster.latency_s:
        note += "; latency does not count"
    plan = _build_plan(graph, text, cluster, states, stages)
    work_s, weight_bytes = float(states.compute_s[-1]), float(states.parameter_bytes[-1])
    return Classic(replace(plan, note=note), seconds, work_s, _compute_data_parallel_s(work_s, weight_bytes, cluster))


@dataclass(frozen=True)
class _ClassicStage:
    """A run of states. `nest` is (first state, copies) if it belongs to a pipeline that is replicated as a whole."""

    first: int
    last: int
    replicas: int
    nest: tuple[int, int] | None = None


def _flatten(tables: list[LevelTable], i: int, j: int, outer: int) -> list[_ClassicStage]:
    """Returns the stages of states i to j on all components of the outermost level, with `outer` copies of each."""
    stages: list[_ClassicStage] = []
    *inner, table = tables
    for first, last, components in table.stages(i, j):
        copies = outer * components
        inner_stages = _flatten(inner, first, last, copies) if inner else [_ClassicStage(first, last, copies)]
        if components > 1 and len(inner_stages) > 1:
            inner_stages = [replace(stage, nest=(first, components)) for stage in inner_stages]
        stages += inner_stages
    return stages


def _describe_nests(stages: list[_ClassicStage]) -> str:
    """Lists the copies of whole pipelines, which a list of stages cannot show."""
    nests: dict[tuple[int, int], list[int]] = {}
    for s, stage in enumerate(stages):
        if stage.nest is not None:
            nests.setdefault(stage.nest, []).append(s)
    return "".join(
        f"; stages {members[0]} to {members[-1]} are {copies} pipelines side by side, written as replicas"
        for (_, copies), members in nests.items()
    )


def _build_plan(
    graph: GraphText | Profile,
    text: GraphText,
    cluster: Cluster,
    states: CutStates,
    stages: list[_ClassicStage],
) -> Plan:
    """Returns the plan; its nodes are ordered by stage, in an order in which they can run."""
    owners = _assign_owners(text, [states.done[stage.last] for stage in stages])
    order = in_order(len(owners), text.edges, key=lambda i: owners[i])
    positions = {node: position for position, node in enumerate(order)}
    if isinstance(graph, Profile) and order == list(range(len(order))):
        profile = graph
    else:
        edges = tuple((positions[source], positions[target]) for source, target in text.edges)
        profile = GraphText(tuple(text.nodes[i] for i in order), edges).profile()
    numbers = dict(zip((node.name for node in text.nodes), owners, strict=True))
    counts = Counter(numbers[layer.name] for layer in profile.graph.layers)
    stages = [stage for s, stage in enumerate(stages) if counts[s]]  # not those whose nodes have all run before
    cuts = tuple(accumulate(counts[s] for s in sorted(counts)))[:-1]
    space = SearchSpace.of(profile, cluster, downsets=())
    crossing = np.array(space.crossing)
    for cut, stage in zip(cuts, stages, strict=False):
        crossing[cut] = round(states.output_bytes[stage.last])
    space = replace(space, crossing=crossing)
    return apply_depth(space, space.build_plan(cuts, tuple(stage.replicas for stage in stages)), "noam")


def _assign_owners(text: GraphText, done: list[int]) -> list[int]:
    """Returns the stage of each node; one that no state contains joins the last stage that it reads from."""
    owners = [0] * len(text.nodes)
    producers: list[list[int]] = [[] for _ in text.nodes]
    for source, target in text.edges:
        producers[target].append(source)
    for i in in_order(len(text.nodes), text.edges):
        stage = next((s for s, ran in enumerate(done) if ran >> i & 1), None)
        owners[i] = max((owners[p] for p in producers[i]), default=0) if stage is None else stage
    return owners


def _compute_data_parallel_s(seconds: float, weight_bytes: float, cluster: Cluster) -> float:
    inner_width = 1
    for level in cluster.levels:
        seconds = float(alone_s(seconds, weight_bytes, level.width, level, inner_width))
        inner_width = level.width
    return seconds

"""The original planner's recurrence, level by level of the network, exact and vectorised.

github msr-fiddle/pipedream, ``optimizer_graph_hierarchical.py``, with ``--activation_compression_ratio 1``. With
C_ij the seconds of states i to j on one component, w_ij their parameter bytes, o_k the bytes that cross state k, B the
bandwidth, W the width of the level below (1 at the innermost), and A the seconds of the slowest stage on m components:

    alone(i, j, m) = (C_ij + 4 (m-1) w_ij / (B m) / W) / m
    last(k, j, q)  = max((C_(k+1)j + 4 (q-1) w_(k+1)j / (B q)) / q, 2 o_k / (B q), and, unless j is the last state,
                         2 o_j / (B q))
    A(i, j, m)     = min(alone(i, j, m), min over k before j, k >= i, and q < m of max(A(i, k, m-q), last(k, j, q)))

C of the next level is A(i, j, all m). As published: compute and synchronisation are added where the paper takes the
maximum; W is that of one level below, not the product, and only applies to a stage that is alone; all m components are
used. If state i - 1 does not come before j, C_ij is a difference of unrelated sums (it may be negative).

A straight pipeline has no replicas (``--straight_pipeline``): alone is infinite for m > 1, and q is 1.

Ties: a stage that is alone, then the smallest k in the order of the states, then the smallest q.

For a block of starts i, a pair (k, q) is evaluated only if max(least A of the block, last) is below the worst value
that the block has so far: nothing that could lower the minimum is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Level
from pipedream.planner.arrays import FloatArray, IntArray, Seconds
from pipedream.planner.papers.classic_states import CutStates

_BLOCK = 96
_LEAST_BLOCK = 24
_MOST_ENTRIES = 1 << 27  # of a table, 8 bytes each: a gigabyte
_AT_ONCE = 1 << 15  # rows of a block that are gathered at a time


@dataclass(frozen=True, eq=False)
class LevelTable:
    """A(i, j, m) of one level.

    Attributes:
        below: width of the level below, 1 at the innermost.
        cost: C as cost[i, j].
        starts: the i of each row, sorted by the compute before it, so that neighbours have similar A.
        table: A as table[m - 1, j, row of i]; infinite where j < i, or if no pipeline has that many stages.
    """

    states: CutStates
    level: Level
    below: int
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
        most = 1 if self.straight else m - 1  # of the last stage
        reached = self.table[m - 2 :: -1, before, row][:most]
        best = np.maximum(reached, _compute_last(self, j, before)[:most])
        k, q = np.argwhere((best == value).T)[0]
        return int(before[k]), int(q) + 1


def solve(states: CutStates, levels: tuple[Level, ...], *, straight: bool = False) -> list[LevelTable]:
    """Returns the tables of all levels, innermost first; the outermost has only the row i = 0. Raises PlanError."""
    count = len(states)
    ahead = np.concatenate([[0.0], states.compute_s[:-1]])
    cost = states.compute_s[None, :] - ahead[:, None]
    tables: list[LevelTable] = []
    below = 1
    for number, level in enumerate(levels):
        starts = np.argsort(ahead, kind="stable") if number < len(levels) - 1 else np.array([0])
        if count * level.width * max(len(starts), level.width) > _MOST_ENTRIES:
            raise PlanError(
                f"the classic cost model was asked for {level.width} components at level {number + 1} and a graph of "
                f"{count} states; its tables would not fit the memory; give fewer, or plan with --cost-model pipedream"
            )
        table = np.full((level.width, count, len(starts)), np.inf)
        tables.append(LevelTable(states, level, below, cost, starts, table, straight))
        _fill(tables[-1])
        cost = table[-1][:, tables[-1].rows].T
        below = level.width
    return tables


def alone_s(cost_s: Seconds, held_bytes: Seconds, components: int | IntArray, level: Level, below: int) -> Seconds:
    """Returns alone(i, j, m), given C_ij, w_ij, m and `below` = W; numbers or arrays."""
    sync = (4 * (components - 1) * held_bytes) / (level.bandwidth_bytes_per_s * components) / below
    return (cost_s + sync) / components


def _compute_alone(level_table: LevelTable, j: int) -> FloatArray:
    """alone(i, j, m) as [m - 1, row of i], for all i; meaningless where j < i."""
    m = np.arange(1, level_table.level.width + 1)[:, None]
    weight_bytes = (
        level_table.states.parameter_bytes[j]
        - np.concatenate([[0.0], level_table.states.parameter_bytes[:-1]])[level_table.starts]
    )
    seconds = np.asarray(
        alone_s(level_table.cost[level_table.starts, j], weight_bytes, m, level_table.level, level_table.below)
    )
    return np.where(m == 1, seconds, np.inf) if level_table.straight else seconds


def _compute_last(level_table: LevelTable, j: int, before: IntArray) -> FloatArray:
    """last(k, j, q) as [q - 1, position of k in `before`], for all q below the width."""
    states, rate = level_table.states, level_table.level.bandwidth_bytes_per_s
    q = np.arange(1, level_table.level.width)[:, None]
    weight_bytes = states.parameter_bytes[j] - states.parameter_bytes[before]
    seconds: FloatArray = (level_table.cost[before + 1, j] + (4 * (q - 1) * weight_bytes) / (rate * q)) / q
    seconds = np.maximum(seconds, 2.0 * states.output_bytes[before] / (rate * q))
    if j < len(states) - 1:
        seconds = np.maximum(seconds, 2.0 * states.output_bytes[j] / (rate * q))
    return seconds


def _divide_blocks(level_table: LevelTable) -> list[slice]:
    """A block ends early where the compute before its starts changes: uniform blocks have good bounds."""
    first = level_table.cost[level_table.starts, -1]
    blocks, begin, rows = [], 0, len(first)
    for row in range(1, rows + 1):
        size = row - begin
        if row == rows or size == _BLOCK or (size >= _LEAST_BLOCK and first[row] != first[row - 1]):
            blocks.append(slice(begin, row))
            begin = row
    return blocks


def _fill(level_table: LevelTable) -> None:
    table, width = level_table.table, level_table.level.width
    _, count, rows = table.shape
    flat = table.reshape(width * count, rows)
    blocks = _divide_blocks(level_table)
    earliest = [int(level_table.starts[block].min()) for block in blocks]
    least = np.full((len(blocks), width * count), np.inf)
    pairs = [(m, q) for m in range(2, width + 1) for q in range(1, 2 if level_table.straight else m)]
    wide = np.array([m - 1 for m, _ in pairs], dtype=np.intp)
    last = np.array([q - 1 for _, q in pairs], dtype=np.intp)
    rest = (wide - last - 1) * count
    for j in range(count):
        before = level_table.states.before[j]
        alone = np.where(level_table.starts <= j, _compute_alone(level_table, j), np.inf)
        if width > 1 and len(before):
            split = level_table.starts <= before[-1]
            best = np.where(split, alone, -np.inf)  # rows that cannot be split do not decide what to evaluate
            seconds = _compute_last(level_table, j, before)
            pair, place = np.nonzero(seconds[last] < best.max(axis=1)[wide][:, None])
            groups = np.searchsorted(wide[pair], np.arange(1, width + 1))
            choices = _Choices(wide[pair], rest[pair] + before[place], seconds[last[pair], place], groups)
            for b, block in enumerate(blocks):
                if earliest[b] <= before[-1]:
                    choices.lower(best[:, block], flat[:, block], least[b])
            alone = np.where(split, best, alone)
        table[:, j] = alone
        for b, block in enumerate(blocks):
            if earliest[b] <= j:
                least[b, j::count] = alone[:, block].min(axis=1)


@dataclass(frozen=True, eq=False)
class _Choices:
    """The pairs (k, q) of one j that are worth evaluating, by increasing m.

    Attributes:
        wide: m - 1.
        reached: row of A(., k, m-q) in the flat table.
        seconds: last(k, j, q).
        groups: where each m begins, from m = 2 on, and the end.
    """

    wide: IntArray
    reached: IntArray
    seconds: FloatArray
    groups: IntArray

    def lower(self, best: FloatArray, flat: FloatArray, least: FloatArray) -> None:
        """Lowers best[m - 1, i] to A(i, j, m) for a block of starts i, whose least A is `least`."""
        low = np.maximum(least[self.reached], self.seconds)
        first = [a + int(low[a:b].argmin()) for a, b in pairwise(self.groups) if a < b]
        # The most promising pair of each m comes first, because it rules out most of the others.
        rows = np.maximum(flat[self.reached[first]], self.seconds[first, None])
        best[self.wide[first]] = np.minimum(best[self.wide[first]], rows)
        chosen = np.flatnonzero(low < best.max(axis=1)[self.wide])
        for begin in range(0, len(chosen), _AT_ONCE):
            part = chosen[begin : begin + _AT_ONCE]
            rows = flat[self.reached[part]]
            np.maximum(rows, self.seconds[part, None], out=rows)
            borders = np.searchsorted(part, self.groups)
            used = np.flatnonzero(borders[1:] > borders[:-1])
            lowest = np.minimum.reduceat(rows, borders[used], axis=0)
            best[used + 1] = np.minimum(best[used + 1], lowest)

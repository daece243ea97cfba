"""The states of the original planner: cuts of a graph, each named by the nodes whose outputs cross it.

github msr-fiddle/pipedream, ``graph/graph.py`` (``antichain_dag``) and ``optimizer_graph_hierarchical.py``. A state is
an antichain: nodes none of which comes before another; they and all nodes before them have run. The next states
replace one of its nodes by a consumer of it. *Augmented*, a state includes the nodes before it whose output is needed.

The defects are kept as published. Loaders and unread ``__getitem__`` are left out, in one pass each. The walk begins
only at the first source, so nodes on no path from it count for nothing. A producer counts as crossing if a consumer is
not before *each* node of the state that the producer comes before, even if that consumer is in the state itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from paper_tables.graph_txt import GraphText

from pipedream.core.errors import PlanError
from pipedream.core.model.graph import in_order
from pipedream.planner.arrays import BoolArray, FloatArray, IntArray
from pipedream.planner.cuts import bit_indices, bool_rows

MAX_STATES = 4000
"""Graphs with more are refused: the search takes memory with the square of their number, and time with the cube."""


@dataclass(frozen=True, eq=False)
class CutStates:
    """The cuts of a graph, with sums over the nodes that have run.

    Attributes:
        done: for each state the nodes that have run, as a bit set.
        before: for each state the indices of the states before it, increasing.
        output_bytes: sums over the augmented state.
    """

    graph: GraphText
    done: tuple[int, ...]
    before: tuple[IntArray, ...]
    compute_s: FloatArray
    parameter_bytes: FloatArray
    output_bytes: FloatArray

    @classmethod
    def of(cls, graph: GraphText) -> CutStates:
        """Raises PlanError for a graph of inputs only, or one with more than `MAX_STATES` states."""
        cuts = _Cuts(*_reduce(graph))
        order, followers = cuts.order_states()
        before: list[int] = [0] * len(order)
        for i in range(len(order)):
            for j in followers[i]:
                before[j] |= before[i] | 1 << i
        seconds = np.array([node.compute_s for node in graph.nodes])
        parameters = np.array([node.parameter_bytes for node in graph.nodes])
        outputs = np.array([node.output_bytes for node in graph.nodes])
        done = tuple(cuts.done(state) for state in order)
        ran = bool_rows(done, len(graph.nodes))
        return cls(
            graph,
            done,
            tuple(np.flatnonzero(row) for row in bool_rows(before, len(order))),
            _sum_rows(ran, seconds),
            _sum_rows(ran, parameters),
            _sum_rows(bool_rows([cuts.augment(state) for state in order], len(graph.nodes)), outputs),
        )

    def __len__(self) -> int:
        return len(self.done)


class _Cuts:
    """The antichains of a graph. States are tuples, because the order of their nodes decides that of the states."""

    def __init__(self, nodes: list[int], edges: list[tuple[int, int]]) -> None:
        self._nodes = nodes
        self._consumers: dict[int, list[int]] = {node: [] for node in nodes}
        self._past = dict.fromkeys(nodes, 0)
        self._future = dict.fromkeys(nodes, 0)
        for source, target in edges:
            self._consumers[source].append(target)
        node_set = set(nodes)
        self._order = [node for node in in_order(max(nodes) + 1, edges) if node in node_set]
        for node in self._order:
            for target in self._consumers[node]:
                self._past[target] |= self._past[node] | 1 << node
        for node in reversed(self._order):
            for target in self._consumers[node]:
                self._future[node] |= self._future[target] | 1 << target

    @cached_property
    def _needed(self) -> dict[int, int]:
        """For each node, the nodes before it whose output is needed outside of its past."""
        reads = {node: sum(1 << target for target in set(self._consumers[node])) for node in self._nodes}
        return {
            node: sum(1 << p for p in bit_indices(self._past[node]) if reads[p] & ~(self._past[node] | 1 << node))
            for node in self._nodes
        }

    def done(self, state: tuple[int, ...]) -> int:
        nodes = 0
        for node in state:
            nodes |= self._past[node] | 1 << node
        return nodes

    def augment(self, state: tuple[int, ...]) -> int:
        nodes = 0
        for node in state:
            nodes |= self._needed[node] | 1 << node
        return nodes

    def _iterate_next(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        members, augmented = sum(1 << node for node in state), self.augment(state)
        crossing = [*bit_indices(augmented & ~members), *state]
        for node in crossing:
            for target in self._consumers[node]:
                if members >> target & 1 or self._future[target] & augmented:
                    continue
                next_nodes = dict.fromkeys(target if other == node else other for other in crossing)
                next_set = sum(1 << other for other in next_nodes)
                yield tuple(other for other in next_nodes if not self._future[other] & next_set)

    def order_states(self) -> tuple[list[tuple[int, ...]], list[list[int]]]:
        """Returns all states, each before its followers, and the indices of the followers."""
        targets = {target for node in self._nodes for target in self._consumers[node]}
        first: tuple[int, ...] = (next(node for node in self._nodes if node not in targets),)
        indices = {_encode(first): 0}
        states, followers = [first], []
        queue = deque([first])
        while queue:
            next_indices = []
            for state in self._iterate_next(queue.popleft()):
                key = _encode(state)
                if key not in indices:
                    if len(states) == MAX_STATES:
                        raise PlanError(
                            f"the classic planner was asked for: the {len(self._nodes)} nodes of this graph can be cut "
                            f"in more than {MAX_STATES} ways, because it has parallel branches; use pipedream.plan, or "
                            "merge the nodes of each branch"
                        )
                    indices[key] = len(states)
                    states.append(state)
                    queue.append(state)
                next_indices.append(indices[key])
            followers.append(list(dict.fromkeys(next_indices)))
        order = _order_depth_first(followers)
        positions = {index: position for position, index in enumerate(order)}
        return [states[i] for i in order], [[positions[j] for j in followers[i]] for i in order]


def _reduce(graph: GraphText) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the nodes and edges without loaders and unread outputs (one pass each)."""
    targets = {target for _, target in graph.edges}
    nodes = [i for i, node in enumerate(graph.nodes) if i in targets or not node.is_input]
    edges = [edge for edge in graph.edges if edge[0] in set(nodes)]
    sources = {source for source, _ in edges}
    nodes = [i for i in nodes if i in sources or not graph.nodes[i].kind.startswith("__getitem__")]
    if not nodes:
        raise PlanError("the graph has no layer besides its inputs; give the profile of a model")
    node_set = set(nodes)
    return nodes, [edge for edge in edges if edge[1] in node_set]


def _order_depth_first(followers: list[list[int]]) -> list[int]:
    """Returns the states in the reverse of the order in which a depth-first walk leaves them, as in the original."""
    finished: list[int] = []
    visited = {0}
    stack = [(0, iter(followers[0]))]
    while stack:
        state, unvisited = stack[-1]
        follower = next((other for other in unvisited if other not in visited), None)
        if follower is None:
            finished.append(state)
            stack.pop()
        else:
            visited.add(follower)
            stack.append((follower, iter(followers[follower])))
    return finished[::-1]


def _encode(state: tuple[int, ...]) -> int:
    return sum(1 << node for node in state)


def _sum_rows(rows: BoolArray, values: FloatArray) -> FloatArray:
    """Returns the sum over each row, in the order of the file."""
    return np.array([sum(values[row].tolist()) for row in rows])

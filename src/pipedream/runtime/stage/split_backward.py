"""A backward in two halves: the gradients of the received tensors (I), and later those of the weights (W).

The *path* is the nodes of autograd's graph that lead from the outputs back to the received tensors. I requests from
each of them only the gradients that stay on it, so that a linear layer computes one of its two products, and keeps the
incoming gradients where others leave. There W calls the node once more, for the gradients that leave, and propagates
them in a run of autograd that starts after the node. Together the halves do the work of one backward and give its
numbers.

Nodes that cannot be called twice run in I, and their gradients are kept for W:

- functions written in Python (e.g. compiled modules): autograd does not pass them which gradients are needed, and they
  may write into what they saved;
- nodes whose saved tensors are recomputed when they are accessed (checkpointing, offloading);
- kernels that compute all their gradients at once (`_WHOLE`);
- nodes between a weight and several nodes of the path, such as a norm of the weight that is computed once.

What W does not need is freed after I; W frees the rest node by node.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipedream.runtime.stage.offload import unpack

_WHOLE = frozenset({"CudnnRnnBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"})

_Gradients = tuple[torch.Tensor | None, ...]  # one for each output of a node


class _Branch:
    """A node of the path where gradients leave it, to the nodes `off` and the weights `leaves`."""

    def __init__(self, node: Node, leaves: Sequence[torch.Tensor], off: set[Node]) -> None:
        self.node = node
        self.leaves = list(leaves)
        # Index among the results, the node off the path that gets it, and which of its outputs.
        self._ways = [
            (i, to, number) for i, (to, number) in enumerate(node.next_functions) if to is not None and to in off
        ]

    def run(self, arrived: _Gradients) -> None:
        """Adds the gradients that leave here to the weights' ``.grad``.

        The node is called inside a run of autograd, by hooks, so that it computes only what is needed.
        """
        results: list[Any] = []
        nothing: dict[tuple[Node, int], torch.Tensor] = {}

        def feed(off: Node, gradients: _Gradients) -> _Gradients:
            if not results:
                returned = self.node(*arrived)  # type: ignore[operator]
                results.extend(returned if isinstance(returned, tuple) else (returned,))
            fed = list(gradients)
            for place, to, number in self._ways:
                if to is off:
                    new, results[place] = _fit(results[place], to, number), None
                    fed[number] = _sum(None if fed[number] is nothing[to, number] else fed[number], new)
            return tuple(fed)

        for _, to, number in self._ways:
            nothing[to, number] = _make_zero(to, number)
        hooks = [off.register_prehook(partial(feed, off)) for off in {to: None for _, to, _ in self._ways}]
        try:
            edges = [GradientEdge(to, number) for to, number in nothing]
            torch.autograd.backward(edges, list(nothing.values()), inputs=self.leaves)
        finally:
            for hook in hooks:
                hook.remove()
        _let_go(self.node)


class Deferred:
    """The gradients of weights that I has left for W.

    Args:
        computed: (weight, gradient) that I has computed.
        apart: outputs that do not lead to the path, their gradients, and the weights that they reach.
        arrived: branch -> incoming gradients of its node, in the order of their arrival.
    """

    def __init__(
        self,
        computed: list[tuple[torch.Tensor, torch.Tensor]],
        apart: tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]],
        branches: list[_Branch],
        arrived: dict[int, _Gradients],
    ) -> None:
        self._computed = computed
        self._apart = apart
        self._branches = branches
        self._arrived = arrived

    def run(self) -> Iterator[torch.Tensor]:
        """Adds the gradients to the weights' ``.grad``; yields each complete weight. Runs once."""
        edges, gradients, leaves = self._apart
        left = Counter(leaves)
        for number in self._arrived:
            left.update(self._branches[number].leaves)
        if self._computed:
            torch.autograd.backward([leaf for leaf, _ in self._computed], [gradient for _, gradient in self._computed])
            yield from (leaf for leaf, _ in self._computed)
            self._computed.clear()
        if leaves:
            torch.autograd.backward(edges, gradients, inputs=leaves)
            yield from _count_down(leaves, left)
        self._apart = ([], [], [])
        for number in list(self._arrived):
            branch = self._branches[number]
            branch.run(self._arrived.pop(number))
            yield from _count_down(branch.leaves, left)
        self._branches = []


def split_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], entries: Sequence[GradientEdge]
) -> tuple[list[torch.Tensor | None], Deferred]:
    """Returns the gradients of the received tensors, and the work left for those of the weights.

    Args:
        entries: where the received tensors entered the graph.
    """
    roots = [get_gradient_edge(output) for output in outputs]
    graph = _Graph([edge.node for edge in roots], [edge.node for edge in entries])
    early, branches, apart = graph.shared_out()
    arrived: dict[int, _Gradients] = {}
    hooks = [branch.node.register_prehook(partial(_note, arrived, i)) for i, branch in enumerate(branches)]
    back: list[torch.Tensor | None] = [None] * len(entries)
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []
    inputs: list[Any] = [*entries, *early]
    if inputs:
        goes_on = bool(branches or apart)
        results = torch.autograd.grad(outputs, inputs, gradients, retain_graph=goes_on, allow_unused=True)
        back = list(results[: len(entries)])
        computed = [(leaf, g) for leaf, g in zip(early, results[len(entries) :], strict=True) if g is not None]
    for hook in hooks:
        hook.remove()
    for node in graph.path.difference(branch.node for branch in branches):
        _let_go(node)
    others = [(edge, g) for edge, g in zip(roots, gradients, strict=True) if edge.node not in graph.reached]
    return back, Deferred(computed, ([edge for edge, _ in others], [g for _, g in others], apart), branches, arrived)


class _Graph:
    """The nodes that a backward would run through.

    Attributes:
        path: nodes from which an entry is reached.
        reached: these and the entries.
    """

    def __init__(self, roots: Sequence[Node], entries: Sequence[Node]) -> None:
        ends = set(entries)
        self._roots = set(roots)
        self._parents: dict[Node, list[Node]] = {root: [] for root in roots}
        self._leaves: list[Any] = []
        waiting = list(self._parents)
        while waiting:
            node = waiting.pop()
            if node in ends:
                continue
            if hasattr(node, "variable"):
                self._leaves.append(node)
            for child, _ in node.next_functions:
                if child is None:
                    continue
                if child not in self._parents:
                    self._parents[child] = []
                    waiting.append(child)
                self._parents[child].append(node)
        self.reached = self._find_above([node for node in ends if node in self._parents])
        self.path = self.reached - ends

    def shared_out(self) -> tuple[list[torch.Tensor], list[_Branch], list[torch.Tensor]]:
        """Returns the weights whose gradients I computes, the path's branches, and the weights apart from it.

        A node off the path runs once, with all the weights that it reaches.
        """
        weights_of: dict[Node, list[Any]] = defaultdict(list)  # nodes off the path -> weights that they reach
        readers: dict[
            Node, set[Node | None]
        ] = {}  # nodes off the path -> nodes of the path before them; None: an output
        ways = {leaf: self._find_above([leaf], self.path) for leaf in self._leaves}
        for leaf, nodes in ways.items():
            for node in nodes:
                weights_of[node].append(leaf)
        for node in weights_of:
            above = self._find_above([node], self.path)
            readers[node] = {parent for other in above for parent in self._parents[other] if parent in self.path}
            readers[node] |= {None} if above & self._roots else set()
        waiting = [leaf for leaf in self._leaves if any(map(_must_run_once, readers[leaf]))]
        for node, leaves in weights_of.items():
            if node not in ways and len(readers[node]) > 1:
                waiting += leaves
        early: dict[Any, None] = {}
        while waiting:
            leaf = waiting.pop()
            if leaf not in early:
                early[leaf] = None
                waiting += (other for node in ways[leaf] for other in weights_of[node])
        off = {node for node, leaves in weights_of.items() if leaves[0] not in early}
        late: dict[Node | None, list[torch.Tensor]] = defaultdict(list)
        for leaf in self._leaves:
            if leaf not in early:
                for reader in readers[leaf]:
                    late[reader].append(leaf.variable)
        apart = late.pop(None, [])
        return [leaf.variable for leaf in early], [_Branch(n, leaves, off) for n, leaves in late.items() if n], apart

    def _find_above(self, nodes: Sequence[Node], stop: Set[Node] = frozenset()) -> set[Node]:
        above = set(nodes)
        waiting = list(nodes)
        while waiting:
            for parent in self._parents[waiting.pop()]:
                if parent not in above and parent not in stop:
                    above.add(parent)
                    waiting.append(parent)
        return above


def _note(arrived: dict[int, _Gradients], number: int, gradients: _Gradients) -> None:
    arrived[number] = gradients


def _count_down(leaves: Sequence[torch.Tensor], left: Counter[torch.Tensor]) -> Iterator[torch.Tensor]:
    for leaf in leaves:
        left[leaf] -= 1
        if not left[leaf]:
            yield leaf


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _fit(gradient: torch.Tensor | None, node: Node, number: int) -> torch.Tensor | None:
    """Gives a gradient the shape and dtype of a node's output, as autograd does: summed if broadcast."""
    like = node._input_metadata[number]
    if gradient is None:
        return None
    return (gradient if gradient.shape == like.shape else gradient.sum_to_size(like.shape)).to(like.dtype)


def _make_zero(node: Node, number: int) -> torch.Tensor:
    like = node._input_metadata[number]
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _must_run_once(node: Node | None) -> bool:
    return node is not None and (
        isinstance(node, BackwardCFunction)
        or node.name() in _WHOLE
        or any(saved.unpack_hook not in (None, unpack) for saved in saved_by(node))
    )


def _let_go(node: Node) -> None:
    """Frees what a node has saved, by a hook that packs it into None."""
    for saved in saved_by(node):
        with suppress(RuntimeError):  # freed already, or not kept by the node
            if saved.unpack_hook is unpack:
                saved.data.free()
            else:
                saved.register_hooks(lambda _: None, _refuse_unpack)


def saved_by(node: Node) -> list[Any]:
    """Returns autograd's handles of the tensors that a node has saved."""
    handles: list[Any] = []
    for name in _list_saved_names(type(node)):
        with suppress(RuntimeError):  # they are freed
            saved = getattr(node, name)
            handles += saved if isinstance(saved, tuple | list) else [saved]
    return handles


@cache
def _list_saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _refuse_unpack(_: None) -> torch.Tensor:
    raise RuntimeError("a backward ran again through a graph that a split backward has freed")

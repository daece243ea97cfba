"""A backward in two halves: the gradients of the received tensors (I), and later those of the weights (W).

The *path* is the nodes of autograd's graph that lead from the outputs back to the received tensors. I requests from
each of them only the gradients that stay on the path, so that a linear layer computes one of its two products. Where
gradients leave the path, at a *branch*, I keeps the node's incoming gradients. W calls that node once more, for the
gradients that leave, and propagates them in a run of autograd that starts after the node. Together the halves do the
work of one backward and give its numbers.

Nodes that cannot be called twice run in I, and their gradients are kept for W:

- functions written in Python (e.g. compiled modules): autograd does not pass them which gradients are needed, and they
  may write into what they saved;
- nodes whose saved tensors are recomputed when they are accessed (checkpointing, offloading);
- kernels that compute all their gradients at once (`_UNSPLIT_NODES`);
- nodes between a weight and several nodes of the path, such as a norm of the weight that is computed once.

What W does not need is freed after I; W frees the rest node by node.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipedream.runtime.stage.graph_tensors import list_saved_tensors, unpack
from pipedream.runtime.stage.stage_module import SavedForward, StageModule, select_with_gradients
from pipedream.tensors.auxiliary_loss import auxiliary_loss_scale

_UNSPLIT_NODES = frozenset({"CudnnRnnBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"})

_Gradients = tuple[torch.Tensor | None, ...]  # one for each output of a node


def backward_inputs(
    module: StageModule, saved: SavedForward, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Returns the gradients of the received tensors only; frees what `backward_weights` does not need."""
    outputs, output_gradients = select_with_gradients(saved, gradients)
    entries = [GradientEdge(node, 0) for node in saved.graph_inputs]
    with auxiliary_loss_scale(saved.auxiliary_scale), module.division.enter_pass("backward"):
        input_gradients, saved.deferred = split_backward(outputs, output_gradients, entries)
    saved.graph_inputs = ()
    saved.outputs = ()  # they would keep the part of the graph that the second half does not need
    return input_gradients


def backward_weights(
    module: StageModule,
    saved: SavedForward,
    accumulators: Sequence[torch.Tensor | None],
    ready: Callable[[int, torch.Tensor], None] | None = None,
) -> list[torch.Tensor | None]:
    """Returns the gradients of the weights, after `backward_inputs`; for the arguments see `StageModule.backward`.

    The leaves need not be watched.
    """
    assert saved.deferred is not None
    weights = saved.leaves
    leaves = module.begin_backward(weights, accumulators)
    try:
        numbers = {leaf: number for number, leaf in enumerate(leaves)}
        with auxiliary_loss_scale(saved.auxiliary_scale), module.division.enter_pass("weights' backward"):
            for leaf in saved.deferred.run():
                if ready is not None and leaf in numbers and leaf.grad is not None:
                    gradient, leaf.grad = leaf.grad, None
                    ready(numbers[leaf], gradient)
        saved.deferred = None
        return [leaf.grad for leaf in leaves]
    finally:
        module.end_backward(weights, leaves)


class _Branch:
    """A node of the path where gradients leave it, to the nodes `off` and the weights `leaves`."""

    def __init__(self, node: Node, leaves: Sequence[torch.Tensor], off_path: set[Node]) -> None:
        self.node = node
        self.leaves = list(leaves)
        # For each gradient that leaves: its index among the results, the node that gets it, and which output of it.
        self._exits = [
            (i, to, number) for i, (to, number) in enumerate(node.next_functions) if to is not None and to in off_path
        ]

    def run(self, incoming: _Gradients) -> None:
        """Adds the gradients that leave here to the weights' ``.grad``.

        The node is called inside a run of autograd, by hooks, so that it computes only what is needed.
        """
        results: list[Any] = []
        placeholders: dict[tuple[Node, int], torch.Tensor] = {}

        def add_leaving(target: Node, gradients: _Gradients) -> _Gradients:
            if not results:
                returned = self.node(*incoming)  # type: ignore[operator]
                results.extend(returned if isinstance(returned, tuple) else (returned,))
            sums = list(gradients)
            for index, to, number in self._exits:
                if to is target:
                    new, results[index] = _fit_to_output(results[index], to, number), None
                    sums[number] = _sum(None if sums[number] is placeholders[to, number] else sums[number], new)
            return tuple(sums)

        for _, to, number in self._exits:
            placeholders[to, number] = _make_zero(to, number)
        hooks = [
            target.register_prehook(partial(add_leaving, target)) for target in {to: None for _, to, _ in self._exits}
        ]
        try:
            edges = [GradientEdge(to, number) for to, number in placeholders]
            torch.autograd.backward(edges, list(placeholders.values()), inputs=self.leaves)
        finally:
            for hook in hooks:
                hook.remove()
        _free_saved(self.node)


@dataclass(eq=False)
class Deferred:
    """The gradients of weights that I has left for W.

    Attributes:
        computed: (weight, gradient) that I has computed.
        independent: outputs that depend on no received tensor, their gradients, and the weights that they reach.
        incoming: number of a branch -> incoming gradients of its node, in the order of their arrival.
    """

    computed: list[tuple[torch.Tensor, torch.Tensor]]
    independent: tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]]
    branches: list[_Branch]
    incoming: dict[int, _Gradients]

    def run(self) -> Iterator[torch.Tensor]:
        """Adds the gradients to the weights' ``.grad``; yields each complete weight. Runs once."""
        edges, gradients, leaves = self.independent
        remaining = Counter(leaves)
        for number in self.incoming:
            remaining.update(self.branches[number].leaves)
        if self.computed:
            torch.autograd.backward([leaf for leaf, _ in self.computed], [gradient for _, gradient in self.computed])
            yield from (leaf for leaf, _ in self.computed)
            self.computed.clear()
        if leaves:
            torch.autograd.backward(edges, gradients, inputs=leaves)
            yield from _count_down(leaves, remaining)
        self.independent = ([], [], [])
        for number in list(self.incoming):
            branch = self.branches[number]
            branch.run(self.incoming.pop(number))
            yield from _count_down(branch.leaves, remaining)
        self.branches = []


def split_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], entries: Sequence[GradientEdge]
) -> tuple[list[torch.Tensor | None], Deferred]:
    """Returns the gradients of the received tensors, and the deferred work for those of the weights.

    Args:
        entries: edges at which the received tensors entered the graph.
    """
    roots = [get_gradient_edge(output) for output in outputs]
    graph = _Graph([edge.node for edge in roots], [edge.node for edge in entries])
    early, branches, independent_leaves = graph.divide_weights()
    incoming: dict[int, _Gradients] = {}
    hooks = [branch.node.register_prehook(partial(incoming.__setitem__, i)) for i, branch in enumerate(branches)]
    input_gradients: list[torch.Tensor | None] = [None] * len(entries)
    computed: list[tuple[torch.Tensor, torch.Tensor]] = []
    inputs: list[Any] = [*entries, *early]
    if inputs:
        has_second_half = bool(branches or independent_leaves)
        results = torch.autograd.grad(outputs, inputs, gradients, retain_graph=has_second_half, allow_unused=True)
        input_gradients = list(results[: len(entries)])
        computed = [(leaf, g) for leaf, g in zip(early, results[len(entries) :], strict=True) if g is not None]
    for hook in hooks:
        hook.remove()
    for node in graph.path.difference(branch.node for branch in branches):
        _free_saved(node)
    others = [(edge, g) for edge, g in zip(roots, gradients, strict=True) if edge.node not in graph.reached]
    independent = [edge for edge, _ in others], [g for _, g in others], independent_leaves
    return input_gradients, Deferred(computed, independent, branches, incoming)


class _Graph:
    """The nodes that a backward would run through.

    Attributes:
        path: nodes that lead to an entry.
        reached: the path and its entries.
    """

    def __init__(self, roots: Sequence[Node], entries: Sequence[Node]) -> None:
        ends = set(entries)
        self._roots = set(roots)
        self._parents: dict[Node, list[Node]] = {root: [] for root in roots}
        self._leaves: list[Any] = []
        to_visit = list(self._parents)
        while to_visit:
            node = to_visit.pop()
            if node in ends:
                continue
            if hasattr(node, "variable"):
                self._leaves.append(node)
            for child, _ in node.next_functions:
                if child is None:
                    continue
                if child not in self._parents:
                    self._parents[child] = []
                    to_visit.append(child)
                self._parents[child].append(node)
        self.reached = self._find_ancestors([node for node in ends if node in self._parents])
        self.path = self.reached - ends

    def divide_weights(self) -> tuple[list[torch.Tensor], list[_Branch], list[torch.Tensor]]:
        """Returns the weights whose gradients I computes, the path's branches, and the weights independent of the path.

        A node off the path runs once, with all the weights that it reaches.
        """
        weights_of: dict[Node, list[Any]] = defaultdict(list)  # nodes off the path -> weights that they reach
        # Nodes off the path -> nodes of the path before them; None: an output.
        readers: dict[Node, set[Node | None]] = {}
        nodes_above = {leaf: self._find_ancestors([leaf], self.path) for leaf in self._leaves}
        for leaf, nodes in nodes_above.items():
            for node in nodes:
                weights_of[node].append(leaf)
        for node in weights_of:
            ancestors = self._find_ancestors([node], self.path)
            readers[node] = {parent for other in ancestors for parent in self._parents[other] if parent in self.path}
            readers[node] |= {None} if ancestors & self._roots else set()
        to_mark_early = [leaf for leaf in self._leaves if any(map(_must_run_once, readers[leaf]))]
        for node, leaves in weights_of.items():
            if node not in nodes_above and len(readers[node]) > 1:
                to_mark_early += leaves
        early: dict[Any, None] = {}
        while to_mark_early:
            leaf = to_mark_early.pop()
            if leaf not in early:
                early[leaf] = None
                to_mark_early += (other for node in nodes_above[leaf] for other in weights_of[node])
        off_path = {node for node, leaves in weights_of.items() if leaves[0] not in early}
        late_by_reader: dict[Node | None, list[torch.Tensor]] = defaultdict(list)
        for leaf in self._leaves:
            if leaf not in early:
                for reader in readers[leaf]:
                    late_by_reader[reader].append(leaf.variable)
        independent = late_by_reader.pop(None, [])
        branches = [_Branch(n, leaves, off_path) for n, leaves in late_by_reader.items() if n]
        return [leaf.variable for leaf in early], branches, independent

    def _find_ancestors(self, nodes: Sequence[Node], stop: Set[Node] = frozenset()) -> set[Node]:
        ancestors = set(nodes)
        to_visit = list(nodes)
        while to_visit:
            for parent in self._parents[to_visit.pop()]:
                if parent not in ancestors and parent not in stop:
                    ancestors.add(parent)
                    to_visit.append(parent)
        return ancestors


def _count_down(leaves: Sequence[torch.Tensor], remaining: Counter[torch.Tensor]) -> Iterator[torch.Tensor]:
    for leaf in leaves:
        remaining[leaf] -= 1
        if not remaining[leaf]:
            yield leaf


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


def _fit_to_output(gradient: torch.Tensor | None, node: Node, number: int) -> torch.Tensor | None:
    """Gives a gradient the shape and dtype of a node's output, as autograd does: summed if broadcast."""
    metadata = node._input_metadata[number]
    if gradient is None:
        return None
    return (gradient if gradient.shape == metadata.shape else gradient.sum_to_size(metadata.shape)).to(metadata.dtype)


def _make_zero(node: Node, number: int) -> torch.Tensor:
    metadata = node._input_metadata[number]
    return torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape)


def _must_run_once(node: Node | None) -> bool:
    return node is not None and (
        isinstance(node, BackwardCFunction)
        or node.name() in _UNSPLIT_NODES
        or any(saved.unpack_hook not in (None, unpack) for saved in list_saved_tensors(node))
    )


def _free_saved(node: Node) -> None:
    """Frees what a node has saved, by a hook that packs it into None."""
    for saved in list_saved_tensors(node):
        with suppress(RuntimeError):  # freed already, or not kept by the node
            if saved.unpack_hook is unpack:
                saved.data.free()
            else:
                saved.register_hooks(lambda _: None, _refuse_unpack)


def _refuse_unpack(_: None) -> torch.Tensor:
    raise RuntimeError("a backward ran again through a graph that a split backward has freed")

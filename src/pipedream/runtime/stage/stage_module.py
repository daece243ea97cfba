"""A stage at work: the user's own layers, run forward and backward at a chosen version of their weights.

Life of a microbatch at a stage:

1. What arrives enters autograd as a non-leaf without a copy, so that a layer may work in place on it.
2. The leaves of a version stand in the modules' parameter slots while the layers run; then the handles
   stand there again.
3. Before each layer the generator is seeded from (run seed, microbatch, layer name), after the last one the
   user's generator goes on where it was.
4. The backward takes the gradients of the leaves and of what arrived from autograd, which adds to the sums of
   the update that is coming: in one go, or in two halves (`runtime.stage.split_backward`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipedream.core.seeds import layer_seed
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import flatten, unflatten
from pipedream.runtime.stage.split_backward import Deferred, split_backward
from pipedream.runtime.stage.versions import WeightSet

__all__ = ["GraphInput", "SavedForward", "StageModule", "low_precision_weights", "outputs_of"]

# Layers whose weights autocast casts before each use (torch.amp's op lists: linear, convolutions, recurrent
# cells). Norms and embeddings stay in full precision there, so they do here.
_CAST_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


class _GraphInputFunction(torch.autograd.Function):
    """Gives a received tensor a place in the graph without copying it: neither a leaf nor a view.

    The anchor makes autograd come here, although nothing else that it looks for lies behind.
    """

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, anchor: torch.Tensor, box: list[Any]) -> torch.Tensor:
        ctx.box = box
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        ctx.box.append(gradients[0])
        return None, None, None


class GraphInput(NamedTuple):
    """Where a received tensor entered the graph.

    Attributes:
        box: the list that its gradient is put into, where a backward reaches it.
        edge: its place in the graph.
    """

    box: list[torch.Tensor]
    edge: GradientEdge


@dataclass
class SavedForward:
    """What a stage keeps of a microbatch between its forward and its backward.

    Attributes:
        weights: the set that the forward read; None for a microbatch without samples.
        graph_inputs: of each input that wants a gradient.
        outputs: tensors that went on, or the loss.
        wants: for each tensor that arrived, whether its gradient goes back.
        microbatch: whose.
        version: that the forward read, or of which it read a view.
        weight: loss weight of the microbatch, in its minibatch's unit (`Scorer.score`).
        scale: gradient of the update's objective by the loss, at the last stage.
        recompute: does the forward again and fills in entries and outputs; None where its graph was kept.
        recomputed_weights: the set that it read when it was done again; None where that is the set of the first time.
        deferred: gradients of the weights that are still to be made, between the halves of a backward.
    """

    weights: WeightSet | None
    graph_inputs: tuple[GraphInput, ...]
    outputs: tuple[torch.Tensor, ...]
    wants: tuple[bool, ...]
    microbatch: int
    version: int = 0
    weight: float = 0.0
    scale: float = 1.0
    recompute: Callable[[], object] | None = None
    recomputed_weights: WeightSet | None = None
    deferred: Deferred | None = None

    @property
    def leaves(self) -> WeightSet:
        """The set whose leaves the graph ends in."""
        found = self.recomputed_weights or self.weights
        assert found is not None, "a microbatch without samples has no graph"
        return found

    def output_gradients(self, message: Message | None, loss_scale: float = 1.0) -> list[torch.Tensor | None]:
        """Returns the gradients of the outputs, whose graph is there then, and notes the loss weight.

        Args:
            message: that brought them; None at the last stage, which makes its own.
            loss_scale: factor on those that it makes.
        """
        if self.recompute is not None:
            recompute, self.recompute = self.recompute, None  # it holds what arrived
            recompute()
            del recompute
        if message is None:
            own = torch.full_like(self.outputs[0], self.scale)
            return [own.mul_(loss_scale)]  # may overflow, and be infinite
        self.weight = message.weight
        arriving = iter(message.tensors)
        return [next(arriving) if output.requires_grad else None for output in self.outputs]


class StageModule:
    """Consecutive layers of the user's model.

    Args:
        layers: (name, module) in run order; the modules are the user's own.
        handles: name -> parameter that is trained, each shared one once.
        device: where it computes.
        seed: of the run.
        autocast: low-precision type of the forward; None computes as the weights are.

    Attributes:
        handles: as given: they stand in the modules while nothing runs.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        handles: dict[str, nn.Parameter],
        device: torch.device,
        seed: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.device = device
        self._seed = seed
        self._autocast = autocast
        self._names = tuple(handles)
        self.handles = handles
        known = {id(parameter): name for name, parameter in handles.items()}
        modules = {id(m): m for _, layer in layers for m in layer.modules()}
        self._slots = [
            (module._parameters, slot, known[id(parameter)])
            for module in modules.values()
            for slot, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in known
        ]
        # Recurrent layers keep a second list of their weights.
        self._recurrent = [m for m in modules.values() if isinstance(m, nn.RNNBase)]

    def train(self, mode: bool) -> list[tuple[nn.Module, bool]]:
        """Sets the training flag of all modules; returns the flags that they had."""
        flags = [(m, m.training) for _, layer in self.layers for m in layer.modules()]
        for _, layer in self.layers:
            layer.train(mode)
        return flags

    def forward(self, value: Any, leaves: dict[str, torch.Tensor], microbatch: int, first: bool) -> Any:
        """Runs the layers on a value at the weights `leaves`.

        Args:
            value: what the first layer takes; for the model's first layer, possibly a tuple of inputs.
            leaves: name -> weights, of one version.
            microbatch: its number since the start of training, for the seeds.
            first: the value is the model's input; a tuple is handed over as several arguments.
        """
        state = self.save_generator()
        self._set_parameters(leaves)
        try:
            with self.casting():
                for name, layer in self.layers:
                    self._reseed(layer_seed(self._seed, microbatch, name))
                    value = layer(*value) if first and isinstance(value, tuple) else layer(value)
                    first = False
            return value
        finally:
            self._set_parameters(self.handles)
            self.restore_generator(state)

    def enter(
        self, structure: str, tensors: tuple[Any, ...], wants: tuple[bool, ...]
    ) -> tuple[Any, tuple[GraphInput, ...]]:
        """Returns a received value with its place in the graph, and the entries of those whose gradients go back."""
        graph_inputs: list[GraphInput] = []
        inside = []
        for tensor, want in zip(tensors, wants, strict=True):
            if want:
                box: list[torch.Tensor] = []
                anchor = torch.empty((), requires_grad=True)
                tensor = _GraphInputFunction.apply(tensor, anchor, box)  # type: ignore[no-untyped-call]
                graph_inputs.append(GraphInput(box, get_gradient_edge(tensor)))
            inside.append(tensor)
        return unflatten(structure, tuple(inside)), tuple(graph_inputs)

    def backward(
        self,
        held: SavedForward,
        gradients: Sequence[torch.Tensor | None],
        accumulators: Sequence[torch.Tensor | None],
        ready: Callable[[int, torch.Tensor], None] | None = None,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Returns the gradients of the weights, in the order of the handles, and of what arrived.

        A lent tensor is added to in place, and returned. The leaves' ``.grad`` is empty before and after.

        Args:
            held: what the forward kept; its graph is freed.
            gradients: of the outputs that went on.
            accumulators: for each handle, the sum to add to, or None.
            ready: takes each handle's number and gradient while the backward still runs, as soon as it is there; what
                it has taken is None in the answer. The leaves must be watched. On a GPU it is called on a thread of
                autograd.
        """
        outputs, arrived = _with_gradients(held, gradients)
        with self._accumulating(held.leaves, accumulators) as leaves:
            if outputs:
                held.leaves.ready = ready
                torch.autograd.backward(outputs, arrived)
            return [leaf.grad for leaf in leaves], [box[0] if box else None for box, _ in held.graph_inputs]

    def backward_inputs(
        self, held: SavedForward, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of what arrived alone; `backward_weights` does the rest of the backward.

        Args:
            held: what the forward kept; what the rest has no use for is freed.
            gradients: of the outputs that went on.
        """
        outputs, arrived = _with_gradients(held, gradients)
        back, held.deferred = split_backward(outputs, arrived, [entry.edge for entry in held.graph_inputs])
        held.graph_inputs, held.outputs = (), ()
        return back

    def backward_weights(
        self,
        held: SavedForward,
        accumulators: Sequence[torch.Tensor | None],
        ready: Callable[[int, torch.Tensor], None] | None = None,
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the weights, behind `backward_inputs`.

        Args:
            held: what that has left; freed as the gradients come.
            accumulators, ready: as for `backward`; the leaves need not be watched.
        """
        assert held.deferred is not None
        with self._accumulating(held.leaves, accumulators) as leaves:
            numbers = {leaf: number for number, leaf in enumerate(leaves)}
            for leaf in held.deferred.run():
                if ready is not None and leaf in numbers and leaf.grad is not None:
                    gradient, leaf.grad = leaf.grad, None
                    ready(numbers[leaf], gradient)
            held.deferred = None
            return [leaf.grad for leaf in leaves]

    @contextmanager
    def _accumulating(
        self, weights: WeightSet, accumulators: Sequence[torch.Tensor | None]
    ) -> Iterator[list[torch.Tensor]]:
        """Gives the leaves, in the order of the handles, to which autograd may add; the sums so far stand in them.

        They stand in the modules too: a checkpointed layer reads its weights again in the backward.
        """
        leaves = [weights.leaves[name] for name in self._names]
        self._set_parameters(weights.leaves)
        try:
            for leaf, total in zip(leaves, accumulators, strict=True):
                if total is not None and total.dtype == leaf.dtype:
                    leaf.grad = total
            yield leaves
        finally:
            self._set_parameters(self.handles)
            weights.ready = None
            for leaf in leaves:
                leaf.grad = None

    def _set_parameters(self, leaves: Any) -> None:
        for parameters, slot, name in self._slots:
            parameters[slot] = leaves[name]
        for module in self._recurrent:
            flat = [getattr(module, name, None) for name in module._flat_weights_names]
            module._flat_weights = flat
            module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in flat]

    def casting(self) -> AbstractContextManager[Any]:
        """Returns the context in which layers run, and the loss: autocast takes it up to full precision."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast)

    def _reseed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def save_generator(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the state of the user's generators."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.default_generator.get_state(), cuda

    def restore_generator(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Sets the user's generators to a state of `save_generator`."""
        torch.default_generator.set_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)


def _with_gradients(
    held: SavedForward, gradients: Sequence[torch.Tensor | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs that a gradient came for, and the gradients."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(held.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def low_precision_weights(
    layers: Sequence[tuple[str, nn.Module]], handles: dict[str, nn.Parameter], autocast: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Returns the weights that autocast would cast at each use, with the type that it casts them to.

    A weight shared with a layer that autocast leaves in full precision (a tied embedding) is not among them.
    """
    if autocast is None:
        return {}
    known = {id(parameter): name for name, parameter in handles.items()}
    cast: set[str] = set()
    full: set[str] = set()
    for _, layer in layers:
        for module in layer.modules():
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in known:
                    (cast if isinstance(module, _CAST_LAYERS) else full).add(known[id(parameter)])
    return {name: autocast for name in handles if name in cast - full and handles[name].dtype == torch.float32}


def outputs_of(value: Any) -> tuple[str, tuple[torch.Tensor, ...], tuple[bool, ...]]:
    """Returns the structure and tensors of what a stage made, and which of them want a gradient back."""
    structure, tensors = flatten(value)
    return structure, tensors, tuple(tensor.requires_grad for tensor in tensors)

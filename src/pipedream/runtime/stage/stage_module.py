"""A stage: the user's own layers, run forward and backward with a chosen version of their weights.

Life of a microbatch at a stage:

1. The received tensors enter autograd as non-leaves without a copy, so that a layer may work on them in place.
2. While the layers run, the leaves of a version are in the modules' parameter slots; afterwards the handles are there
   again.
3. Before each layer that may draw random numbers the generator is seeded from (run seed, microbatch, layer name);
   after the last one the user's generator has its earlier state again.
4. The backward computes the gradients of the leaves, which autograd adds to the sums of the coming update, and of the
   received tensors: at once, or in two halves (`extensions.split_backward`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils.rnn import PackedSequence

from pipedream.core.errors import CaptureError
from pipedream.core.user_code import note_module
from pipedream.runtime.comm.message import Message
from pipedream.runtime.comm.values import flatten, unflatten
from pipedream.runtime.division import Division
from pipedream.runtime.stage.generators import LayerGenerators, OtherGenerators, list_own_generators, never_draws
from pipedream.runtime.stage.versions import WeightSet, requires_grad_changed
from pipedream.tensors.auxiliary_loss import auxiliary_loss_scale


@contextmanager
def restoring_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which each module is in training or in evaluation mode, as it was before."""
    flags = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def evaluating(stages: Iterable[StageModule]) -> Iterator[None]:
    """Context in evaluation mode.

    Stages in one process may share modules, so all of them enter and leave it together.
    """
    layers = [layer for stage in stages for _, layer in stage.layers]
    with restoring_modes(module for layer in layers for module in layer.modules()):
        for layer in layers:
            layer.train(False)
        yield


class _GraphInput(torch.autograd.Function):
    """Makes a received tensor part of a graph without a copy, by an anchor that requires a gradient.

    The tensor's ``grad_fn``, a node of this class, keeps the gradient.
    """

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(received)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        ctx.gradient = gradients[0]
        return None, None


_NOTHING = nullcontext()
_ANCHOR = torch.empty((), requires_grad=True)


@dataclass(slots=True)
class SavedForward:
    """What a stage keeps of a microbatch between its forward and its backward.

    Attributes:
        weights: what the forward read; None for a microbatch without samples.
        graph_inputs: nodes of the graph at which the inputs that require a gradient entered it.
        outputs: what was sent on, or the loss.
        wants: whether each received tensor's gradient is sent back.
        version: the version that was read or predicted from.
        loss_weight: d objective / d mean loss, in the minibatch's unit (`Scorer.score`).
        scale: d objective / d loss, at the last stage.
        auxiliary_scale: d objective / d auxiliary loss, times the loss scale; known from the backward on.
        recompute: fills in graph_inputs and outputs; None if the graph was kept.
        recomputed_weights: what the recomputation read, if not `weights`.
        deferred: the second half of a split backward, after the first.
        gradient_structure: of the message with the gradients of the received tensors.
    """

    weights: WeightSet | None
    graph_inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]
    wants: tuple[bool, ...]
    microbatch: int
    version: int = 0
    loss_weight: float = 0.0
    scale: float = 1.0
    auxiliary_scale: float = 0.0
    recompute: Callable[[], object] | None = None
    recomputed_weights: WeightSet | None = None
    deferred: Any = None
    gradient_structure: str = ""

    @property
    def leaves(self) -> WeightSet:
        weights = self.recomputed_weights or self.weights
        assert weights is not None, "a microbatch without samples has no graph"
        return weights

    def repeat_forward(self) -> None:
        """Recomputes the graph, if it was not kept and has not been recomputed yet."""
        if self.recompute is not None:
            recompute, self.recompute = self.recompute, None  # it holds the received message
            recompute()

    def output_gradients(self, message: Message | None, loss_scale: float = 1.0) -> list[torch.Tensor | None]:
        """Returns the gradients of the outputs and sets `loss_weight`; recomputes the graph first if need be.

        Args:
            message: has gradients of the outputs' shapes and dtypes; None at the last stage, whose gradient of the
                loss is `scale` times `loss_scale`.
        """
        self.repeat_forward()
        self.loss_weight = self.loss_weight if message is None else message.loss_weight
        self.auxiliary_scale = self.loss_weight * loss_scale
        if message is None:
            gradient = torch.full_like(self.outputs[0], self.scale)
            return [gradient if loss_scale == 1.0 else gradient.mul_(loss_scale)]  # may overflow, and be infinite
        arriving = iter(message.tensors)
        return [next(arriving) if output.requires_grad else None for output in self.outputs]


class StageModule:
    """Consecutive layers of the user's model, by name.

    Args:
        handles: trained parameters by name; in the modules while nothing runs.
        autocast: dtype of the forward; None keeps that of the weights.
        compile: returns what runs in place of a layer; None runs the layers as they are.
        division: by default the worker is a single rank.
        replicated: there are other replicas, which must not draw the same numbers from the layers' own generators,
            Python's and NumPy's.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        handles: dict[str, nn.Parameter],
        device: torch.device,
        seed: int,
        autocast: torch.dtype | None = None,
        compile: Callable[[nn.Module], Callable[..., Any]] | None = None,
        division: Division | None = None,
        replicated: bool = False,
    ) -> None:
        self.division = division or Division()
        self.layers = tuple(layers)
        self.device = device
        self.generators = LayerGenerators(seed, device)
        self._autocast = autocast
        choose_caller = compile or self.division.choose_caller
        # A slice seeds each of its calls, so that the cut does not matter.
        self._calls = [
            (name, layer, choose_caller(layer), hasattr(layer, "reseed"), never_draws(layer)) for name, layer in layers
        ]
        self._names = tuple(handles)
        self.handles = handles
        names = {id(parameter): name for name, parameter in handles.items()}
        modules = {id(m): m for _, layer in layers for m in layer.modules()}
        self.own_generators = list_own_generators(modules.values())  # held by the layers
        self._other_generators = OtherGenerators(seed, self.layers, self.own_generators, replicated)
        self.division.prepare(modules.values())
        self._slots = [
            (module._parameters, slot, names[id(parameter)])
            for module in modules.values()
            for slot, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in names
        ]
        self._names_by_layer: list[list[str]] = []  # sharded weights are gathered layer by layer
        unassigned = dict(names)
        for _, layer in layers:
            self._names_by_layer.append(
                [unassigned.pop(id(parameter)) for parameter in layer.parameters() if id(parameter) in unassigned]
            )
        named_parameters = [pair for name, layer in layers for pair in layer.named_parameters(name)]
        self._frozen = [(name, parameter) for name, parameter in named_parameters if not parameter.requires_grad]
        # Recurrent layers have a second list of their weights, which need one buffer on a GPU.
        self._recurrent = [
            (m, [(slot, names.get(id(m._parameters.get(slot)))) for slot in m._flat_weights_names])
            for m in modules.values()
            if isinstance(m, nn.RNNBase)
        ]
        self._flattening = [m.__dict__ for m, _ in self._recurrent if "flatten_parameters" not in m.__dict__]
        self._set_parameters(handles)
        for recurrent, _ in self._recurrent:
            recurrent.flatten_parameters()
        self._storages_checked = False

    def forward(self, value: Any, leaves: dict[str, torch.Tensor], microbatch: int, is_first: bool) -> Any:
        """Runs the layers with the weights `leaves`.

        Args:
            microbatch: since the start of training, for the seeds.
            is_first: the value is the model's input; a tuple, if not a packed sequence, is passed as several arguments.
        """
        # Before the others are seeded, which seeds torch's too.
        states = self.generators.states() if self._other_generators.may_draw else None
        storages = {} if self._storages_checked else _list_storages(leaves)
        self._set_parameters(self.division.wrap_weights(leaves, self._names_by_layer))
        try:
            with self.autocasting(), self.division.enter_pass("forward"), self._other_generators.seeding(microbatch):
                for name, layer, call, is_slice, draws_nothing in self._calls:
                    # A hook may draw, and so may what the user calls instead of the layer.
                    hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
                    if hooked or not draws_nothing:
                        states = states or self.generators.states()
                        if is_slice:
                            layer.reseed = partial(self.generators.seed, microbatch)  # type: ignore[assignment]
                        else:
                            self.generators.seed(microbatch, name)
                    is_several = is_first and not is_slice and isinstance(value, tuple)
                    value = call(*value) if is_several and not isinstance(value, PackedSequence) else call(value)
                    is_first = False
            if not self._storages_checked:
                self._storages_checked = True
                _check_storages(storages, leaves)
            return value
        except BaseException as error:
            note_module(error, (pair for name, layer in self.layers for pair in layer.named_modules(prefix=name)))
            raise
        finally:
            self._set_parameters(self.handles)
            if states is not None:
                self.generators.restore(states)

    def check_unchanged(self) -> None:
        """Raises a `CaptureError` if the user has changed what is trained since the last forward."""
        for parameters, slot, name in self._slots:
            if parameters[slot] is not self.handles[name]:
                raise CaptureError(
                    f"the parameter {name!r} was replaced by another one while the pipeline trained, which no "
                    "optimizer has; make a new Pipeline"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise requires_grad_changed(name)

    def enter(self, structure: str, tensors: tuple[Any, ...], wants: tuple[bool, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Makes a received value part of a new graph; also returns the nodes whose gradients are sent back."""
        entered, nodes = [], []
        for tensor, want in zip(tensors, wants, strict=True):
            if want:
                tensor = _GraphInput.apply(tensor, _ANCHOR)  # type: ignore[no-untyped-call]
                nodes.append(tensor.grad_fn)
            entered.append(tensor)
        return self.unpack_value(structure, entered), tuple(nodes)

    def unpack_value(self, structure: str, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the value that `pack_output` took at the previous stage."""
        return unflatten(*self.division.unpack(structure, tensors))

    def pack_output(self, output: Any, samples: int) -> tuple[str, tuple[torch.Tensor, ...]]:
        """Returns an output's structure and tensors, which `unpack_value` takes at the next stage."""
        return self.division.pack(*flatten(output), samples)

    def backward(
        self,
        saved: SavedForward,
        gradients: Sequence[torch.Tensor | None],
        accumulators: Sequence[torch.Tensor | None],
        ready: Callable[[int, torch.Tensor], None] | None = None,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Frees the graph; returns the gradients of the weights, in the handles' order, and of the received tensors.

        Args:
            accumulators: each handle's sum, added to in place and returned; or None.
            ready: called with a handle's index and gradient once complete, while the backward still runs (on a GPU on a
                thread of autograd); the result then has None. The leaves must be watched.
        """
        outputs, output_gradients = select_with_gradients(saved, gradients)
        weights = saved.leaves
        leaves = self.begin_backward(weights, accumulators)
        try:
            if outputs:
                weights.ready = ready
                # As torch.autograd.backward without its checks (8 us): messages have the outputs' shapes and dtypes.
                with auxiliary_loss_scale(saved.auxiliary_scale), self.division.enter_pass("backward"):
                    _engine_run_backward(
                        outputs, output_gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
                    )
            # None: no output with a gradient depends on it.
            input_gradients = [getattr(node, "gradient", None) for node in saved.graph_inputs]
            return [leaf.grad for leaf in leaves], input_gradients
        finally:
            self.end_backward(weights, leaves)

    def begin_backward(self, weights: WeightSet, accumulators: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Returns the leaves, in the order of the handles, with the sums so far in ``.grad``.

        They are in the modules too: a checkpointed layer reads its weights again in the backward.
        """
        leaves = [weights.leaves[name] for name in self._names]
        self._set_parameters(self.division.wrap_weights(weights.leaves, self._names_by_layer))
        for leaf, total in zip(leaves, accumulators, strict=True):
            leaf.grad = total
        return leaves

    def end_backward(self, weights: WeightSet, leaves: Sequence[torch.Tensor]) -> None:
        """Takes the sums from the leaves, and the leaves from the modules."""
        self._set_parameters(self.handles)
        weights.ready = None
        for leaf in leaves:
            leaf.grad = None

    def _set_parameters(self, leaves: Any) -> None:
        for parameters, slot, name in self._slots:
            parameters[slot] = leaves[name]
        for module, weights in self._recurrent:
            _set_flat_weights(module, weights, leaves)
        for attributes in self._flattening:
            if leaves is self.handles:
                attributes.pop("flatten_parameters", None)
            else:  # it would move the leaves away from the handles
                attributes["flatten_parameters"] = lambda: None

    def with_layers(
        self, layers: Sequence[tuple[str, nn.Module]], handles: dict[str, nn.Parameter], division: Division
    ) -> StageModule:
        """Returns a stage of other layers, for shapes alone, that runs like this one but is not compiled."""
        return StageModule(layers, handles, self.device, 0, self._autocast, None, division)

    @property
    def autocasts(self) -> bool:
        """Whether the layers and the loss compute in another dtype than that of the weights."""
        return self._autocast is not None

    def autocasting(self) -> AbstractContextManager[Any]:
        """Returns the context of the layers and the loss."""
        if self._autocast is None:
            return _NOTHING
        return torch.autocast(self.device.type, self._autocast)


def _set_flat_weights(module: Any, weights: Sequence[tuple[str, str | None]], leaves: Any) -> None:
    flat = [getattr(module, slot, None) if name is None else leaves[name] for slot, name in weights]
    flat = [w() if callable(w) else w for w in flat]  # a sharded weight, gathered now
    module._flat_weights = flat
    module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in flat]


def _check_storages(old_storages: Mapping[str, int], leaves: Mapping[str, torch.Tensor]) -> None:
    """Raises a `CaptureError` if the forward has moved a weight, which updates would then not reach."""
    moved_names = [name for name, storage in _list_storages(leaves).items() if old_storages[name] != storage]
    if moved_names:
        raise CaptureError(
            f"the forward moves the weight {moved_names[0]!r} to other memory (by weight.data = ..., or by a function "
            "that flattens weights), where no update would reach it; move it before training, not in the forward"
        )


def _list_storages(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items()}


def select_with_gradients(
    saved: SavedForward, gradients: Sequence[torch.Tensor | None]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Returns the outputs at which a backward begins, and their gradients."""
    outputs, selected = [], []
    for output, gradient in zip(saved.outputs, gradients, strict=True):
        if gradient is not None and output.requires_grad:
            outputs.append(output)
            selected.append(gradient)
    return tuple(outputs), tuple(selected)

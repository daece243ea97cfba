"""Runs layers forward and backward, one at a time, and times each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import nn

from pipedream.core.errors import CaptureError, ProfileError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.user_code import call_model, notes_of
from pipedream.profiler.sizes import Allocations, Sizes, measure_sizes
from pipedream.profiler.stopwatch import Watch
from pipedream.tensors.trees import tree_leaves, tree_map


@dataclass(frozen=True)
class Need:
    """The memory that a layer needs temporarily; see `LayerProfile`."""

    temporary_bytes: int
    backward_bytes: int


LossFunction = Callable[[Any], torch.Tensor]

Sample = tuple[Any, ...] | Mapping[str, Any]
"""The arguments of a call: positional ones, or keyword arguments."""


class Passes:
    """Runs the layers of a chain on one sample, with two laps for each layer and two for the loss.

    The backward of a layer comes right after its forward, with a gradient of ones; no ``.grad`` is written. A layer's
    input requires a gradient if it did as an output.

    Args:
        call: calls a layer, or the loss, with its arguments.
        enter_backward: makes the context of a backward.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        graph: LayerGraph,
        loss: LossFunction | None,
        watch: Watch,
        device: torch.device,
        autocast: torch.dtype | None,
        call: Callable[[Callable[..., Any], Sample], Any] | None = None,
        enter_backward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._call = call or call_model
        self._enter_backward = enter_backward
        self._layers = layers
        self._graph = graph
        self._loss = loss
        self._watch = watch
        self._device = device
        self._autocast = autocast
        self._parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]

    def time_run(self, sample: Sample) -> list[float]:
        """Returns the laps of one run. Raises ProfileError: names what fails, its input shapes and the cause."""
        arguments: Sample = sample
        for index in range(len(self._layers)):
            arguments = (self.time_layer(index, arguments),)
        if self._loss is not None:
            self.time_loss(arguments)
        return self._watch.laps_s()

    def time_chain(self, sample: Sample) -> list[float]:
        """Returns the laps of all forwards, one after the other, and of a single backward through them."""
        leaves: list[torch.Tensor] = []
        with torch.enable_grad():
            arguments: Sample = tree_map(lambda leaf: _enter(leaf, leaves), sample)
            forwards: list[Callable[..., Any]] = [*self._layers, *[self._compute_loss] * (self._loss is not None)]
            for forward in forwards:
                arguments = (self._time_forward(forward, arguments),)
            parameters = {id(p): p for p in chain.from_iterable(self._parameters)}
            outputs, arguments = _select_differentiable(arguments), ()
            self._time_backward(outputs, [*leaves, *parameters.values()])
        return self._watch.laps_s()

    def time_layer(self, index: int, arguments: Sample) -> Any:
        """Takes the laps of one layer, and returns its output."""
        return self._time_call(
            f"the {self._name_layer(index)}", self._layers[index], arguments, self._parameters[index]
        )

    def time_loss(self, arguments: Sample) -> None:
        self._time_call("the loss", self._compute_loss, arguments, [])

    def run_layer(self, index: int, arguments: Sample) -> Any:
        what = f"the {self._name_layer(index)}"
        with _naming_failure(what, arguments), enter_autocast(self._device.type, self._autocast):
            return self._call(self._layers[index], arguments)

    def run_loss(self, output: Any) -> torch.Tensor:
        with _naming_failure("the loss", (output,), ()), enter_autocast(self._device.type, self._autocast):
            return self._compute_loss(output)

    def measure_sizes(self, sample: Sample) -> tuple[tuple[Sizes, ...], int]:
        """Returns each layer's sizes, and the bytes that autograd keeps from the loss."""
        return measure_sizes(self._layers, sample, self.run_layer, self.run_loss if self._loss is not None else None)

    def measure_needs(self, sample: Sample, sizes: Sequence[Sizes], loss_bytes: int) -> tuple[Need, ...]:
        """Returns what each layer, and then the loss, needs in addition to what it keeps."""
        saved = (*(size.activation_bytes for size in sizes), loss_bytes)
        # Alive while the next layer runs, though no layer keeps it.
        entering = (0, *(size.leaving_bytes for size in sizes))
        if not Allocations.is_free():
            return (Need(0, 0),) * len(saved)
        watches = []
        for adds in (False, True):  # as the first microbatch of an update, and as a later one
            with Allocations(self._device) as watch:
                arguments: Sample = sample
                for index, parameters in enumerate(self._parameters):
                    arguments = (self._watch_call(self._layers[index], arguments, parameters, watch, adds),)
                if self._loss is not None:
                    self._watch_call(self._compute_loss, arguments, [], watch, adds)
            watches.append(iter(watch.sections[:-1]))  # without the one after the last backward
        needs = []
        first, adding = (zip(*[sections] * 3, strict=True) for sections in watches)  # three for each call
        for index, ((_, forward, alone), (_, _, added)) in enumerate(zip(first, adding, strict=True)):
            sizes_of = [p.nbytes for p in self._parameters[index]] if index < len(self._layers) else []
            passing = sum(size.output_bytes for size in sizes[max(index - 1, 0) : index + 1])  # gradients, in and out
            # The largest gradient, whole before it is added, is counted apart (`largest_parameter_bytes`).
            added_bytes = added.rise_bytes - max(sizes_of, default=0)
            working = max(forward.rise_bytes + entering[index] - saved[index], added_bytes, passing)
            needs.append(Need(working, alone.rise_bytes))
        return (*needs, *[Need(0, 0)] * (len(saved) - len(needs)))

    def _watch_call(
        self,
        forward: Callable[..., Any],
        arguments: Sample,
        parameters: list[nn.Parameter],
        watch: Allocations,
        adds: bool,
    ) -> Any:
        """Marks three sections: before, forward, backward. If `adds`, it adds to existing gradients."""
        leaves: list[torch.Tensor] = []
        gradients_before = [p.grad for p in parameters]
        with torch.enable_grad():
            entered = tree_map(lambda leaf: _enter(leaf, leaves), arguments)
            for parameter in parameters if adds else ():
                parameter.grad = torch.zeros_like(parameter)
            try:
                watch.mark()
                with enter_autocast(self._device.type, self._autocast):
                    value = self._call(forward, entered)
                watch.mark()
                outputs = _select_differentiable(value)
                if outputs and (leaves or parameters):
                    gradients = [torch.ones_like(output) for output in outputs]
                    with self._enter_backward():
                        if adds:
                            torch.autograd.backward(outputs, gradients, inputs=[*leaves, *parameters])
                        else:
                            torch.autograd.grad(outputs, [*leaves, *parameters], gradients, allow_unused=True)
                    del gradients
                watch.mark()
            finally:
                for parameter, gradient in zip(parameters, gradients_before, strict=True):
                    parameter.grad = gradient
        return tree_map(leave, value)

    def _time_call(
        self, what: str, forward: Callable[..., Any], arguments: Sample, parameters: list[nn.Parameter]
    ) -> Any:
        leaves: list[torch.Tensor] = []
        with torch.enable_grad():
            entered = tree_map(lambda leaf: _enter(leaf, leaves), arguments)
            with _naming_failure(what, arguments):
                value = self._time_forward(forward, entered)
                self._time_backward(_select_differentiable(value), [*leaves, *parameters])
        return tree_map(leave, value)

    def _time_forward(self, forward: Callable[..., Any], arguments: Sample) -> Any:
        with enter_autocast(self._device.type, self._autocast):
            if hasattr(forward, "on_begin"):  # a slice of a model: its own part begins later
                forward.on_begin = self._watch.start
            else:
                self._watch.start()
            value = self._call(forward, arguments)
            self._watch.stop()
        return value

    def _time_backward(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        gradients = [torch.ones_like(output) for output in outputs]
        self._watch.start()  # without a backward, too: laps are known by their order
        if outputs and inputs:
            with self._enter_backward():
                torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        outputs.clear()  # with their graph, unless the caller has it
        self._watch.stop()

    def _compute_loss(self, output: Any) -> torch.Tensor:
        assert self._loss is not None
        value = self._loss(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"it should return a tensor of one number, found {what}")
        return value

    def _name_layer(self, index: int) -> str:
        layer = self._graph.layers[index]
        return f"layer {layer.name!r} ({layer.kind})"


def measure_launch_seconds(passes: Passes, sample: Sample, runs: int) -> list[float]:
    """Returns the host's seconds in each lap of a run: launching kernels on a GPU may take longer than running them.

    The watch of `passes` is a `HostStopwatch`. A stage starts autograd once, not for each layer, so the backwards' laps
    are scaled to the time of a single backward through all, unless it needs too much memory: then they are too long.
    """
    laps_s = _take_medians(passes.time_run, sample, runs)
    try:
        *forwards_s, backward_s = _take_medians(passes.time_chain, sample, runs)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return laps_s
    share = backward_s / sum(laps_s[1::2])
    return [seconds for pair in zip(forwards_s, laps_s[1::2], strict=True) for seconds in (pair[0], share * pair[1])]


def _take_medians(run: Callable[[Sample], list[float]], sample: Sample, runs: int) -> list[float]:
    rows = [run(sample) for _ in range(1 + runs)]
    return [median(column) for column in zip(*rows[1:], strict=True)]


def list_shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of all tensors in a value."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def enter_autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Returns a context that changes nothing if no dtype is given."""
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def has_numbers(leaf: Any) -> bool:
    """Returns whether a value is a tensor that is sent: a meta tensor in a bundle stands for one that is not."""
    return isinstance(leaf, torch.Tensor) and not leaf.is_meta


def _select_differentiable(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if has_numbers(leaf) and leaf.requires_grad]


def _enter(leaf: Any, leaves: list[torch.Tensor]) -> Any:
    if not has_numbers(leaf):
        return leaf
    start = leaf.detach()
    if leaf.requires_grad:
        leaves.append(start.requires_grad_())
    # A layer may work in place, which autograd allows on a copy and not on the leaf.
    return start.clone()


def leave(leaf: Any) -> Any:
    """Returns a tensor without its graph; it requires a gradient as before."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if has_numbers(leaf) else leaf


@contextmanager
def _naming_failure(
    what: str, arguments: Sample, passed_on: tuple[type[Exception], ...] = (CaptureError,)
) -> Iterator[None]:
    """Raises a ProfileError in place of another; a CaptureError says itself which cut fails, and what to do."""
    try:
        yield
    except passed_on:
        raise
    except Exception as error:
        shapes = ", ".join(str(list(shape)) for shape in list_shapes(arguments)) or "no tensor"
        advice = "; ".join(notes_of(error)) or "check the sample's shape, dtype and device"
        raise ProfileError(
            f"{what} should run forward and backward on inputs of shape {shapes}, but raised "
            f"{type(error).__name__}: {error}; {advice}"
        ) from error

"""Compares a model that is split into all its layers with the model itself: outputs, gradients, buffers."""

import ctypes
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pipedream.capture.errors import CutFailed, explain_failure
from pipedream.capture.placeholder import NumbersNeeded, Placeholder
from pipedream.capture.preserve_state import Attributes, running, seed_generators
from pipedream.capture.record import Recording, record
from pipedream.capture.slice import ModelSlice, SliceTables
from pipedream.capture.split import Refused, build_graph, postpone_returned
from pipedream.capture.structure import map_leaves, walk
from pipedream.core.errors import CaptureError
from pipedream.core.fingerprint import Fingerprint, find_difference
from pipedream.core.model.graph import LayerGraph
from pipedream.core.seeds import layer_seed
from pipedream.core.user_code import source_of, split_arguments, with_place

_TOLERANCE = 1e-4  # of float32 sums in another order; a lost gradient differs by its whole size
_ROW = 1 << 16  # larger tensors are summed by rows: weights for each of their numbers would take as much memory
_LARGE = 1 << 22  # bytes of a parameter whose memory is worth the time to free it at once


def split(model: nn.Module, inputs: Any, devices: Sequence[int], compares: bool) -> tuple[LayerGraph, Refused]:
    """Returns the finest graph that runs, and the refused cuts with their reasons; the model is left as it was.

    Raises:
        CaptureError: the split model's results differ from the model's.
    """
    recording = _record(model, inputs, devices, training=True)
    evaluation: Recording | None = None  # most models run alike in both modes, and need no second recording
    refused: Refused = {}
    replayed: list[str] = []
    attributes = recording.attributes
    rounds = 2 if attributes else 1  # what it keeps from one batch to the next is read in the second
    both_modes = _Trial(model, inputs, devices, compares, rounds).run_both_modes
    while True:  # ends: each round refuses one more cut, replays one more function or records the evaluation
        graph, refused = build_graph(model, recording, refused, replayed, evaluation)
        if not graph.calls:
            return graph, refused
        try:
            parts = both_modes(graph, range(len(graph.layers) + 1))
            if compares:  # with one slice, which is the model, but draws random numbers as the layers do
                _compare(model, both_modes(graph, [0, len(graph.layers)]), parts, recording)
            return graph, refused
        except _EvaluationDiffers as differs:
            if evaluation is not None:
                raise differs.error from differs
            evaluation = _record(model, inputs, devices, False, recording.changed_by_forward)
            postpone_returned(evaluation)
        except _LayerFailed as failed:
            if failed.call in refused:
                raise failed.error from failed
            if isinstance(failed.error, NumbersNeeded) and failed.error.function not in replayed:
                replayed.append(failed.error.function)
            else:
                refused = {**refused, failed.call: _explain_transformed(recording, failed) or str(failed.error)}


class _LayerFailed(Exception):
    """A layer cannot begin with a call."""

    def __init__(self, call: str, error: Exception) -> None:
        super().__init__(call)
        self.call = call
        self.error = error


def _explain_transformed(recording: Recording, failed: _LayerFailed) -> str:
    """Returns what a torch.func in the user's own forward has to do with a failure, or ""."""
    if not (place := recording.find_transformed(failed.call)):
        return ""
    cause = getattr(failed.error, "cause", "") or str(failed.error).partition(". ")[0]
    return (
        f"{place} is inside a torch.func transform (vmap, jvp, grad, ...), which a stage that begins with "
        f"{failed.call!r} would run again, on tensors of earlier stages that have no numbers there ({cause}). Put the "
        "transform and the modules that it calls into a module of its own, which allows cuts before and after it, or "
        f"cut elsewhere than before {failed.call!r}"
    )


class _EvaluationDiffers(Exception):
    """In evaluation mode a model split by the calls and values of training has other results."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _record(
    model: nn.Module,
    inputs: Any,
    devices: Sequence[int],
    training: bool,
    changed_by_forward: frozenset[str] = frozenset(),
) -> Recording:
    with running(model, devices, training), torch.enable_grad():
        args, kwargs = split_arguments(_copy_inputs(inputs))
        try:
            recording = record(model, args, kwargs, changed_by_forward)
        except Exception as error:
            raise explain_failure(model, inputs, training, error) from error
    if recording.changed_by_forward <= changed_by_forward:
        return recording
    # It has to know these buffers from its start: what is computed with them belongs to one stage.
    return _record(model, inputs, devices, training, changed_by_forward | recording.changed_by_forward)


Numbers = dict[str, Fingerprint | None]
Measured = tuple[Numbers, Numbers, Numbers]
"""Fingerprints of outputs, gradients and buffers, so that no second set of gradients needs memory."""


@dataclass(frozen=True)
class _Trial:
    """Runs slices of a model one after the other.

    Attributes:
        compares: fingerprints are taken.
        rounds: batches that follow each other; of all but the last, each slice keeps what it leaves on modules.
    """

    model: nn.Module
    inputs: Any
    devices: Sequence[int]
    compares: bool
    rounds: int

    def run_both_modes(self, graph: LayerGraph, ends: Sequence[int]) -> list[Measured]:
        """Runs the slices in training and in evaluation mode. Raises _LayerFailed."""
        model, measurements = self.model, []
        for training in (True, False):
            with running(model, self.devices, training), torch.enable_grad(), _collecting_gradients(model) as gradients:
                tables = SliceTables(model, graph)
                slices = {first: ModelSlice(model, graph, first, last, tables) for first, last in pairwise(ends)}
                for part in slices.values():
                    part.reseed = lambda call: seed_generators(layer_seed(0, 0, call), self.devices)
                attributes = dict.fromkeys([*slices, -1], Attributes([model]))
                output: dict[str, torch.Tensor] = {}
                for _ in range(self.rounds):
                    output.clear()  # else it would last until the next batch has ended
                    output = self._run(graph, slices, training, attributes)
                if self.compares:
                    measurements.append(_fingerprint_all(model, output, training, gradients))
                del output
            if any(parameter.nbytes >= _LARGE for parameter in model.parameters()):
                gc.collect()  # modules' outputs may refer to each other
                _return_memory()
        return measurements

    def _run(
        self, graph: LayerGraph, slices: Mapping[int, ModelSlice], training: bool, attributes: dict[int, Attributes]
    ) -> dict[str, torch.Tensor]:
        """Runs a batch; `attributes` of the modules are those that each slice last knew, and at -1 the initial ones."""
        value = _copy_inputs(self.inputs)
        for first, part in slices.items():
            attributes[first].restore()  # a stage does not see what another one keeps in its modules
            try:
                value = part(value)
            except CutFailed as error:
                raise _LayerFailed(error.call, error) from error
            except Exception as error:
                if not first:  # it begins as the model does, so no cut is at fault
                    raise explain_failure(self.model, self.inputs, training, error) from error
                raise _LayerFailed(graph.layers[first].name, error) from error
            if self.rounds > 1:
                attributes[first] = Attributes([self.model])
        attributes[-1].restore()
        outputs = {path: leaf for path, leaf in walk(value) if isinstance(leaf, torch.Tensor)}
        missing = {path for path, leaf in outputs.items() if isinstance(leaf, Placeholder)} if not training else set()
        if missing and graph.evaluation is None:
            raise _EvaluationDiffers(CaptureError(f"{min(missing)} of the output is not sent"))
        return {path: leaf for path, leaf in outputs.items() if path not in missing}


def _fingerprint_all(
    model: nn.Module, outputs: dict[str, torch.Tensor], training: bool, gradients: Numbers
) -> Measured:
    numbers: Numbers = {path: fingerprint(leaf) for path, leaf in outputs.items()}
    floats = [leaf for leaf in outputs.values() if leaf.requires_grad] if training else []
    outputs.clear()  # of the caller too: what no backward needs is freed before it
    if floats:
        try:
            spread = _spread_numbers.__wrapped__  # not cached: as large as an output
            weights = [spread(leaf.numel(), leaf.dtype, leaf.device).view(leaf.shape) for leaf in floats]
            torch.autograd.backward(floats, weights)
        except (AttributeError, TypeError) as error:
            raise CaptureError(
                f"the backward of {type(model).__name__} raised {with_place(error)} after its forward had ended; it "
                "may read what the forward has set on a module, as reversible layers do, where in a pipeline that of "
                "another microbatch has set it by then; let the forward keep it on the context of its autograd function"
            ) from error
    return numbers, gradients, {name: fingerprint(buffer) for name, buffer in model.named_buffers()}


def _compare(model: nn.Module, whole: Sequence[Measured], parts: Sequence[Measured], recording: Recording) -> None:
    kind, attributes = type(model).__name__, recording.attributes
    checkpointed = any(call.whole == "checkpointed" for call in recording.root.every())
    cause = "the forward does something that cannot be seen from outside: put it into a module of its own"
    if attributes:
        names = ", ".join(map(repr, attributes[:3]))
        cause = (
            f"the forward sets {names}, perhaps to read it with the next batch, when stages before it do not know it: "
            f"set and read it in one module without modules inside, or reset it for each batch; or else {cause}"
        )
    for mode, *both in zip(("training", "evaluation"), whole, parts, strict=True):
        for what, expected, actual in zip(("output", "gradient", "buffer"), *both, strict=True):
            if (what, mode) == ("output", "evaluation"):  # what only training sends may lack
                expected = {name: numbers for name, numbers in expected.items() if name in actual}
            difference = find_difference(expected, actual, _TOLERANCE)
            if difference is None:
                continue
            name = difference.name
            if what == "gradient" and difference.actual is None:
                raise CaptureError(_describe_lost_gradient(model, name))
            if what == "buffer" and checkpointed:
                cause = "a checkpoint writes it again in the backward: leave it out, use recompute='always'"
            error = CaptureError(
                f"the layers of {kind}, run one after the other, should give what the model gives, but in {mode} mode "
                f"the {what} {name!r} differs ({difference.describe('in its layers', 'in the model')}); {cause}"
            )
            raise error if mode == "training" else _EvaluationDiffers(error)


def _describe_lost_gradient(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    module = model.get_submodule(path)
    place = source_of(type(module).forward)
    return (
        f"the layers of {type(model).__name__} lose the gradient of the parameter {name!r} of the module "
        f"{path or type(model).__name__!r} ({type(module).__name__}{', ' * bool(place)}{place}), which the model "
        "itself has. Usually it is read where that cannot be seen: in an extension or a custom autograd function, by "
        "a module that keeps a reference to it or to a tensor made from it, or in an object that passes from one "
        "module to another. Read it in the forward of the module that holds it, and pass tensors on as arguments"
    )


@contextmanager
def _collecting_gradients(model: nn.Module) -> Iterator[Numbers]:
    """Collects the fingerprint of each gradient, and frees it."""
    numbers: Numbers = {}

    def collect(name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return  # the forward has frozen it
            numbers[name] = fingerprint(parameter.grad)  # so far: a reentrant checkpoint has a backward of its own
            if parameter.nbytes >= _LARGE:
                parameter.grad = None
                _return_memory()  # of the activations

        return hook

    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_leaf:
            watch: Any = parameter.register_post_accumulate_grad_hook  # torch gives it no types
            handles.append(watch(collect(name)))
    try:
        yield numbers
    finally:
        for handle in handles:
            handle.remove()


def _return_memory() -> None:
    """Returns freed memory to the system; glibc keeps what lies between blocks in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def fingerprint(tensor: torch.Tensor, factor: float = 1.0) -> Fingerprint:
    """Returns sums in float64, or in float32 for large tensors of at most that precision, to copy none of float32.

    Args:
        factor: by which the tensor was multiplied; 0 is taken for 1, as all sums are then 0.
    """
    with torch.no_grad():
        dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
        flat = dense.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        if flat.dtype != torch.float64:
            flat = flat.to(torch.float64) if flat.numel() < _ROW else flat.float()
        rows = flat.numel() // _ROW
        whole, rest = flat[: rows * _ROW].view(rows, _ROW), flat[rows * _ROW :]
        spread = partial(_spread_numbers, dtype=flat.dtype, device=flat.device)
        weighted = (whole @ spread(_ROW)) @ spread(rows) + rest @ spread(rest.numel())
        sums = float(flat.sum()), float(weighted), float(torch.linalg.vector_norm(flat, 1))
        return tuple(number / (factor or 1.0) for number in sums)


@lru_cache(maxsize=8)
def _spread_numbers(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers that differ from place to place, without a random generator."""
    numbers = torch.arange(count, device=device, dtype=torch.float64)
    # Multiples of an irrational number spread evenly; from 0.5 on, so that no place counts for nothing.
    return numbers.mul_(0.7548776662).frac_().add_(0.5).to(dtype)


def _copy_inputs(inputs: Any) -> Any:
    def copy(_: str, leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return map_leaves(copy, inputs)

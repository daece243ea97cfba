"""Compares a model that is split into all its layers with the model itself: outputs, gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pipedream.capture.chain import does_not_run
from pipedream.capture.placeholder import NumbersNeeded
from pipedream.capture.preserve_state import preserve_state, seed_generators
from pipedream.capture.record import Recording, record
from pipedream.capture.slice import CutFailed, ModelSlice, arguments_of
from pipedream.capture.split import Refused, graph_of
from pipedream.capture.structure import map_leaves, walk
from pipedream.core.errors import CaptureError
from pipedream.core.model.graph import LayerGraph
from pipedream.core.seeds import layer_seed

__all__ = ["split"]

_TOLERANCE = 1e-4  # of float32 sums in another order; a lost gradient differs by its whole size


def split(model: nn.Module, inputs: Any, devices: Sequence[int], compares: bool) -> tuple[LayerGraph, Refused]:
    """Returns the finest graph that runs, and the refused cuts with their reasons; the model is left as it was.

    Raises:
        CaptureError: the split model does not give what the model gives.
    """
    recording = _record(model, inputs, devices)
    if recording.moving:
        recording = _record(model, inputs, devices, recording.moving)
    refused: Refused = {}
    replayed: list[str] = []
    graph, refused = graph_of(model, recording, refused, replayed)
    if not graph.calls:
        return graph, refused
    while True:
        failed = _first_failure(model, graph, inputs, devices)
        if failed is None:
            break
        call, error = failed
        if isinstance(error, NumbersNeeded) and error.function not in replayed:
            replayed.append(error.function)
        else:
            refused = {**refused, call: str(error)}
        graph, refused = graph_of(model, recording, refused, replayed)
    del recording
    if compares:
        _compare(model, graph, inputs, devices)
    return graph, refused


def _record(model: nn.Module, inputs: Any, devices: Sequence[int], moving: frozenset[str] = frozenset()) -> Recording:
    with preserve_state([model], devices), torch.enable_grad():
        _set_mode(model, True)
        args, kwargs = arguments_of(_fresh(inputs))
        try:
            return record(model, args, kwargs, moving)
        except Exception as error:
            raise does_not_run(model, True, error) from error


def _first_failure(
    model: nn.Module, graph: LayerGraph, inputs: Any, devices: Sequence[int]
) -> tuple[str, Exception] | None:
    """Runs the layers one by one in both modes; returns the first cut at which that fails."""
    for training in (True, False):
        with preserve_state([model], devices), torch.enable_grad():
            _set_mode(model, training)
            value = _fresh(inputs)
            for layer in range(len(graph.layers)):
                part = _slice(model, graph, layer, layer + 1, devices)
                try:
                    value = _detached(part(value))
                except CutFailed as error:
                    return error.call, error
                except Exception as error:
                    if not layer:
                        raise does_not_run(model, training, error) from error
                    return graph.layers[layer].name, error
    return None


def _compare(model: nn.Module, graph: LayerGraph, inputs: Any, devices: Sequence[int]) -> None:
    kind = type(model).__name__
    for training in (True, False):
        mode = "training" if training else "evaluation"
        whole = _measured(model, graph, [0, len(graph.layers)], inputs, training, devices)
        parts = _measured(model, graph, range(len(graph.layers) + 1), inputs, training, devices)
        for what, wanted, found in zip(("output", "gradient", "buffer"), whole, parts, strict=True):
            for name in wanted.keys() | found.keys():
                if not _close(wanted.get(name), found.get(name)):
                    raise CaptureError(
                        f"the layers of {kind}, run one after the other, should give what the model gives, but in "
                        f"{mode} mode the {what} {name!r} differs ({_text(wanted.get(name))} in the model, "
                        f"{_text(found.get(name))} in its layers); the forward does something that cannot be seen from "
                        "outside: put it into a module of its own"
                    )


Numbers = dict[str, tuple[float, ...] | None]


def _measured(
    model: nn.Module, graph: LayerGraph, ends: Sequence[int], inputs: Any, training: bool, devices: Sequence[int]
) -> tuple[Numbers, Numbers, Numbers]:
    """Fingerprints of outputs, gradients and buffers, so that no second set of gradients needs memory."""
    with preserve_state([model], devices), torch.enable_grad(), _gradients(model) as gradients:
        _set_mode(model, training)
        value = _fresh(inputs)
        for first, last in pairwise(ends):
            value = _slice(model, graph, first, last, devices)(value)
        outputs = {path: leaf for path, leaf in walk(value) if isinstance(leaf, torch.Tensor)}
        del value
        if training:
            floats = [leaf for leaf in outputs.values() if leaf.requires_grad]
            if floats:
                torch.autograd.backward(floats, [_weights(leaf) for leaf in floats])
        found: Numbers = {path: _fingerprint(leaf) for path, leaf in outputs.items()}
        buffers: Numbers = {name: _fingerprint(buffer) for name, buffer in model.named_buffers()}
        return found, gradients, buffers


@contextmanager
def _gradients(model: nn.Module) -> Iterator[Numbers]:
    """Collects the fingerprint of each gradient, and frees it."""
    found: Numbers = {}
    saved = [(parameter, parameter.grad) for parameter in model.parameters()]

    def collect(name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            found[name] = _fingerprint(parameter.grad)
            parameter.grad = None

        return hook

    handles = []
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if parameter.requires_grad and parameter.is_leaf:
            watch: Any = parameter.register_post_accumulate_grad_hook
            handles.append(watch(collect(name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for parameter, own in saved:
            parameter.grad = own


def _fingerprint(tensor: torch.Tensor) -> tuple[float, ...]:
    """Sum, weighted sum, and the sum of the sizes, which is the scale of the others."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        flat = flat.to(torch.float64) if flat.numel() < 1 << 16 else flat.float()
        return float(flat.sum()), float((flat * _weights(flat)).sum()), float(flat.abs().sum())


def _weights(like: torch.Tensor) -> torch.Tensor:
    """Numbers that differ from place to place, without a random generator."""
    return (
        torch.arange(like.numel(), device=like.device, dtype=torch.float64)
        .mul_(0.7548776662)
        .frac()
        .add_(0.5)
        .to(like.dtype)
        .view(like.shape)
    )


def _close(a: tuple[float, ...] | None, b: tuple[float, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    scale = max(a[2], b[2])
    return all(x == y or abs(x - y) <= _TOLERANCE * scale or (x != x and y != y) for x, y in zip(a, b, strict=True))


def _text(numbers: tuple[float, ...] | None) -> str:
    return "none" if numbers is None else f"sum {numbers[0]:.6g}"


def _slice(model: nn.Module, graph: LayerGraph, first: int, last: int, devices: Sequence[int]) -> ModelSlice:
    part = ModelSlice(model, graph, first, last)
    part.reseed = partial(_reseed, devices)
    return part


def _reseed(devices: Sequence[int], call: str) -> None:
    seed_generators(layer_seed(0, 0, call), devices)


def _set_mode(model: nn.Module, training: bool) -> None:
    for module in model.modules():
        module.training = training


def _fresh(inputs: Any) -> Any:
    return map_leaves(lambda _, leaf: _clone(leaf), inputs)


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _detached(bundle: Any) -> Any:
    if not isinstance(bundle, dict) or "values" not in bundle:
        return bundle
    # A copy, because a layer may work in place, which autograd does not allow on a leaf.
    return {**bundle, "values": [t.detach().requires_grad_(t.requires_grad).clone() for t in bundle["values"]]}

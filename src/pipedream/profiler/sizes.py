"""Bytes of outputs and parameters, bytes that autograd keeps, and live bytes over time."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.profiler import record_function

from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import TiedParameters
from pipedream.core.model.weight_shapes import Matrices, join_matrices
from pipedream.tensors.outside_func import HooksOutsideFunc
from pipedream.tensors.parts import local_part
from pipedream.tensors.trees import tree_leaves

_MARK = "pipedream: a section begins"


def count_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _list_own_parameters(layers: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Yields each layer's parameters without those of earlier layers."""
    counted: set[int] = set()
    for layer in layers:
        row = [parameter for parameter in layer.parameters() if id(parameter) not in counted]
        counted |= set(map(id, row))
        yield row


def parameter_bytes(layers: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Returns the bytes of each layer's own parameters, and of frozen ones; shared ones count in the first only."""
    rows = _list_own_parameters(layers)
    return [(sum(p.nbytes for p in row), sum(p.nbytes for p in row if not p.requires_grad)) for row in rows]


def tied_parameters(graph: LayerGraph, parameters: Mapping[str, nn.Parameter]) -> tuple[TiedParameters, ...]:
    """Returns the parameters that several layers use, by the names that the layers list.

    Those of the same layers are one, except that frozen ones are apart.

    Args:
        parameters: under all of their names; others in `Layer.parameters` are buffers.
    """
    users: dict[int, list[int]] = {}
    first: dict[int, str] = {}
    for index, layer in enumerate(graph.layers):
        for name in layer.parameters:
            if name in parameters:
                key = id(parameters[name])
                first.setdefault(key, name)
                if index not in users.setdefault(key, []):
                    users[key].append(index)
    groups: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for key, indices in users.items():
        if len(indices) > 1:
            groups.setdefault((tuple(indices), parameters[first[key]].requires_grad), []).append(first[key])
    return tuple(
        TiedParameters(tuple(names), indices, sum(parameters[name].nbytes for name in names), trained)
        for (indices, trained), names in groups.items()
    )


def largest_parameter_bytes(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Returns the bytes of each layer's largest trained parameter."""
    return tuple(max([0, *(p.nbytes for p in layer.parameters() if p.requires_grad)]) for layer in layers)


def list_matrices(layers: Sequence[nn.Module]) -> list[tuple[Matrices, ...]]:
    """Returns each layer's own trained weights of two or more dimensions; see `parameter_bytes`."""
    weights = ([p for p in row if p.requires_grad and p.ndim > 1] for row in _list_own_parameters(layers))
    return [
        join_matrices(Matrices(p.shape[0], p.numel() // max(p.shape[0], 1), 1, p.nbytes) for p in row)
        for row in weights
    ]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a layer's output and of what autograd keeps; see `LayerProfile`."""

    output_bytes: int
    activation_bytes: int
    arriving_bytes: int
    leaving_bytes: int


def measure_sizes(
    layers: Sequence[nn.Module],
    sample: Any,
    run_layer: Callable[[int, Any], Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> tuple[tuple[Sizes, ...], int]:
    """Returns each layer's sizes, and the bytes that autograd keeps from the loss.

    A storage counts once, in the first layer that saves a tensor in it: a ReLU's output counts there, not in the Linear
    that saves it as its input. Parameters and buffers do not count; copies of them that autocast makes do.
    """
    of_layers = (tensor for layer in layers for tensor in [*layer.parameters(), *layer.buffers()])
    owned = {tensor.untyped_storage()._cdata for tensor in of_layers if tensor.layout is torch.strided}
    storages: dict[int, torch.UntypedStorage] = {}
    savers: dict[int, list[int]] = {}
    index = 0
    saved: list[list[torch.Tensor]] = []  # read if the forward takes derivatives, as of an energy

    def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
        local = local_part(tensor)
        if local.layout is torch.strided and (storage := local.untyped_storage())._cdata not in owned:
            storages.setdefault(storage._cdata, storage)
            savers.setdefault(storage._cdata, []).append(index)
        saved.append([tensor])
        return saved[-1]

    outputs, leaving = [], []
    arguments, value = sample, None
    try:
        with torch.enable_grad(), HooksOutsideFunc(pack, itemgetter(0)):
            for index in range(len(layers)):
                value = run_layer(index, arguments)
                arguments = (value,)
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
                outputs.append(sum(leaf.nbytes for leaf in tensors))
                new = [leaf for leaf in tensors if leaf.untyped_storage()._cdata not in storages]
                leaving.append(count_storage_bytes(new))
            index = len(layers)
            if loss is not None:
                loss(value)
    finally:
        for box in saved:
            box.clear()  # or a tensor's graph would keep it, and itself
    first = [0] * (len(layers) + 1)
    again = [0] * (len(layers) + 1)
    for number, layers_of in savers.items():
        size = storages[number].nbytes()
        first[layers_of[0]] += size
        for later in range(layers_of[0] + 1, min(layers_of[-1], len(layers) - 1) + 1):
            again[later] += size
    rows = zip(outputs, first, again, leaving, strict=False)
    return tuple(Sizes(*row) for row in rows), first[-1]


@dataclass(frozen=True)
class Section:
    """Live bytes in addition to those when the watch began."""

    start_bytes: int
    peak_bytes: int

    @property
    def rise_bytes(self) -> int:
        return self.peak_bytes - self.start_bytes


class Allocations:
    """Watches the allocations of this thread; `mark` begins the next section. `sections` is complete after the context.

    On a CPU, freeing a tensor that existed before is not seen: keep references to everything that the work does not
    own. On a GPU the caching allocator counts blocks of 512 bytes.

    Only one watch, or profiler of torch, can run at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._collects = False
        self.sections: list[Section] = []

    @staticmethod
    def is_free() -> bool:
        return not torch._C._autograd._profiler_enabled()

    def __enter__(self) -> Self:
        # On a CPU only what is young: a search of all objects, a million of torch's, takes a tenth of a second.
        gc.collect(2 if self._device.type == "cuda" else 1)
        self._collects = gc.isenabled()
        gc.disable()  # so that only the work itself frees memory in a section
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._first = self._start = torch.cuda.memory_allocated(self._device)
        else:
            parts = torch._C._profiler
            config = parts.ProfilerConfig(
                parts.ProfilerState.CPU, False, True, False, False, False, parts._ExperimentalConfig()
            )
            torch._C._autograd._enable_profiler_legacy(config)
        return self

    def mark(self) -> None:
        if self._device.type == "cuda":
            self._close()
        else:
            with record_function(_MARK):
                pass

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self._close()
        else:
            self.sections = _split_sections(torch._C._autograd._disable_profiler_legacy())
        if self._collects:
            gc.enable()

    def _close(self) -> None:
        torch.cuda.synchronize(self._device)
        peak, now = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
        self.sections.append(Section(self._start - self._first, peak - self._first))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = now


def _split_sections(threads: Any) -> list[Section]:
    sections, start, peak, live = [], 0, 0, 0
    for event in (event for events in threads for event in events):
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            peak = max(peak, live)
        elif event.kind() == "push" and event.name() == _MARK:
            sections.append(Section(start, peak))
            start = peak = live
    return [*sections, Section(start, peak)]

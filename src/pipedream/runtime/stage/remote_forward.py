"""Remote forwards: forwards of a stage on another rank than that of its weights, which are fetched in one message.

The message holds all that the layers read: one version of the weights, untrained weights, and buffers. They are in the
modules only while a forward runs: in one process the stage itself uses the same modules.

A remote forward keeps nothing. Its input is sent to the stage's own rank, where the backward repeats the forward with
the same numbers (`recompute`); this second forward is the one that changes the buffers. Both process the microbatches
in order, from the state after the last update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from pipedream.runtime.comm.message import Message, MessageFormat, write
from pipedream.runtime.stage.recompute import ForwardFunction, run_without_graph
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.versions import WeightSet


class WeightPacket:
    """The format in which a stage's tensors are sent, as uint8[n]; the module may be on the meta device."""

    def __init__(self, module: StageModule, low_precision: Mapping[str, torch.dtype]) -> None:
        self._names = tuple(module.handles)
        trained = {id(handle) for handle in module.handles.values()}
        # Slots that share a tensor continue to share it.
        slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for inner in {id(m): m for _, layer in module.layers for m in layer.modules()}.values():
            both: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
            for tensors in both:
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in trained:
                        slots.setdefault(id(tensor), []).append((tensors, name))
        self._slots = list(slots.values())
        sent = [_make_like(handle, low_precision.get(name)) for name, handle in module.handles.items()]
        self._format = MessageFormat.of(
            Message(0, tensors=(*sent, *(_make_like(slots[0][0][slots[0][1]]) for slots in self._slots)))
        )

    def pack(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensors = [leaves[name] for name in self._names] + [s[0][0][s[0][1]] for s in self._slots]
        device = tensors[0].device if tensors else torch.device("cpu")
        payload = torch.empty(self._format.payload_bytes, dtype=torch.uint8, device=device)
        write(tensors, self._format.tensors_in(payload))
        return payload

    def unpack(self, payload: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Returns the weights by name, as leaves, and the other slots' tensors; all are views of the payload."""
        tensors = [tensor for tensor in self._format.tensors_in(payload) if tensor is not None]
        count = len(self._names)
        leaves = {name: leaf.requires_grad_() for name, leaf in zip(self._names, tensors[:count], strict=True)}
        return leaves, tensors[count:]

    @contextmanager
    def installed(self, others: list[torch.Tensor]) -> Iterator[None]:
        """In this context others are in the untrained slots; updates the list if layers replace them."""
        originals = [[holder[name] for holder, name in slots] for slots in self._slots]
        for slots, tensor in zip(self._slots, others, strict=True):
            for holder, name in slots:
                holder[name] = tensor
        try:
            yield
        finally:
            others[:] = [slots[0][0][slots[0][1]] for slots in self._slots]
            for slots, before in zip(self._slots, originals, strict=True):
                for (holder, name), tensor in zip(slots, before, strict=True):
                    holder[name] = tensor


class _WithoutGraph:
    def forward(self, saved: SavedForward, message: Message, run: ForwardFunction) -> Message:
        result = run_without_graph(run, message)
        saved.graph_inputs = ()
        saved.outputs = ()
        return result


class RemoteForward:
    """A stage whose forwards run here on fetched weights. Life: `fetch`, forwards, `drop`."""

    def __init__(self, module: StageModule, weight_packet: WeightPacket) -> None:
        self.module = module
        self.recomputation = _WithoutGraph()
        self.next_forward = 0
        self._packet = weight_packet
        self._weights: WeightSet | None = None
        self._others: list[torch.Tensor] = []

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        assert self._weights is not None, "a forward reads weights that are not fetched"
        return self._weights.leaves

    def empty(self) -> None:
        """Drops the modules' own tensors, which belong to another rank."""
        for name, handle in self.module.handles.items():
            self.module.handles[name] = nn.Parameter(torch.empty_like(handle, device="meta"))

    def fetch(self, message: Message) -> None:
        assert self._weights is None, "weights are fetched where others still are"
        (payload,) = message.tensors
        assert payload is not None
        leaves, self._others = self._packet.unpack(payload)
        self._weights = WeightSet(message.version, leaves)

    def drop(self) -> None:
        self._weights = None
        self._others = []

    def read(self, version: int) -> tuple[WeightSet, int]:
        """Returns the weights for a forward, and their version, which must be `version`."""
        assert self._weights is not None, "a forward reads weights that are not fetched"
        assert self._weights.version == version, f"version {self._weights.version} was fetched, not {version}"
        return self._weights, version

    def read_again(self, saved: SavedForward) -> WeightSet:
        """A forward is recomputed only on the stage's own rank."""
        raise AssertionError(f"the forward of microbatch {saved.microbatch} was to be recomputed on a remote rank")

    def forward(self, value: Any, read: WeightSet, microbatch: int, first: bool) -> Any:
        return self.module.forward(value, read.leaves, microbatch, first)

    def forward_context(self) -> AbstractContextManager[None]:
        return self._packet.installed(self._others)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        flags = self.module.train(False)
        try:
            with self._packet.installed(self._others):
                yield
        finally:
            for module, training in flags:
                module.training = training


def _make_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta")

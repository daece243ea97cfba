"""A stage at work on a rank where its weights do not live: they come in one message, and go again.

What travels is all that the layers read: the weights at a version, those that are not trained, and the buffers. Between
a fetch and the last forward that it is for they stand here; in the modules' slots only while a forward runs, so that in
one process guests and the home share the user's modules.

A forward here keeps nothing. What it has read goes home, and the backward there does it again (`recompute`). It gives
the same numbers to the bit, for the same reasons but one: here the buffers move on a set that is dropped, so that the
second forward reads them as they were, and is the one that moves them. Both go through the microbatches in order, from
what the last update left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from pipedream.runtime.comm.message import Message, TensorSpec, dimension_order, join_payload, split_payload
from pipedream.runtime.stage.recompute import ForwardFunction, without_graph
from pipedream.runtime.stage.stage_module import SavedForward, StageModule
from pipedream.runtime.stage.versions import WeightSet

__all__ = ["RemoteForward", "WeightPacket"]


class WeightPacket:
    """What travels of a stage, as uint8[n].

    Args:
        module: of the stage; its tensors may be on the meta device.
        low_precision: name -> type of the leaf, for weights that autocast would cast.
    """

    def __init__(self, module: StageModule, low_precision: Mapping[str, torch.dtype]) -> None:
        self._names = tuple(module.handles)
        trained = {id(handle) for handle in module.handles.values()}
        # Slots that share a tensor go on sharing it.
        slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for inner in {id(m): m for _, layer in module.layers for m in layer.modules()}.values():
            both: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
            for held in both:
                for name, tensor in held.items():
                    if tensor is not None and id(tensor) not in trained:
                        slots.setdefault(id(tensor), []).append((held, name))
        self._slots = list(slots.values())
        self._specs = [_spec(handle, low_precision.get(name)) for name, handle in module.handles.items()]
        self._specs += [_spec(held[0][0][held[0][1]]) for held in self._slots]

    def pack(self, leaves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns weights, and what stands in the modules beside them."""
        tensors = [leaves[name].detach() for name in self._names] + [s[0][0][s[0][1]].detach() for s in self._slots]
        whole = [tensor.to(spec.dtype) for tensor, spec in zip(tensors, self._specs, strict=True)]
        device = whole[0].device if whole else torch.device("cpu")
        return join_payload(Message(0, tensors=tuple(whole)), device)

    def unpack(self, payload: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Returns the weights by name, as leaves, and what goes into the other slots: views of the payload."""
        arrived = split_payload(Message(0), list(self._specs), payload).tensors
        found = [tensor for tensor in arrived if tensor is not None]
        count = len(self._names)
        leaves = {name: leaf.requires_grad_() for name, leaf in zip(self._names, found[:count], strict=True)}
        return leaves, found[count:]

    @contextmanager
    def installed(self, others: list[torch.Tensor]) -> Iterator[None]:
        """Lets tensors stand in the slots of what is not trained; what layers put there in their stead is put into the
        list."""
        own = [[held[name] for held, name in slots] for slots in self._slots]
        for slots, tensor in zip(self._slots, others, strict=True):
            for held, name in slots:
                held[name] = tensor
        try:
            yield
        finally:
            others[:] = [slots[0][0][slots[0][1]] for slots in self._slots]
            for slots, before in zip(self._slots, own, strict=True):
                for (held, name), tensor in zip(slots, before, strict=True):
                    held[name] = tensor


class _WithoutGraph:
    """Runs forwards that keep nothing: their backwards are elsewhere."""

    def forward(self, held: SavedForward, message: Message, run: ForwardFunction) -> Message:
        """Runs one; see `Recomputation.forward`."""
        result = without_graph(run, message)
        held.graph_inputs, held.outputs = (), ()
        return result


class RemoteForward:
    """A stage whose forwards run here on weights that are fetched.

    Life: `fetch`, then forwards, then `drop`.

    Attributes:
        module: the layers.
        recomputation: what keeps nothing of a forward.
        next_forward: microbatch of its next forward.
    """

    def __init__(self, module: StageModule, weight_packet: WeightPacket) -> None:
        self.module = module
        self.recomputation = _WithoutGraph()
        self.next_forward = 0
        self._packet = weight_packet
        self._weights: WeightSet | None = None
        self._others: list[torch.Tensor] = []

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The weights that were fetched."""
        assert self._weights is not None, "a forward reads weights that are not fetched"
        return self._weights.leaves

    def empty(self) -> None:
        """Lets go of the tensors that stand in the modules while nothing runs, for they live elsewhere."""
        for name, handle in self.module.handles.items():
            self.module.handles[name] = nn.Parameter(torch.empty_like(handle, device="meta"))

    def fetch(self, message: Message) -> None:
        """Takes weights in; those before must be dropped."""
        assert self._weights is None, "weights are fetched where others still are"
        (payload,) = message.tensors
        assert payload is not None
        leaves, self._others = self._packet.unpack(payload)
        self._weights = WeightSet(message.version, leaves)

    def drop(self) -> None:
        """Lets go of the weights."""
        self._weights, self._others = None, []

    def read(self, version: int) -> tuple[WeightSet, int]:
        """Returns the weights for a forward of a version, and which version they are."""
        assert self._weights is not None, "a forward reads weights that are not fetched"
        assert self._weights.version == version, f"version {self._weights.version} was fetched, not {version}"
        return self._weights, version

    def read_again(self, held: SavedForward) -> WeightSet:
        """Raises AssertionError: a forward is done again at home."""
        raise AssertionError(f"the forward of microbatch {held.microbatch} was to be done again away from home")

    def forward(self, value: Any, read: WeightSet, microbatch: int, first: bool) -> Any:
        """Runs the layers; see `StageModule.forward`."""
        return self.module.forward(value, read.leaves, microbatch, first)

    def forward_context(self) -> AbstractContextManager[None]:
        """Returns the context of a forward: what is not trained stands in the modules."""
        return self._packet.installed(self._others)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The context of a forward without training."""
        flags = self.module.train(False)
        try:
            with self._packet.installed(self._others):
                yield
        finally:
            for module, training in flags:
                module.training = training


def _spec(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    return TensorSpec(dtype or tensor.dtype, tuple(tensor.shape), dimension_order(tensor))

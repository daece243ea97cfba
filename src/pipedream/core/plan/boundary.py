"""The Boundary between two stages: how the tensors that cross it are sharded on both sides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.plan.cost import Numbers
from pipedream.core.plan.layout import Layout
from pipedream.core.plan.mesh import Mesh

_MARK = "|"  # begins no structure of `runtime.comm.values`


def boundary_bytes(sender_ranks: int, sent: Numbers, receiver_ranks: int, received: Numbers) -> Numbers:
    """Returns the bytes that the busiest rank at a boundary sends, or receives, for a minibatch: activations one way.

    Each rank receives its part. Those that send it, activations or gradients, take turns (`mesh.pieces`).

    Args:
        sent, received: bytes of the part that a rank of the one stage, and of the other, has of the value.
    """
    forwards, back = received * receiver_ranks / sender_ranks, sent * sender_ranks / receiver_ranks
    return np.ceil(np.maximum(np.maximum(sent, received), np.maximum(forwards, back)))


class Crossing(NamedTuple):
    """How a tensor is sharded where it is sent and where it is received.

    Attributes:
        shape: shape of the whole tensor.
        sent, received: placements, see `Layout.placements`.
    """

    shape: tuple[int, ...]
    sent: tuple[int | None, ...]
    received: tuple[int | None, ...]

    def reversed(self) -> Crossing:
        """Returns that of the tensor's gradient."""
        return Crossing(self.shape, self.received, self.sent)


@dataclass(frozen=True)
class Boundary:
    """Two stages that may have different meshes.

    Attributes:
        layer: last layer of the first stage; the layout may name the dimensions of its output.
        sender, receiver: the meshes.
    """

    layout: Layout
    layer: str
    sender: Mesh
    receiver: Mesh

    def crossings(self, shapes: Sequence[Sequence[int]], samples: int) -> list[Crossing]:
        """Returns how each tensor crosses; names apply to those with as many dimensions.

        Raises:
            PlanError: no tensor has as many dimensions as names, or the layout is not legal for one.
        """
        names, tensor = self.layout.output_names(self.layer), f"the output of {self.layer!r}"
        count = len((names or "").split())
        if names is not None and count not in map(len, shapes):
            sizes = ", ".join(str(tuple(shape)) for shape in shapes)
            raise PlanError(
                f"{tensor} has {count} names ({names}), but its shape is {sizes}; name each dimension once, in order"
            )
        crossings = []
        for shape in shapes:
            words = names if len(shape) == count else None
            sent, received = (
                self.layout.boundary(words, shape, samples, mesh, tensor) for mesh in (self.sender, self.receiver)
            )
            crossings.append(Crossing(tuple(shape), sent, received))
        return crossings

    def whole(self, shape: Sequence[int]) -> Crossing:
        """Returns the crossing of a tensor that all ranks of both stages have."""
        sent, received = ((None,) * len(mesh.dimensions) for mesh in (self.sender, self.receiver))
        return Crossing(tuple(shape), sent, received)


def with_crossings(structure: str, crossings: Sequence[Crossing]) -> str:
    """Returns the structure of a message with the crossings of its tensors, for `read_crossings`."""
    return f"{_MARK}{json.dumps(crossings)}{_MARK}{structure}" if crossings else structure


@lru_cache(maxsize=1024)
def read_crossings(structure: str) -> tuple[tuple[Crossing, ...], str]:
    """Returns the crossings, () if there are none, and the structure without them."""
    if not structure.startswith(_MARK):
        return (), structure
    _, text, rest = structure.split(_MARK, 2)
    return tuple(Crossing(*map(tuple, row)) for row in json.loads(text)), rest

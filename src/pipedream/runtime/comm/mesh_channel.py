"""Channels between workers whose meshes differ: each rank receives its part of every tensor, each element once.

Rank c of the receiving worker gets every message from rank c % n of the n sending ones, and its pieces of the tensors
from whichever has them (`core.plan.mesh.pieces`). Both ends know these from the cuts that travel in the structure of
the message. Between equal meshes rank c sends to rank c, and none of this is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from pipedream.core.plan.boundary import Cut, cuts_of
from pipedream.core.plan.mesh import Box, Mesh, Piece, box_of, pieces
from pipedream.runtime.comm.channel import Receiver, RemoteReceiver, Sender
from pipedream.runtime.comm.message import Message


@dataclass(frozen=True)
class MeshPair:
    """The meshes of two workers that exchange messages."""

    sender: Mesh
    receiver: Mesh

    def source_of(self, receiver: int) -> int:
        """Returns the rank from which another gets every message."""
        return receiver % self.sender.size

    def pieces(self, cut: Cut) -> tuple[Piece, ...]:
        return _list_pieces(self, cut)


@lru_cache(maxsize=1024)
def _list_pieces(pair: MeshPair, cut: Cut) -> tuple[Piece, ...]:
    return tuple(pieces(cut.shape, pair.sender, cut.sent, pair.receiver, cut.received))


def _locate_part(mesh: Mesh, place: int, shape: tuple[int, ...], placements: tuple[int | None, ...]) -> Box:
    return box_of(shape, placements, list(mesh.dimensions.values()), mesh.coordinates()[place])


def _slice_within(box: Box, around: Box) -> tuple[slice, ...]:
    return tuple(
        slice(inner.start - all_.start, inner.stop - all_.start) for inner, all_ in zip(box, around, strict=True)
    )


class MeshSender(Sender):
    """One rank's end.

    Args:
        place: of this rank in its mesh.
        peers: ends for the ranks of the other worker.
    """

    def __init__(self, pair: MeshPair, place: int, peers: Mapping[int, Sender]) -> None:
        self._pair = pair
        self._place = place
        self._peers = peers

    def send(self, message: Message) -> None:
        cuts, _ = cuts_of(message.structure)
        for receiver, peer in self._peers.items():
            is_source = self._pair.source_of(receiver) == self._place
            if not cuts and is_source:
                peer.send(message)
                continue
            mine = [self._find_box(cut, receiver) for cut in cuts]
            if is_source or any(box is not None for box in mine):
                tensors = [
                    self._select_part(tensor, cut, box, is_source)
                    for tensor, cut, box in zip(message.tensors, cuts, mine, strict=True)
                ]
                peer.send(replace(message, tensors=tuple(tensors)))

    def _find_box(self, cut: Cut, receiver: int) -> Box | None:
        ends = self._place, receiver
        return next((piece.box for piece in self._pair.pieces(cut) if (piece.sender, piece.receiver) == ends), None)

    def _select_part(
        self, tensor: torch.Tensor | None, cut: Cut, box: Box | None, is_source: bool
    ) -> torch.Tensor | None:
        if tensor is None:
            return None
        if box is None:
            return tensor.new_empty(0) if is_source else None  # says the type to a rank whose part is empty
        stored_box = _locate_part(self._pair.sender, self._place, cut.shape, cut.sent)
        return tensor if box == stored_box else tensor[_slice_within(box, stored_box)]

    def drain_begin(self) -> None:
        for peer in self._peers.values():
            peer.drain_begin()

    def drain(self) -> None:
        for peer in self._peers.values():
            peer.drain()

    @property
    def sent_bytes(self) -> int:
        return sum(peer.sent_bytes for peer in self._peers.values())


class MeshReceiver(RemoteReceiver):
    """One rank's other end.

    Args:
        place: of this rank in its mesh.
        peers: ends for the ranks of the other worker.
    """

    def __init__(self, pair: MeshPair, place: int, peers: Mapping[int, Receiver]) -> None:
        self._pair = pair
        self._place = place
        self._peers = peers

    def result(self) -> Message:
        source = self._pair.source_of(self._place)
        message = self._peers[source].receive().result()
        cuts, _ = cuts_of(message.structure)
        mine = [[piece for piece in self._pair.pieces(cut) if piece.receiver == self._place] for cut in cuts]
        arrived = {source: message.tensors}
        for sender in sorted({piece.sender for row in mine for piece in row} - {source}):
            arrived[sender] = self._peers[sender].receive().result().tensors
        if cuts:  # nobody else has seen the message
            message.tensors = tuple(
                None
                if some is None
                else self._join_parts(some, cut, [(piece.box, arrived[piece.sender][i]) for piece in row])
                for i, (some, cut, row) in enumerate(zip(message.tensors, cuts, mine, strict=True))
            )
        return message

    def _join_parts(
        self, some: torch.Tensor, cut: Cut, parts: Iterable[tuple[Box, torch.Tensor | None]]
    ) -> torch.Tensor:
        """`some` has the type and the device of the tensor."""
        stored_box = _locate_part(self._pair.receiver, self._place, cut.shape, cut.received)
        whole: torch.Tensor | None = None
        for box, tensor in parts:
            assert tensor is not None, "ranks of one worker differ in which gradients exist"
            if box == stored_box:
                return tensor
            whole = some.new_empty([len(side) for side in stored_box]) if whole is None else whole
            whole[_slice_within(box, stored_box)] = tensor
        return some.new_empty([len(side) for side in stored_box]) if whole is None else whole

    def drain(self) -> None:
        for peer in self._peers.values():
            peer.drain()

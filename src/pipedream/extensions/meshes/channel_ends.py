"""Channels between workers whose meshes differ: each rank receives its part of every tensor, each element once.

Rank c of the receiving worker gets every message from rank c % n of the n sending ranks, and its pieces of the tensors
from the ranks that have them (`pieces`). Both ends compute the pieces from the crossings in the
structure of the message. Between equal meshes rank c sends to rank c, and none of this is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from pipedream.core.box import Box, box_of, dense_strides, slice_within
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.layout import Crossing, Piece, pieces, read_crossings
from pipedream.runtime.comm.channel import PeerReceiver, Receiver, Sender
from pipedream.runtime.comm.message import Message

_End = TypeVar("_End", bound=Sender | Receiver)


@lru_cache(maxsize=1024)
def _list_pieces(sender: Mesh, receiver: Mesh, crossing: Crossing) -> tuple[Piece, ...]:
    return tuple(pieces(crossing.shape, sender, crossing.sent, receiver, crossing.received))


class _MeshEnd(Generic[_End]):
    """One rank's end of a channel between the workers of two meshes, made of ends for the other worker's ranks."""

    def __init__(self, sender: Mesh, receiver: Mesh, rank_in_worker: int, peers: Mapping[int, _End]) -> None:
        self._sender, self._receiver = sender, receiver
        self._rank_in_worker = rank_in_worker
        self._peers = peers

    def _find_source(self, receiver: int) -> int:
        """Returns the sending rank from which a receiving rank gets every message."""
        return receiver % self._sender.size

    def _locate_part(self, mesh: Mesh, shape: tuple[int, ...], placements: tuple[int | None, ...]) -> Box:
        sizes, coordinates = list(mesh.dimensions.values()), mesh.coordinates()
        return box_of(shape, placements, sizes, coordinates[self._rank_in_worker])

    def drain(self) -> None:
        for peer in self._peers.values():
            peer.drain()


class MeshSender(_MeshEnd[Sender], Sender):
    """One rank's sending end."""

    def send(self, message: Message) -> None:
        crossings, _ = read_crossings(message.structure)
        for receiver, peer in self._peers.items():
            is_source = self._find_source(receiver) == self._rank_in_worker
            if not crossings and is_source:
                peer.send(message)
                continue
            boxes = [self._find_box(crossing, receiver) for crossing in crossings]
            if is_source or any(box is not None for box in boxes):
                tensors = [
                    self._select_part(tensor, crossing, box, is_source)
                    for tensor, crossing, box in zip(message.tensors, crossings, boxes, strict=True)
                ]
                peer.send(replace(message, tensors=tuple(tensors)))

    def _find_box(self, crossing: Crossing, receiver: int) -> Box | None:
        rows = _list_pieces(self._sender, self._receiver, crossing)
        return next((piece.box for piece in rows if piece[:2] == (self._rank_in_worker, receiver)), None)

    def _select_part(
        self, tensor: torch.Tensor | None, crossing: Crossing, box: Box | None, is_source: bool
    ) -> torch.Tensor | None:
        if tensor is None:
            return None
        if box is None:
            return tensor.new_empty(0) if is_source else None  # carries the dtype to a rank whose part is empty
        stored_box = self._locate_part(self._sender, crossing.shape, crossing.sent)
        return tensor if box == stored_box else tensor[slice_within(box, stored_box)]

    def begin_drain(self) -> None:
        for peer in self._peers.values():
            peer.begin_drain()

    @property
    def sent_bytes(self) -> int:
        return sum(peer.sent_bytes for peer in self._peers.values())


class MeshReceiver(_MeshEnd[Receiver], PeerReceiver):
    """One rank's receiving end."""

    def result(self) -> Message:
        source = self._find_source(self._rank_in_worker)
        message = self._peers[source].receive().result()
        crossings, _ = read_crossings(message.structure)
        piece_rows = [
            [
                piece
                for piece in _list_pieces(self._sender, self._receiver, crossing)
                if piece.receiver == self._rank_in_worker
            ]
            for crossing in crossings
        ]
        received = {source: message.tensors}
        for sender in sorted({piece.sender for row in piece_rows for piece in row} - {source}):
            received[sender] = self._peers[sender].receive().result().tensors
        if crossings:  # written in place: no one else has the message yet
            message.tensors = tuple(
                None
                if sample is None
                else self._join_parts(sample, crossing, [(piece.box, received[piece.sender][i]) for piece in row])
                for i, (sample, crossing, row) in enumerate(zip(message.tensors, crossings, piece_rows, strict=True))
            )
        return message

    def _join_parts(
        self, sample: torch.Tensor, crossing: Crossing, parts: Sequence[tuple[Box, torch.Tensor | None]]
    ) -> torch.Tensor:
        """Returns this rank's part, made of pieces; `sample` has its dtype and device."""
        stored_box = self._locate_part(self._receiver, crossing.shape, crossing.received)
        stored = next((tensor for box, tensor in parts if box == stored_box), None)
        if stored is not None:
            return stored
        shape = tuple(map(len, stored_box))
        joined = sample.new_empty_strided(shape, dense_strides(shape, crossing.order or range(len(shape))))
        for box, tensor in parts:
            assert tensor is not None, "ranks of one worker differ in which gradients exist"
            joined[slice_within(box, stored_box)] = tensor
        return joined


join_senders, join_receivers = MeshSender, MeshReceiver

"""Channels between different meshes: each rank receives its part of what the ranks of the other worker have."""

from math import prod

import torch
from drawn import MESHES, placements
from exchange import assert_arrived
from hypothesis import given, strategies as st

import pipedream as pd
from pipedream.core.box import box_of
from pipedream.extensions.meshes import channel_ends as mesh_channel, layout
from pipedream.runtime.comm import channel, message as wire


def part(whole: torch.Tensor, mesh: pd.Mesh, cut: tuple[int | None, ...], place: int) -> torch.Tensor:
    box = box_of(tuple(whole.shape), cut, list(mesh.dimensions.values()), mesh.coordinates()[place])
    return whole[tuple(slice(side.start, side.stop) for side in box)]


@given(st.data())
def test_each_rank_receives_its_part(data: st.DataObject) -> None:
    both = giver, taker = data.draw(MESHES), data.draw(MESHES)
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3))
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    placed = [[placements(data.draw, mesh, len(shape)) for mesh in both] for shape in shapes]
    cuts = [layout.Crossing(tuple(shape), *ends) for shape, ends in zip(shapes, placed, strict=True)]
    absent = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))  # gradients
    wires = [[channel.LocalChannel() for _ in range(taker.size)] for _ in range(giver.size)]
    senders = [mesh_channel.MeshSender(*both, place, dict(enumerate(row))) for place, row in enumerate(wires)]
    receivers = [
        mesh_channel.MeshReceiver(*both, place, {sender: row[place] for sender, row in enumerate(wires)})
        for place in range(taker.size)
    ]
    rows, structure = list(zip(wholes, cuts, absent, strict=True)), layout.with_crossings("", cuts)
    for place, sender in enumerate(senders):
        tensors = tuple(None if missing else part(whole, giver, cut.sent, place) for whole, cut, missing in rows)
        sender.send(wire.Message(3, tensors=tensors, structure=structure, loss_weight=0.5, numbers=(1.0,)))
        sender.send(wire.Message(4, wire.Content.END, flags=2))
    for place, receiver in enumerate(receivers):
        message = receiver.result()
        assert (message.microbatch, message.loss_weight, message.numbers) == (3, 0.5, (1.0,))
        expected = [None if missing else part(x, taker, cut.received, place) for x, cut, missing in rows]
        assert_arrived(message.tensors, expected)
        assert receiver.result().content is wire.Content.END
    channel.drain([*senders, *receivers])
    moved = [
        prod(map(len, piece.box))
        for _, cut, missing in rows
        if not missing
        for piece in layout.pieces(cut.shape, giver, cut.sent, taker, cut.received)
    ]
    assert sum(sender.sent_bytes for sender in senders) == 8 * sum(moved)

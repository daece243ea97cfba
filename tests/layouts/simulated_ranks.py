"""All ranks of a partitioned step in one process, and whole tensors from the ranks' parts."""

from collections.abc import Sequence

import torch

from pipedream.core.plan.mesh import Box, Piece, slice_of, slice_within
from pipedream.layouts.step import GroupRanks, PartitionedStep, Parts


class SimulatedRanks:
    def __init__(self, count: int) -> None:
        self.local = range(count)
        self.sent_bytes = 0

    def exchange(
        self, pieces: Sequence[Piece], parts: Parts, boxes: Sequence[Box | None]
    ) -> dict[int, list[tuple[Box, torch.Tensor]]]:
        arrived: dict[int, list[tuple[Box, torch.Tensor]]] = {rank: [] for rank in self.local}
        for piece in pieces:
            have = boxes[piece.sender]
            assert have is not None
            part = parts[piece.sender][slice_within(piece.box, have)]
            self.sent_bytes += part.nbytes * (piece.sender != piece.receiver)
            arrived[piece.receiver].append((piece.box, part))
        return arrived


def find_whole(run: PartitionedStep, ranks: GroupRanks | SimulatedRanks, tensor: str, parts: Parts) -> torch.Tensor:
    """Returns a tensor from the parts of all ranks, which all call it."""
    stored, shape = run.exchanges.stored[tensor], run.exchanges.operators.tensors[tensor]
    owners = {box: rank for rank, box in reversed(list(enumerate(stored)))}
    pieces = [
        Piece(rank if stored[rank] == box else owner, rank, box)
        for rank in run.exchanges.ranks
        for box, owner in owners.items()
        if all(box)
    ]
    rank = ranks.local[0]
    whole = parts[rank].new_empty(shape)
    for box, part in ranks.exchange(pieces, parts, stored)[rank]:
        whole[slice_of(box)] = part
    return whole

"""Runs forward and backward by a partition, each operator along its index, on several ranks."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from pipedream.core.box import Box, count_elements, slice_of, slice_within
from pipedream.core.plan.cost import EXCHANGE
from pipedream.extensions.meshes.layout import Piece
from pipedream.extensions.meshes.layouts.description.text import Operator
from pipedream.extensions.meshes.layouts.search.exchanges import Exchanges
from pipedream.extensions.meshes.layouts.search.partition import Partition
from pipedream.extensions.meshes.layouts.tracing.rules import COMBINE
from pipedream.extensions.meshes.layouts.tracing.trace import DescribedCall, TracedStep
from pipedream.extensions.meshes.sharding.functions import exchange

Parts = dict[int, torch.Tensor]
"""Rank -> its part of a tensor; of the ranks that this process runs."""
_Arrived = dict[int, list[tuple[Box, torch.Tensor]]]


class GroupRanks:
    """The ranks of a partition that this process runs: one in each process of a group.

    Attributes:
        local: their numbers.
        sent_bytes: bytes that they have sent to others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group: dist.ProcessGroup = group or dist.group.WORLD  # type: ignore[assignment]
        self._rank, self._count = dist.get_rank(group), dist.get_world_size(group)
        self.local: Sequence[int] = (self._rank,)
        self.sent_bytes = 0

    def exchange(self, pieces: Sequence[Piece], parts: Parts, boxes: Sequence[Box | None]) -> _Arrived:
        """Sends pieces of a tensor, of which each rank has the part in `boxes`; all ranks call it alike."""
        mine, rank = parts[self._rank], self._rank
        arrived = [(piece.box, _cut_out(mine, boxes[rank], piece.box)) for piece in pieces if piece[:2] == (rank, rank)]
        between = [piece for piece in pieces if piece.sender != piece.receiver]
        if between:
            sent = [[piece for piece in between if piece[:2] == (rank, other)] for other in range(self._count)]
            due = [[piece for piece in between if piece[:2] == (other, rank)] for other in range(self._count)]
            flat = [_cut_out(mine, boxes[rank], piece.box).reshape(-1) for to in sent for piece in to]
            outgoing = torch.cat(flat) if flat else mine.new_empty(0)
            incoming = mine.new_empty(sum(count_elements(piece.box) for row in due for piece in row))
            received_sizes, sent_sizes = (
                [sum(count_elements(piece.box) for piece in row) for row in rows] for rows in (due, sent)
            )
            exchange(incoming, outgoing, received_sizes, sent_sizes, self._group.group_name, EXCHANGE)
            self.sent_bytes += outgoing.nbytes
            boxes_due = [piece.box for row in due for piece in row]
            parts_due = incoming.split([count_elements(box) for box in boxes_due])  # type: ignore[no-untyped-call]
            arrived += [
                (box, part.view([len(values) for values in box]))
                for box, part in zip(boxes_due, parts_due, strict=True)
            ]
        return {rank: arrived}


def _cut_out(part: torch.Tensor, have: Box | None, target: Box) -> torch.Tensor:
    """Returns some of a part."""
    assert have is not None
    return part[slice_within(target, have)]


class PartitionedStep:
    """A traced step that several ranks run together.

    Attributes:
        exchanges: the messages of the ranks.
    """

    def __init__(self, step: TracedStep, partition: Partition, ranks: GroupRanks) -> None:
        self._step = step
        self._ranks = ranks
        self.exchanges = Exchanges(step.operators, partition)

    def list_needed(self, available: Iterable[str], keep: Iterable[str]) -> tuple[int, ...]:
        """Returns the numbers of the operators that compute some tensors from others."""
        missing, numbers = set(keep) - set(available), []
        for number in reversed(range(len(self._step.calls))):
            step = self._step.operators.steps[number]
            if step.result in missing:
                missing = (missing | {access.tensor for access in step.operands}) - set(available)
                numbers.append(number)
        return tuple(reversed(numbers))

    @property
    def sent_bytes(self) -> int:
        """Bytes that all ranks send together in forward and backward."""
        elements = {name: dtype.itemsize for name, dtype in self._step.dtypes.items()}
        return self.exchanges.sent_bytes(elements, len(self._step.calls))

    def part(self, tensor: str, whole: torch.Tensor) -> Parts:
        """Returns the ranks' parts of a tensor."""
        stored = self.exchanges.stored[tensor]
        return {rank: whole[slice_of(stored[rank])].clone() for rank in self._ranks.local}

    def run(self, values: Mapping[str, Parts], keep: Iterable[str]) -> dict[str, Parts]:
        """Returns the tensors to keep, computed by the operators that they need.

        Args:
            values: parts of the parameters, buffers, inputs and tangents that they need, or of what was kept before.
        """
        returned = set(keep)
        numbers = self.list_needed(values, returned)
        last_use = {
            access.tensor: number for number in numbers for access in self._step.operators.steps[number].accesses
        }
        live = dict(values)
        for name, make in self._step.constants.items():
            if name in last_use or name in returned:
                live[name] = self.part(name, make())
        for number in numbers:
            step = self._step.operators.steps[number]
            live[step.result] = self._run(number, step, self._step.calls[number], live)
            for name in {access.tensor for access in step.accesses} - returned:
                if last_use[name] == number:
                    del live[name]
        return {name: live[name] for name in returned}

    def _run(self, number: int, step: Operator, call: DescribedCall, live: Mapping[str, Parts]) -> Parts:
        operands: dict[int, dict[object, torch.Tensor]] = {rank: {} for rank in self._ranks.local}
        plan = self.exchanges.plans[number]
        for access, pieces, used in plan.operands:
            parts = live[access.tensor]
            arrived = self._ranks.exchange(pieces, parts, self.exchanges.stored[access.tensor])
            for rank in self._ranks.local:
                operands[rank][access.tensor, access.indices] = _assemble(used[rank], arrived[rank], parts[rank])
        computed = {
            rank: self._compute(number, call, rank, operands[rank], plan.boxes[rank]) for rank in self._ranks.local
        }
        if plan.sums:
            arrived = self._ranks.exchange(plan.sums, computed, plan.boxes)
            for rank in self._ranks.local:
                if (share := plan.shares[rank]) is not None:
                    computed[rank] = _combine(share, arrived[rank], computed[rank], step.reduction)
        arrived = self._ranks.exchange(plan.pieces, computed, plan.shares)
        stored = self.exchanges.stored[step.result]
        return {rank: _assemble(stored[rank], arrived[rank], computed[rank]) for rank in self._ranks.local}

    def _compute(
        self, number: int, call: DescribedCall, rank: int, operands: Mapping[object, torch.Tensor], box: Box
    ) -> torch.Tensor:
        needed = call.step.operands
        by_name = {operand.tensor: operands[call.tensors[operand.tensor], operand.indices] for operand in needed}
        ranges = self.exchanges.ranges[number][rank]
        return call.description.compute(call.call, call.step, by_name, tuple(map(len, box)), ranges)


def _assemble(box: Box, arrived: Sequence[tuple[Box, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Returns a part that is made of pieces."""
    for piece, part in arrived:
        if piece == box:
            return part
    assembled = like.new_empty([len(values) for values in box])
    for piece, part in arrived:
        _cut_out(assembled, box, piece).copy_(part)
    return assembled


def _combine(box: Box, arrived: Sequence[tuple[Box, torch.Tensor]], like: torch.Tensor, reduction: str) -> torch.Tensor:
    """Returns a share of a result from partial ones."""
    combined = like.new_empty([len(values) for values in box])
    written: list[Box] = []
    for piece, part in arrived:
        into = _cut_out(combined, box, piece)
        into.copy_(COMBINE[reduction](into, part) if piece in written else part)
        written.append(piece)
    return combined

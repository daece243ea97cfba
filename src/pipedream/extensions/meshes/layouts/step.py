"""Runs forward and backward by a partition, each operator along its index, on several ranks."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from pipedream.core.box import Box, count_elements, slice_of, slice_within
from pipedream.core.plan.cost import EXCHANGE
from pipedream.extensions.meshes.layout import Piece
from pipedream.extensions.meshes.layouts.search.exchanges import Exchanges
from pipedream.extensions.meshes.layouts.search.partition import Partition
from pipedream.extensions.meshes.layouts.tracing.rules import COMBINE
from pipedream.extensions.meshes.layouts.tracing.trace import TracedStep
from pipedream.extensions.meshes.sharding.functions import exchange

_Arrived = list[tuple[Box, torch.Tensor]]


class GroupRank:
    """This process's rank among those of a partition, which are the processes of a group.

    Attributes:
        sent_bytes: bytes that it has sent to others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group: dist.ProcessGroup = group or dist.group.WORLD  # type: ignore[assignment]
        self.rank, self._count = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def exchange(self, pieces: Sequence[Piece], part: torch.Tensor, boxes: Sequence[Box | None]) -> _Arrived:
        """Sends pieces of a tensor, of which each rank has the part in `boxes`; returns those that this rank gets.

        All ranks call it alike.
        """
        rank, box = self.rank, boxes[self.rank]
        arrived = [(piece.box, cut_out(part, box, piece.box)) for piece in pieces if piece[:2] == (rank, rank)]
        between = [piece for piece in pieces if piece.sender != piece.receiver]
        if between:
            due = sorted((piece for piece in between if piece.receiver == rank), key=lambda piece: piece.sender)
            sent = sorted((piece for piece in between if piece.sender == rank), key=lambda piece: piece.receiver)
            received_sizes, sent_sizes = [0] * self._count, [0] * self._count
            for piece in due:
                received_sizes[piece.sender] += count_elements(piece.box)
            for piece in sent:
                sent_sizes[piece.receiver] += count_elements(piece.box)
            flat = [cut_out(part, box, piece.box).reshape(-1) for piece in sent]
            outgoing, incoming = torch.cat(flat) if flat else part.new_empty(0), part.new_empty(sum(received_sizes))
            exchange(incoming, outgoing, received_sizes, sent_sizes, self._group.group_name, EXCHANGE)
            self.sent_bytes += outgoing.nbytes
            parts = incoming.split([count_elements(piece.box) for piece in due])  # type: ignore[no-untyped-call]
            arrived += [(piece.box, got.view([*map(len, piece.box)])) for piece, got in zip(due, parts, strict=True)]
        return arrived


def cut_out(part: torch.Tensor, have: Box | None, target: Box) -> torch.Tensor:
    """Returns some of a part."""
    assert have is not None
    return part[slice_within(target, have)]


class PartitionedStep:
    """A traced step that several ranks run together.

    Attributes:
        exchanges: the messages of the ranks.
    """

    def __init__(self, step: TracedStep, partition: Partition, rank: GroupRank) -> None:
        self._step = step
        self._rank = rank
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

    def part(self, tensor: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a tensor."""
        return whole[slice_of(self.exchanges.stored[tensor][self._rank.rank])].clone()

    def run(self, values: Mapping[str, torch.Tensor], keep: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns this rank's parts of the tensors to keep, computed by the operators that they need.

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
            live[step.result] = self._run(number, live)
            for name in {access.tensor for access in step.accesses} - returned:
                if last_use[name] == number:
                    del live[name]
        return {name: live[name] for name in returned}

    def _run(self, number: int, live: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rank, plan, stored = self._rank.rank, self.exchanges.plans[number], self.exchanges.stored
        step, call = self._step.operators.steps[number], self._step.calls[number]
        parts: dict[object, torch.Tensor] = {}
        for access, pieces, used in plan.operands:
            part = live[access.tensor]
            arrived = self._rank.exchange(pieces, part, stored[access.tensor])
            parts[access.tensor, access.indices] = _assemble(used[rank], arrived, part)
        operands = {name: parts[call.tensors[name], indices] for name, indices, _ in call.step.operands}
        box, share = plan.boxes[rank], plan.shares[rank]
        ranges = self.exchanges.ranges[number][rank]
        computed = call.description.compute(call.call, call.step, operands, tuple(map(len, box)), ranges)
        if plan.sums:
            arrived = self._rank.exchange(plan.sums, computed, plan.boxes)
            computed = computed if share is None else _combine(share, arrived, computed, step.reduction)
        arrived = self._rank.exchange(plan.pieces, computed, plan.shares)
        return _assemble(stored[step.result][rank], arrived, computed)


def _assemble(box: Box, arrived: _Arrived, like: torch.Tensor) -> torch.Tensor:
    """Returns a part that is made of pieces."""
    for piece, part in arrived:
        if piece == box:
            return part
    assembled = like.new_empty([len(values) for values in box])
    for piece, part in arrived:
        cut_out(assembled, box, piece).copy_(part)
    return assembled


def _combine(box: Box, arrived: _Arrived, like: torch.Tensor, reduction: str) -> torch.Tensor:
    """Returns a share of a result from partial ones."""
    combined = like.new_empty([len(values) for values in box])
    written: list[Box] = []
    for piece, part in arrived:
        into = cut_out(combined, box, piece)
        into.copy_(COMBINE[reduction](into, part) if piece in written else part)
        written.append(piece)
    return combined

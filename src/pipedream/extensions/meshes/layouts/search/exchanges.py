"""The tensors, operations and messages of each rank of a partition.

The ranks are numbered so that the first cut decides the highest bit. Between where a tensor is stored and where an
operator needs it, or has computed it, each rank gets exactly what it lacks, each element from one rank. Partial sums
are first added up in equal shares by the ranks that need them (a reduce-scatter), which then exchange their shares.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from pipedream.core.box import Box, box_of, count_elements
from pipedream.extensions.meshes.layout import Piece, plan_pieces
from pipedream.extensions.meshes.layouts.description.operators import Operators, find_box
from pipedream.extensions.meshes.layouts.description.text import Access
from pipedream.extensions.meshes.layouts.search.partition import Partition


class OperatorPlan(NamedTuple):
    """The way of an operator's operands to the ranks, and of its result to where it is stored.

    Attributes:
        operands: each with the pieces that the ranks need, those from a rank to itself too, and the part each uses.
        boxes: part of the result that each rank has computed.
        sums: pieces of partial sums; each rank adds up what it gets. Empty if nothing is pending.
        shares: part that each rank has after that, in place of `boxes`.
        pieces: the rest.
    """

    operands: Sequence[tuple[Access, Sequence[Piece], Sequence[Box]]]
    boxes: Sequence[Box]
    sums: Sequence[Piece]
    shares: Sequence[Box | None]
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of a partition."""

    operators: Operators
    partition: Partition

    @cached_property
    def ranks(self) -> range:
        """All of them."""
        return range(self.partition.ranks)

    def _list_parts(self, shape: Sequence[int], dims: Sequence[int | None]) -> tuple[Box, ...]:
        """Returns the part of each rank, given the dimension that each cut divides."""
        return tuple(box_of(shape, dims, [2] * len(dims), halves) for halves in product(range(2), repeat=len(dims)))

    @cached_property
    def stored(self) -> dict[str, tuple[Box, ...]]:
        """Tensor -> what each rank has of it."""
        return {
            name: self._list_parts(shape, [cut.schemes[name] for cut in self.partition.cuts])
            for name, shape in self.operators.tensors.items()
        }

    @cached_property
    def ranges(self) -> tuple[tuple[dict[str, range], ...], ...]:
        """For each operator, what each rank computes: index -> values."""
        all_ranges = []
        for number, step in enumerate(self.operators.steps):
            place = {name: at for at, name in enumerate(step.sizes)}
            dims = [place.get(cut.indices[number] or "") for cut in self.partition.cuts]
            parts = self._list_parts(list(step.sizes.values()), dims)
            all_ranges.append(tuple(dict(zip(place, part, strict=True)) for part in parts))
        return tuple(all_ranges)

    @cached_property
    def plans(self) -> list[OperatorPlan]:
        """The messages of each operator."""
        return [self._plan(number) for number in range(len(self.operators.steps))]

    def _plan(self, number: int) -> OperatorPlan:
        step, all_ranges = self.operators.steps[number], self.ranges[number]

        def list_used(access: Access) -> list[Box]:
            return [find_box(access, ranges, self.operators.tensors[access.tensor]) for ranges in all_ranges]

        operands = []
        for access in step.operands:
            used = list_used(access)
            operands.append((access, _plan_pieces(self.stored[access.tensor], used), used))
        boxes, stored = list_used(step.output), self.stored[step.result]
        partial = [tuple(ranges[name] for name in sorted(step.reduced)) for ranges in all_ranges]
        if len(set(partial)) == 1:
            return OperatorPlan(operands, boxes, (), boxes, _plan_pieces(boxes, stored))
        shares = _plan_shares(stored)
        sums: list[Piece] = []
        for terms in dict.fromkeys(partial):
            sums += _plan_pieces([box if partial[rank] == terms else None for rank, box in enumerate(boxes)], shares)
        return OperatorPlan(operands, boxes, sums, shares, _plan_pieces(shares, stored))

    @property
    def elements(self) -> int:
        """Elements that all ranks send together in a step."""
        return sum(_count_sent(pieces) for _, pieces in self._iterate())

    def sent_bytes(self, element_bytes: Mapping[str, int], steps: int | None = None) -> int:
        """Returns the bytes that all ranks send together, perhaps in so many of the first operators only."""
        return sum(element_bytes[name] * _count_sent(pieces) for name, pieces in self._iterate(steps))

    def list_busiest_bytes(self, element_bytes: Mapping[str, int], steps: int | None = None) -> list[int]:
        """Returns for each exchange the bytes that one rank sends, or receives, at most; see `sent_bytes`."""
        busiest = []
        for name, pieces in self._iterate(steps):
            ends: Counter[tuple[str, int]] = Counter()
            for piece in pieces:
                if piece.sender != piece.receiver:
                    ends["sends", piece.sender] += count_elements(piece.box)
                    ends["receives", piece.receiver] += count_elements(piece.box)
            if ends:
                busiest.append(element_bytes[name] * max(ends.values()))
        return busiest

    def _iterate(self, steps: int | None = None) -> Iterator[tuple[str, Sequence[Piece]]]:
        """Yields the tensor and the pieces of each exchange, in order."""
        for plan, step in zip(self.plans[:steps], self.operators.steps, strict=False):
            yield from ((access.tensor, pieces) for access, pieces, _ in plan.operands)
            yield from ((step.result, pieces) for pieces in (plan.sums, plan.pieces))


def _count_sent(pieces: Sequence[Piece]) -> int:
    return sum(count_elements(piece.box) for piece in pieces if piece.sender != piece.receiver)


def _plan_pieces(have: Sequence[Box | None], need: Sequence[Box | None]) -> list[Piece]:
    """Returns what the ranks send, each element from the receiver itself or the nearest rank that has it."""
    # The rank that differs in the lowest bits: a neighbour in the last cuts.
    return plan_pieces(have, need, lambda ranks, receiver: min(ranks, key=lambda rank: rank ^ receiver))


def _plan_shares(stored: Sequence[Box]) -> list[Box | None]:
    """Returns equal parts of what several ranks have whole; the first has a tensor without dimensions."""
    shares: list[Box | None] = []
    for rank, box in enumerate(stored):
        same = [other for other, other_box in enumerate(stored) if other_box == box]
        if not box:
            shares.append(box if rank == same[0] else None)
            continue
        longest = max(range(len(box)), key=lambda at: len(box[at]))
        share, turn = -(-len(box[longest]) // len(same)), same.index(rank)
        part = box[longest][turn * share : (turn + 1) * share]
        shares.append((*box[:longest], part, *box[longest + 1 :]))
    return shares

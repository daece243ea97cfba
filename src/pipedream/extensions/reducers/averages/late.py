"""Sums over replicas that take as long as a period: a slice is begun after each update.

The replicas exchange a few bytes at each update, on the same connections. These would wait until the whole average has
been sent; with slices they wait for one at most, which had the time of an update.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from pipedream.runtime.comm.channel import Group, Pending, Waiting, wait_for

Result = TypeVar("Result")


class LateSums(Protocol):
    """Sums under way; `parts` are what this replica has added."""

    @property
    def parts(self) -> Sequence[torch.Tensor]: ...

    def begin_next(self) -> None:
        """Begins the next slice, if there is one."""

    def take(self) -> Waiting[list[torch.Tensor]]:
        """Returns the sums; begins what is left, and yields where it would wait."""


class Slices(Generic[Result]):
    """What a collective makes of the slices of a flat tensor."""

    def __init__(self, begin: Callable[[torch.Tensor], Pending[Result]], flat: torch.Tensor, count: int) -> None:
        self._begin = begin
        self._left = deque(part for part in torch.tensor_split(flat, count) if len(part))
        self._begun: list[Pending[Result]] = []
        self.begin_next()

    def begin_next(self) -> None:
        if self._left:
            self._begun.append(self._begin(self._left.popleft()))

    def take(self) -> Waiting[list[Result]]:
        while self._left:
            self.begin_next()
        results = []
        for pending in self._begun:
            results.append((yield from wait_for(pending)))
        return results


class SlicedSums:
    """Sums of tensors, by all-reduce; those of one dtype are summed together."""

    def __init__(self, group: Group, tensors: Sequence[torch.Tensor], count: int) -> None:
        self.parts = list(tensors)
        self._members: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            self._members.setdefault(tensor.dtype, []).append(index)
        self._flat = [torch.cat([tensors[i].reshape(-1) for i in row]) for row in self._members.values()]
        self._slices = [Slices(group.all_reduce, flat, count) for flat in self._flat]

    def begin_next(self) -> None:
        for slices in self._slices:
            slices.begin_next()

    def take(self) -> Waiting[list[torch.Tensor]]:
        sums = list(self.parts)
        for row, flat, slices in zip(self._members.values(), self._flat, self._slices, strict=True):
            yield from slices.take()  # in place
            for i, piece in zip(row, torch.split(flat, [sums[i].numel() for i in row]), strict=True):
                sums[i] = piece.view_as(sums[i])
        return sums

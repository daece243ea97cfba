"""The edge: a channel carries messages one way between two workers, first in, first out.

A worker never blocks in a channel's method. `receive` gives a `Pending`, which a clock waits for in its own
way: the in-process clock lets another worker run, the wire clock blocks. `Group` is the same for sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from pipedream.runtime.comm.message import Message, copy_as_received

__all__ = ["Group", "LocalChannel", "LocalGroup", "Pending", "Receiver", "Sender", "close_all"]

Result = TypeVar("Result")


class Pending(ABC, Generic[Result]):
    """Abstract: something that will be there."""

    @abstractmethod
    def ready(self) -> bool:
        """Tells, without waiting, whether `result` would return at once; may say no too often."""

    @abstractmethod
    def result(self) -> Result:
        """Returns it; waits for it where waiting is possible."""


class Sender(ABC):
    """Abstract: the sending end of a channel."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Sends without waiting; the message's tensors must not be written afterwards."""

    def close_begin(self) -> None:
        """Says that nothing more comes, so that the receiver can end; does not wait."""
        return

    def close(self) -> None:
        """Waits until everything has left."""
        return

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Bytes of all payloads sent."""


class Receiver(ABC):
    """Abstract: the receiving end of a channel."""

    @abstractmethod
    def receive(self) -> Pending[Message]:
        """Returns the next message, which may still be on its way. The tensors belong to the caller."""

    def close(self) -> None:
        """Completes what was posted ahead; the sender has begun to close."""
        return


def close_all(ends: Sequence[Sender | Receiver]) -> None:
    """Ends channels, of which the other ends do the same."""
    for end in ends:
        if isinstance(end, Sender):
            end.close_begin()
    for end in ends:
        if isinstance(end, Receiver):
            end.close()
    for end in ends:
        if isinstance(end, Sender):
            end.close()


class Group(ABC):
    """Abstract: workers that add up tensors."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        """Starts to add a tensor up over all members of the group, in place; does not wait.

        Every member calls it in the same order, with as many numbers of the same type. Nobody may read or write
        the tensor before the result is there.
        """


class LocalChannel(Sender, Receiver):
    """Both ends of a channel between two workers of one process."""

    def close(self) -> None:
        """Has nothing to end."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()
        self._sent_bytes = 0

    def send(self, message: Message) -> None:
        # A copy, as a wire makes it: the receiver may write into what it got.
        tensors = tuple(None if t is None else copy_as_received(t) for t in message.tensors)
        self._sent_bytes += sum(t.numel() * t.element_size() for t in tensors if t is not None)
        self._queue.append(replace(message, tensors=tensors))

    def receive(self) -> Pending[Message]:
        return _QueueHead(self._queue)

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes


class _QueueHead(Pending[Message]):
    def __init__(self, queue: deque[Message]) -> None:
        self._queue = queue

    def ready(self) -> bool:
        return bool(self._queue)

    def result(self) -> Message:
        return self._queue.popleft()


class LocalGroup:
    """The sums of workers of one process; `member` gives each its own end."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._contributed: dict[int, dict[int, torch.Tensor]] = {}

    def member(self, index: int) -> Group:
        """Returns the end of one member."""
        return _LocalMember(self, index)

    def contribute(self, turn: int, index: int, tensor: torch.Tensor) -> None:
        """Puts in one member's tensor; the last one adds all up, in the order of the members."""
        contributed = self._contributed.setdefault(turn, {})
        contributed[index] = tensor
        if len(contributed) == self._members:
            del self._contributed[turn]
            total, *others = (contributed[i] for i in range(self._members))
            for other in others:
                total += other
            for other in others:
                other.copy_(total)

    def is_complete(self, turn: int) -> bool:
        """Tells whether all members have given; asked by a member that has."""
        return turn not in self._contributed


class _LocalMember(Group):
    def __init__(self, group: LocalGroup, index: int) -> None:
        self._group = group
        self._index = index
        self._turn = 0

    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        turn = self._turn
        self._turn += 1
        self._group.contribute(turn, self._index, tensor)
        return _LocalSum(self._group, turn, tensor)


class _LocalSum(Pending[torch.Tensor]):
    def __init__(self, group: LocalGroup, turn: int, tensor: torch.Tensor) -> None:
        self._group = group
        self._turn = turn
        self._tensor = tensor

    def ready(self) -> bool:
        return self._group.is_complete(self._turn)

    def result(self) -> torch.Tensor:
        return self._tensor

"""Channels: messages one way between two workers, first in, first out.

A worker sees only `Sender` and `Receiver`. Between ranks `transport` opens them, on gloo, shared memory or NCCL; the
channels within one process are here.

`receive` returns a `Pending`. Over a network `result` waits. In one process it cannot: a worker yields the `Pending`,
so that another worker runs (`runtime.session.streams`). `Group` does the same for sums, and for what all get of each.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from pipedream.runtime.comm.message import Message, MessageFormat

Result = TypeVar("Result")


class Pending(ABC, Generic[Result]):
    """A result that may not have arrived yet."""

    @abstractmethod
    def ready(self) -> bool:
        """Returns whether `result` can be called; always True over a network, where `result` waits."""

    @abstractmethod
    def result(self) -> Result:
        """Returns the result; called once, when `ready`."""


Waiting = Generator[Pending[Any], None, Result]
"""A generator that yields what it waits for, and returns the result."""


def wait_for(pending: Pending[Result]) -> Waiting[Result]:
    """Returns the result; first yields `pending` if it is not ready."""
    if not pending.ready():
        yield pending
    return pending.result()


def run_alone(waiting: Waiting[Result]) -> Result:
    """Returns the result of a generator that never waits."""
    try:
        pending = next(waiting)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError(f"nothing should be waited for here, but {pending} is not ready")


def run_together(waits: Iterable[Waiting[None]]) -> None:
    """Runs generators to their ends, in this thread; they may wait only for each other, or this never returns."""
    waiting: dict[Waiting[None], Pending[Any] | None] = dict.fromkeys(waits)
    while waiting:
        for generator, pending in list(waiting.items()):
            if pending is None or pending.ready():
                waiting[generator] = next(generator, None)
                if waiting[generator] is None:
                    del waiting[generator]


class Sender(ABC):
    """The sending end of a channel."""

    _sent_bytes = 0

    @abstractmethod
    def send(self, message: Message) -> None:
        """Sends without waiting; the message's tensors must not be written to afterwards."""

    def begin_drain(self) -> None:
        """Completes receives posted for further messages, without waiting."""
        return

    def drain(self) -> None:
        """Waits until everything has been sent."""
        return

    @property
    def sent_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return self._sent_bytes


class Receiver(ABC):
    """The receiving end of a channel."""

    @abstractmethod
    def receive(self) -> Pending[Message]:
        """Returns the next message, whose tensors belong to the caller."""

    def drain(self) -> None:
        """Waits until no receive is posted; every message has been received before."""
        return


class PeerReceiver(Receiver, Pending[Message]):
    """A receiving end whose `result` waits for another process's next message.

    Messages are received one at a time and in order, so it is its own `Pending`.
    """

    def receive(self) -> Pending[Message]:
        return self

    def ready(self) -> bool:
        return True


class ConnectionSender(Sender):
    """The sending end of a connection, which several channels may share."""

    @abstractmethod
    def send_on(self, message: Message, channel: int) -> MessageFormat:
        """Sends a message with the number of its channel."""

    def send(self, message: Message) -> None:
        self.send_on(message, 0)


class ConnectionReceiver(PeerReceiver):
    """The receiving end of a connection, which several channels may share."""

    @abstractmethod
    def take(self) -> tuple[Message, MessageFormat, int]:
        """Returns the next message, its format, and the number of its channel."""

    def result(self) -> Message:
        return self.take()[0]


def drain(ends: Sequence[Sender | Receiver]) -> None:
    """Completes pending transfers on channels whose messages have all been received; the ranks of both ends call it."""
    for end in ends:  # first at all, because the receivers of both ranks wait for it
        if isinstance(end, Sender):
            end.begin_drain()
    for kind in (Receiver, Sender):
        for end in ends:
            if isinstance(end, kind):
                end.drain()


class Group(ABC):
    """Workers that sum tensors, or show them to each other; all members make the same calls, in the same order."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        """Starts to sum a tensor over all members, in place.

        All give the same size and type, and leave the tensor alone until the result.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> Pending[list[torch.Tensor]]:
        """Starts to collect the tensors of all members, in their order; as `all_reduce` for the rest."""


class DistributedGroup(Group):
    """Between processes. Holds the group weakly: a reference would keep its threads alive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._pending: weakref.WeakSet[_Collective[Any]] = weakref.WeakSet()

    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return self._follow(dist.all_reduce(tensor, group=self._open_group, async_op=True), tensor)

    def all_gather(self, tensor: torch.Tensor) -> Pending[list[torch.Tensor]]:
        gathered = [torch.empty_like(tensor) for _ in range(self._open_group.size())]
        return self._follow(dist.all_gather(gathered, tensor, group=self._open_group, async_op=True), gathered)

    @property
    def _open_group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "its pipeline is closed"  # without a group torch would take all ranks
        return group

    def _follow(self, work: dist.Work | None, value: Result) -> Pending[Result]:
        assert work is not None, "this rank is not in the process group"
        self._pending.add(pending := _Collective(work, value))
        return pending

    def abandon(self) -> None:
        """Drops what is pending after a failure: each keeps connections open."""
        for pending in self._pending:
            del pending.work


class _Collective(Pending[Result]):
    def __init__(self, work: dist.Work, value: Result) -> None:
        self.work = work
        self._value = value

    def ready(self) -> bool:
        return True

    def result(self) -> Result:
        self.work.wait()
        return self._value


class LocalChannel(Sender, Receiver, Pending[Message]):
    """A channel between two workers of one process."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()

    def send(self, message: Message) -> None:
        copy = message.copy_as_received()
        self._sent_bytes += sum(tensor.nbytes for tensor in copy.tensors if tensor is not None)
        self._queue.append(copy)

    def receive(self) -> Pending[Message]:
        return self

    def clear(self) -> None:
        self._queue.clear()

    def drain(self) -> None:
        assert not self._queue, f"a message was left on a channel: {self._queue[0].without_tensors()}"

    def ready(self) -> bool:
        return bool(self._queue)

    def result(self) -> Message:
        return self._queue.popleft()


class LocalGroup:
    """Workers of one process; `contributed`: turn -> member -> its tensor, while one is lacking."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.contributed: dict[int, dict[int, torch.Tensor]] = {}

    def member(self, index: int) -> Group:
        return _LocalMember(self, index)


class _LocalMember(Group):
    def __init__(self, group: LocalGroup, index: int) -> None:
        self._group = group
        self._index = index
        self._turn = 0

    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        turn, contributed = self._contribute(tensor)
        if turn not in self._group.contributed:  # the last one sums all of them, in the order of the members
            total, *others = (contributed[i] for i in range(self._group.members))
            for other in others:
                total += other
            for other in others:
                other.copy_(total)
        return _LocalCollective(self._group, turn, lambda: tensor)

    def all_gather(self, tensor: torch.Tensor) -> Pending[list[torch.Tensor]]:
        turn, contributed = self._contribute(tensor.clone())
        members = range(self._group.members)
        return _LocalCollective(self._group, turn, lambda: [contributed[i].clone() for i in members])

    def _contribute(self, tensor: torch.Tensor) -> tuple[int, dict[int, torch.Tensor]]:
        """Returns the turn and what members have contributed to it, which is complete once the group has dropped it."""
        turn, group = self._turn, self._group
        self._turn += 1
        contributed = group.contributed.setdefault(turn, {})
        contributed[self._index] = tensor
        if len(contributed) == group.members:
            del group.contributed[turn]
        return turn, contributed


class _LocalCollective(Pending[Result]):
    def __init__(self, group: LocalGroup, turn: int, read: Callable[[], Result]) -> None:
        self._group = group
        self._turn = turn
        self._read = read

    def ready(self) -> bool:
        return self._turn not in self._group.contributed

    def result(self) -> Result:
        return self._read()

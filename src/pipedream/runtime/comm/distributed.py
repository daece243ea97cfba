"""Channels and groups on torch.distributed: gloo between CPUs, NCCL between GPUs.

Headers always use gloo between CPUs, so that no worker waits for its GPU to read one. On gloo, channels differ by their
tags; on NCCL each has its own process group, because a communicator runs its messages in one order.

Receives are posted ahead without negotiating sizes. Message i finds a posted receive of ``capacity(i)`` bytes, the
largest payload among the messages up to i - depth, which both ends know. A smaller payload is padded; the rest of a
larger one follows in another message, by gloo with its own tag, because receives for later messages are posted already.
Between CPUs a small payload is joined to its header: each message has a fixed cost.

Nothing waits for a send on the critical path: a worker waits for the oldest message only when more are under way than
its schedule can have unread. (gloo reports that one has been sent only to those who wait.)
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from pipedream.runtime.comm.channel import Group, Pending, Receiver, Sender
from pipedream.runtime.comm.message import (
    HEADER_WORDS,
    Content,
    Message,
    decode_header,
    encode_header,
    join_payload,
    split_payload,
)

__all__ = ["ChannelEndpoint", "DistributedGroup", "DistributedReceiver", "DistributedSender"]

_HEADER_BYTES = 8 * HEADER_WORDS
_MOST_JOINED_BYTES = 1 << 17  # copying takes less than the 50 us of a message
_CLOSED = 1 << 30  # `flags` of messages that close a channel


class ChannelEndpoint:
    """One end of a channel.

    Attributes:
        number: distinct for each channel of the run.
        depth: receives posted ahead.
    """

    def __init__(
        self,
        peer: int,
        number: int,
        depth: int,
        headers: dist.ProcessGroup,
        payloads: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.peer = peer
        self.number = number
        self._tag = 3 * number + 3  # tags 0 to 2 are for messages without one, such as parameters
        self.depth = depth
        self.headers = headers
        self.payloads = payloads
        self.device = device

    def send_rest(self, payload: torch.Tensor) -> dist.Work:
        """Sends, from the CPU, what did not fit into the posted receive."""
        return _started(dist.isend(payload, self.peer, self.headers, tag=self._tag + 2))

    def receive_rest(self, payload: torch.Tensor) -> None:
        _started(dist.irecv(payload, self.peer, self.headers, tag=self._tag + 2)).wait()

    def joins_header(self, capacity: int) -> bool:
        """Returns whether payloads of `capacity` bytes are joined to their headers."""
        return self.device.type == "cpu" and capacity <= _MOST_JOINED_BYTES

    def send_header(self, header: torch.Tensor) -> dist.Work:
        """The header, uint8[n], may be joined with its payload."""
        return _started(dist.isend(header, self.peer, self.headers, tag=self._tag))

    def send_payload(self, payload: torch.Tensor) -> dist.Work:
        return _started(dist.isend(payload, self.peer, self.payloads, tag=self._tag + 1))

    def receive_header(self, header: torch.Tensor) -> dist.Work:
        return _started(dist.irecv(header, self.peer, self.headers, tag=self._tag))

    def receive_payload(self, payload: torch.Tensor) -> dist.Work:
        return _started(dist.irecv(payload, self.peer, self.payloads, tag=self._tag + 1))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the channel's process group"
    return work


class _Capacity:
    """Bytes of receives posted `depth` messages ahead; the same at both ends."""

    def __init__(self, depth: int) -> None:
        self._recent: deque[int] = deque(maxlen=depth)
        self._depth = depth
        self.size_bytes = 0

    def of_next(self, payload_bytes: int) -> int:
        """Returns the capacity for the next message, and records its size."""
        if len(self._recent) == self._depth:
            self.size_bytes = max(self.size_bytes, self._recent[0])
        self._recent.append(payload_bytes)
        return self.size_bytes


class DistributedSender(Sender):
    """The sending end; keeps the last `max_unread` messages."""

    def __init__(self, endpoint: ChannelEndpoint, max_unread: int) -> None:
        self._endpoint = endpoint
        self._max_unread = max_unread
        self._capacity = _Capacity(endpoint.depth)
        self._out: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._sent_bytes = 0

    def send(self, message: Message) -> None:
        payload = join_payload(message, self._endpoint.device)
        size = payload.numel()
        capacity = self._capacity.of_next(size)
        header = encode_header(message, size).view(torch.uint8)
        joined = capacity > 0 and self._endpoint.joins_header(capacity)
        if joined:
            alone, held = header, min(size, capacity)
            header = torch.empty(_HEADER_BYTES + capacity, dtype=torch.uint8)
            header[:_HEADER_BYTES].copy_(alone)
            header[_HEADER_BYTES : _HEADER_BYTES + held].copy_(payload[:held])
        works, kept = [self._endpoint.send_header(header)], [header]
        if capacity and not joined:
            first = payload[:capacity]
            if size < capacity:
                first = torch.empty(capacity, dtype=torch.uint8, device=self._endpoint.device)
                first[:size].copy_(payload)
            works.append(self._endpoint.send_payload(first))
            kept.append(first)
        if size > capacity:
            rest = payload[capacity:].cpu()
            works.append(self._endpoint.send_rest(rest))
            kept.append(rest)
        self._sent_bytes += size
        self._out.append((works, kept))
        self._reap()

    def _reap(self) -> None:
        if self._endpoint.device.type == "cuda":
            # Work.wait would make the compute stream wait for the message.
            while self._out and all(work.is_completed() for work in self._out[0][0]):
                self._out.popleft()
            return
        while len(self._out) > self._max_unread:
            for work in self._out.popleft()[0]:
                work.wait()

    def close_begin(self) -> None:
        self._max_unread += self._endpoint.depth
        for _ in range(self._endpoint.depth):
            self.send(Message(0, Content.END, flags=_CLOSED))

    def close(self) -> None:
        while self._out:
            for work in self._out.popleft()[0]:
                work.wait()

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes


class DistributedReceiver(Receiver):
    """The receiving end."""

    def __init__(self, endpoint: ChannelEndpoint) -> None:
        self._endpoint = endpoint
        self._posted: deque[tuple[dist.Work, torch.Tensor, dist.Work | None, torch.Tensor | None]] = deque()
        self._size_bytes = 0
        for _ in range(endpoint.depth):
            self._post()

    def _post(self) -> None:
        joined = self._size_bytes if self._endpoint.joins_header(self._size_bytes) else 0
        buffer = torch.empty(_HEADER_BYTES + joined, dtype=torch.uint8)
        header = self._endpoint.receive_header(buffer)
        words = buffer[:_HEADER_BYTES].view(torch.int64)
        payload, work = None, None
        if joined:
            payload = buffer[_HEADER_BYTES:]
        elif self._size_bytes:
            payload = torch.empty(self._size_bytes, dtype=torch.uint8, device=self._endpoint.device)
            work = self._endpoint.receive_payload(payload)
        self._posted.append((header, words, work, payload))

    def receive(self) -> Pending[Message]:
        return _Arrival(self)

    def take(self, repost: bool = True) -> Message:
        header, words, work, payload = self._posted.popleft()
        header.wait()
        message, size, specs = decode_header(words)
        if work is not None:
            work.wait()
        have = 0 if payload is None else payload.numel()
        if size > have:
            whole = torch.empty(size, dtype=torch.uint8, device=self._endpoint.device)
            if payload is not None:
                whole[:have].copy_(payload)
            rest = torch.empty(size - have, dtype=torch.uint8)
            self._endpoint.receive_rest(rest)
            whole[have:].copy_(rest)
            payload = whole
        # For the message `depth` later, which may rely on the sizes so far.
        self._size_bytes = max(self._size_bytes, size)
        if repost:
            self._post()
        if payload is None:
            payload = torch.empty(0, dtype=torch.uint8)  # all gradients are None
        return split_payload(message, specs, payload[:size])

    def close(self) -> None:
        for _ in range(self._endpoint.depth):
            closing = self.take(repost=False)
            assert closing.flags == _CLOSED, f"a message was left on a channel: {closing.without_tensors()}"


class _Arrival(Pending[Message]):
    def __init__(self, receiver: DistributedReceiver) -> None:
        self._receiver = receiver

    def ready(self) -> bool:
        return False  # gloo reports it only to those who wait

    def result(self) -> Message:
        return self._receiver.take()


class DistributedGroup(Group):
    """Sums by all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        return _Sum(_started(dist.all_reduce(tensor, group=self._group, async_op=True)), tensor)


class _Sum(Pending[torch.Tensor]):
    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def ready(self) -> bool:
        return False  # gloo reports it only to those who wait

    def result(self) -> torch.Tensor:
        self._work.wait()
        return self._tensor

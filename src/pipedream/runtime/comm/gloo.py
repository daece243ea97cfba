"""Connections over gloo: between CPUs, and for what NCCL does not carry.

A message is one gloo message if its header and its tensors fit into `SHORT_BYTES`. Larger tensors, the payload, go
before it in one of their own: copying them would take longer than its fixed cost. A header first would wake the
receiver, whose notice of its next receive then comes back while the sender still writes. gloo's thread cannot handle
what arrives on a connection that another thread writes to, and polls until it can: if both have one core, for a time
slice of 3 to 5 ms.

Receives are posted ahead without negotiating sizes, because gloo lets a message be shorter than its receive. The
receive for payload i of a stream is as large as the stream's largest payload up to i - depth, which both ends know. The
rest of a larger one follows with a tag of its own, because receives for later messages are posted already.

Receives are posted when a stream first uses a channel. At the stream's end the sender completes them with empty
messages (`begin_drain`), so nothing is under way between streams, however long that is.

Sends are never waited for on the critical path: a worker waits for its oldest message only when more are under way than
its schedule allows to be unread. (gloo reports a completed send only to a caller that waits.)

The methods of a ProcessGroup are used directly; `torch.distributed.isend` and `irecv` take twice as long.
"""

import weakref
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from pipedream.runtime.comm.channel import ConnectionReceiver, ConnectionSender
from pipedream.runtime.comm.message import (
    FILLER,
    Header,
    Message,
    MessageFormat,
    ReceivedFormats,
    SentFormats,
    flatten_in_memory_order,
    restore_device,
    wait_for_copies,
    write,
)

SHORT_BYTES = 1 << 13
"""Size of a message that is sent in one piece: copying it twice takes less than the 30 us of a second message.

Receives of this size are posted on every channel, so it is not larger.
"""
_ROUNDED_BYTES = 1 << 10


class GlooEndpoint:
    """One end of a connection over gloo.

    Attributes:
        peer: the other end's rank in the group.
        number: distinct for each channel of the run.
        depth: receives posted ahead.
        device: where received tensors go that were not in the memory of the CPU.
        separate: type of device whose tensors are not sent here; None is received in their place.
        pinned: buffers are copied from and to a GPU.
    """

    def __init__(
        self,
        peer: int,
        number: int,
        depth: int,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        separate: str = "",
    ) -> None:
        self.peer = peer
        self.number = number
        self.depth = depth
        self._group = weakref.ref(group)  # a reference would keep its threads after `Connections.close`
        self.device = device or torch.device("cpu")
        self.separate = separate
        tag = 3 * number + 3  # tags 0 to 2 are for messages without one, such as parameters
        self.head_tag, self.payload_tag, self.rest_tag = tag, tag + 1, tag + 2
        self.pinned = self.device.type == "cuda" and not separate

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "its pipeline is closed"
        return group

    def send(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return self.group.send(tensors, self.peer, tag)

    def receive(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        return self.group.recv(tensors, self.peer, tag)


class _PostedReceives:
    """The sizes of the receives that are posted for payloads, the oldest first, 0 for none; equal at both ends."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._largest = 0
        self.sizes: deque[int] = deque()

    def begin(self) -> None:
        """Begins a stream; training does not keep the large receives of an evaluation."""
        self._largest = 0
        self.sizes = deque([0] * self._depth)

    def take(self, payload_bytes: int) -> int:
        """Returns the size of the receive for the next payload, and adds a receive for a later one."""
        size = self.sizes.popleft()
        self._largest = max(self._largest, payload_bytes)
        self.sizes.append(self._largest)
        return size


class _Buffer:
    """A buffer in the memory of the CPU, for one message at a time."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size = size
        self.all_bytes = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned)]
        self.bytes: Any = self.all_bytes[0].numpy().data
        self._first_bytes = self.all_bytes
        self._format: MessageFormat | None = None
        self._begin = 0
        self._tensors: list[torch.Tensor | None] = []

    def take(self, size: int) -> list[torch.Tensor]:
        """Returns the first bytes."""
        if self._first_bytes[0].numel() != size:
            self._first_bytes = [self.all_bytes[0][:size]]
        return self._first_bytes

    def tensors(self, message_format: MessageFormat, begin: int) -> list[torch.Tensor | None]:
        """Returns the tensors of a payload from byte `begin` on."""
        if self._format is not message_format or self._begin != begin:
            self._format, self._begin = message_format, begin
            self._tensors = message_format.tensors_in(self.all_bytes[0], begin)
        return self._tensors


class GlooSender(ConnectionSender):
    """The sending end; keeps the last `max_unread` messages."""

    def __init__(self, endpoint: GlooEndpoint, max_unread: int) -> None:
        self._endpoint = endpoint
        self._max_unread = max_unread
        self._formats = SentFormats(endpoint.separate)
        self._posted = _PostedReceives(endpoint.depth)
        self._streaming = False
        self._unfinished: deque[tuple[list[dist.Work], _Buffer | None]] = deque()
        self._free: list[_Buffer] = []
        self._buffer_bytes = 0

    def send_on(self, message: Message, channel: int) -> MessageFormat:
        if not self._streaming:
            self._streaming = True
            self._posted.begin()
        end = self._endpoint
        number, message_format, description = self._formats.find(message)
        header = Header.of(message, number, channel, len(description))
        begin, size = header.head_bytes, message_format.payload_bytes
        is_short = begin + size <= SHORT_BYTES
        buffer = self._free_buffer(begin + size if is_short else begin)
        header.write(buffer.bytes, message.numbers, description)
        if is_short:
            if size:
                write(message.tensors, buffer.tensors(message_format, begin))
                wait_for_copies(message_format)
            works = [end.send(buffer.take(begin + size), end.head_tag)]
        else:
            works = []
            if begin > SHORT_BYTES:  # the receiver reads it before the rest of the payload, which has the same tag
                works.append(end.send([buffer.all_bytes[0][SHORT_BYTES:begin]], end.rest_tag))
            if size:
                works += self._send_payload(message, message_format)
            works.append(end.send(buffer.take(min(begin, SHORT_BYTES)), end.head_tag))
        self._sent_bytes += message_format.sent_bytes
        self._unfinished.append((works, buffer))
        while len(self._unfinished) > self._max_unread:
            self._wait_for_oldest()
        return message_format

    def _send_payload(self, message: Message, message_format: MessageFormat) -> list[dist.Work]:
        end, size = self._endpoint, message_format.payload_bytes
        shared = [
            t for t, spec in zip(message.tensors, message_format.specs, strict=True) if spec and spec.begin is not None
        ]
        if len(shared) == 1 and shared[0] is not None and shared[0].is_cpu:
            payload = flatten_in_memory_order(shared[0]).view(torch.uint8)
        else:
            payload = torch.empty(size, dtype=torch.uint8, pin_memory=end.pinned)
            write(message.tensors, message_format.tensors_in(payload))
            wait_for_copies(message_format)
        posted = self._posted.take(size)
        works = []
        if posted:
            works.append(end.send([payload[:posted]], end.payload_tag))
        if size > posted:
            works.append(end.send([payload[posted:]], end.rest_tag))
        return works  # each keeps its tensor

    def _free_buffer(self, size: int) -> _Buffer:
        if size > self._buffer_bytes:
            self._buffer_bytes = -(-size // _ROUNDED_BYTES) * _ROUNDED_BYTES
            self._free.clear()
        return self._free.pop() if self._free else _Buffer(self._buffer_bytes, self._endpoint.pinned)

    def _wait_for_oldest(self) -> None:
        works, buffer = self._unfinished.popleft()
        for work in works:
            work.wait()
        if buffer is not None and buffer.size == self._buffer_bytes:
            self._free.append(buffer)

    def begin_drain(self) -> None:
        if not self._streaming:  # then no receive is posted
            return
        self._streaming = False
        end = self._endpoint
        header = Header.of_filler()
        filler = _Buffer(header.head_bytes, pinned=False)
        header.write(filler.bytes, (), b"")
        works = [end.send(filler.all_bytes, end.head_tag) for _ in range(end.depth)]
        works += [end.send([filler.all_bytes[0][:1]], end.payload_tag) for size in self._posted.sizes if size]
        self._unfinished.append((works, None))

    def drain(self) -> None:
        while self._unfinished:
            self._wait_for_oldest()


class GlooReceiver(ConnectionReceiver):
    """The receiving end."""

    def __init__(self, endpoint: GlooEndpoint) -> None:
        self._endpoint = endpoint
        self._formats = ReceivedFormats()
        self._heads: deque[tuple[dist.Work, _Buffer]] = deque()
        self._free: list[_Buffer] = []
        self._posted = _PostedReceives(endpoint.depth)
        self._payloads: deque[tuple[dist.Work, torch.Tensor] | None] = deque()

    def take(self) -> tuple[Message, MessageFormat, int]:
        if not self._heads:
            self._begin()
        work, buffer = self._heads.popleft()
        work.wait()
        head = buffer.bytes
        header = Header.read(head)
        assert header.content != FILLER, "a message is expected on a channel whose sender drains"
        begin = header.head_bytes
        if begin > SHORT_BYTES:
            head = self._receive_rest(buffer.all_bytes[0], begin).numpy().data
        message_format, numbers = self._formats.find(header, head), header.read_numbers(head)
        if begin + message_format.payload_bytes > SHORT_BYTES:
            tensors = message_format.tensors_in(self._receive_payload(message_format.payload_bytes))
        else:
            tensors = [None if tensor is None else tensor.clone() for tensor in buffer.tensors(message_format, begin)]
        self._post_head(buffer)
        tensors = restore_device(tensors, message_format, self._endpoint.device)
        return header.message(message_format, tuple(tensors), numbers), message_format, header.channel

    def _receive_payload(self, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        posted, receive = self._posted.take(size), self._payloads.popleft()
        payload = torch.empty(0, dtype=torch.uint8)
        if receive is not None:
            work, payload = receive
            work.wait()
        if size > posted:
            payload = self._receive_rest(payload, size)
        self._post_payload(self._posted.sizes[-1])
        return payload

    def _receive_rest(self, begin: torch.Tensor, size: int) -> torch.Tensor:
        whole = torch.empty(size, dtype=torch.uint8, pin_memory=self._endpoint.pinned)
        whole[: begin.numel()].copy_(begin)
        self._endpoint.receive([whole[begin.numel() :]], self._endpoint.rest_tag).wait()
        return whole

    def _begin(self) -> None:
        self._posted.begin()
        for size in self._posted.sizes:
            self._post_head(self._free.pop() if self._free else _Buffer(SHORT_BYTES, pinned=False))
            self._post_payload(size)

    def _post_head(self, buffer: _Buffer) -> None:
        self._heads.append((self._endpoint.receive(buffer.all_bytes, self._endpoint.head_tag), buffer))

    def _post_payload(self, size: int) -> None:
        if not size:
            self._payloads.append(None)
            return
        # A new one each time: the caller owns what was received in it, and autograd may keep it.
        payload = torch.empty(size, dtype=torch.uint8, pin_memory=self._endpoint.pinned)
        self._payloads.append((self._endpoint.receive([payload], self._endpoint.payload_tag), payload))

    def drain(self) -> None:
        while self._heads:
            work, buffer = self._heads.popleft()
            work.wait()
            header = Header.read(buffer.bytes)
            assert header.content == FILLER, f"a message was left on a channel: {header}"
            self._free.append(buffer)
        for receive in self._payloads:
            if receive is not None:
                receive[0].wait()
        self._payloads.clear()

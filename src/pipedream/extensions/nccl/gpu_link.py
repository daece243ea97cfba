"""Links: all channels from one rank to another over one communicator of NCCL.

A communicator runs its messages in one order, each in a kernel that waits for the other end. So the channels share one
stream of headers, on gloo or shared memory, in the order of the sends. The receiver starts to receive a tensor only
once it has read its header, when the send is under way. It receives in the order of the headers, whatever their
channels, and on a CUDA stream of its own, so that receives do not wait for what the GPU computes.

Tensors in CPU memory travel with the header, as does the structure of a message, so no worker waits for its GPU to read
it.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from pipedream.runtime.comm.channel import ConnectionReceiver, ConnectionSender, PeerReceiver, Sender
from pipedream.runtime.comm.message import Message, MessageFormat, flatten_in_memory_order


class SendingLink:
    """The sending end of a link.

    Args:
        headers: sends everything but the tensors on GPUs, for all channels.
    """

    def __init__(self, headers: ConnectionSender, communicator: dist.ProcessGroup) -> None:
        self._headers = headers
        self._communicator = communicator
        self._receiver = 1 - communicator.rank()
        self._unfinished: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, message: Message, channel: int) -> int:
        """Sends a message; returns the bytes of its tensors."""
        message_format = self._headers.send_on(message, channel)
        for tensor, spec in zip(message.tensors, message_format.specs, strict=True):
            if tensor is not None and spec is not None and spec.begin is None and tensor.numel():
                data = _view_as_bytes(tensor)
                self._unfinished.append((self._communicator.send([data], self._receiver, 0), data))
        while self._unfinished and self._unfinished[0][0].is_completed():
            self._unfinished.popleft()
        return message_format.sent_bytes

    def begin_drain(self) -> None:
        self._headers.begin_drain()

    def drain(self) -> None:
        self._headers.drain()
        while self._unfinished:
            self._unfinished.popleft()[0].wait()


class ReceivingLink:
    """The receiving end of a link."""

    def __init__(self, headers: ConnectionReceiver, communicator: dist.ProcessGroup, device: torch.device) -> None:
        self._headers = headers
        self._communicator = communicator
        self._sender = 1 - communicator.rank()
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._received: dict[int, deque[tuple[Message, list[tuple[dist.Work, torch.Tensor]]]]] = {}

    def receive(self, channel: int) -> Message:
        """Returns the next message of a channel; starts to receive messages that were sent before it."""
        received = self._received.setdefault(channel, deque())
        while not received:
            message, message_format, number = self._headers.take()
            self._received.setdefault(number, deque()).append(self._start_receives(message, message_format))
        message, receives = received.popleft()
        for work, tensor in receives:
            work.wait()  # on a GPU, the stream of the computation waits
            if self._stream is not None:
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return message

    def _start_receives(
        self, message: Message, message_format: MessageFormat
    ) -> tuple[Message, list[tuple[dist.Work, torch.Tensor]]]:
        receives = []
        tensors = list(message.tensors)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for i, spec in enumerate(message_format.specs):
                if spec is not None and spec.begin is None:
                    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self._device)
                    tensors[i] = tensor
                    if tensor.numel():
                        work = self._communicator.recv([_view_as_bytes(tensor)], self._sender, 0)
                        receives.append((work, tensor))
        message.tensors = tuple(tensors)  # no one else has the message yet
        return message, receives

    def drain(self) -> None:
        unread = [channel for channel, received in self._received.items() if received]
        assert not unread, f"messages were left on the channels {unread}"
        self._headers.drain()


class LinkSender(Sender):
    """The sending end of one of the channels of a link."""

    def __init__(self, link: SendingLink, number: int) -> None:
        self._link = link
        self._number = number

    def send(self, message: Message) -> None:
        self._sent_bytes += self._link.send(message, self._number)

    def begin_drain(self) -> None:
        self._link.begin_drain()

    def drain(self) -> None:
        self._link.drain()


class LinkReceiver(PeerReceiver):
    """The receiving end of one of the channels of a link."""

    def __init__(self, link: ReceivingLink, number: int) -> None:
        self._link = link
        self._number = number

    def result(self) -> Message:
        return self._link.receive(self._number)

    def drain(self) -> None:
        self._link.drain()


def open_senders(
    headers: ConnectionSender, communicator: dist.ProcessGroup, numbers: Sequence[int]
) -> dict[int, LinkSender]:
    """Returns the sending ends of channels, by their numbers, that share a link."""
    link = SendingLink(headers, communicator)
    return {number: LinkSender(link, number) for number in numbers}


def open_receivers(
    headers: ConnectionReceiver, communicator: dist.ProcessGroup, device: torch.device, numbers: Sequence[int]
) -> dict[int, LinkReceiver]:
    """Returns the receiving ends of channels, by their numbers, that share a link."""
    link = ReceivingLink(headers, communicator, device)
    return {number: LinkReceiver(link, number) for number in numbers}


def _view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as bytes: NCCL has no complex numbers, no int16, and of the unsigned integers only uint8."""
    return flatten_in_memory_order(tensor).view(torch.uint8)

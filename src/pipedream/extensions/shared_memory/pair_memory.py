"""Connections between two processes of one machine: tensors in memory that both map, headers in a socket.

A message is copied into a free slot of the sender's memory, and its header, with the slot's number, is sent over a
Unix socket. The receiver copies the tensors out and sends the number back. So a message takes a copy and two system
calls at each end, and wakes only its receiver; gloo wakes a thread too, which competes with the stages for the cores.
A process that ends closes its sockets, which ends the other's wait.

The memory is in no file system (`memfd_create`): a killed process leaves nothing, and the size of /dev/shm is no
limit. There are two slots more than messages may be unread; a slot that is never used takes no memory. A message that
is too large for a slot gets new memory with larger slots; earlier messages are read from the old memory first, because
messages keep their order.

Processes find each other by Unix sockets without a file, which are visible within a network namespace; so an emulated
network of several machines stays one.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from contextlib import suppress
from uuid import uuid4

import torch

from pipedream.runtime.comm.channel import ConnectionReceiver, ConnectionSender
from pipedream.runtime.comm.message import (
    FILLER,
    Header,
    Message,
    MessageFormat,
    ReceivedFormats,
    SentFormats,
    restore_device,
    wait_for_copies,
    write,
)
from pipedream.runtime.comm.process_group import peers_may_end

MAX_UNREAD = 256
"""Messages of a channel whose headers and slot numbers fit into the buffers of its socket."""
_SOCKET_BYTES = 1 << 18
_PAGE_BYTES = 1 << 12
_NO_SLOT = 0xFFFF
_SLOT = struct.Struct("=H6x")
_MEMORY = struct.Struct("=2q")
_CREDENTIALS = struct.Struct("3i")
_KEY_BYTES = 32


def is_supported() -> bool:
    """Returns whether this system has memory without a file (Linux)."""
    return hasattr(os, "memfd_create")


class Listener:
    """Accepts connections from other processes of this machine and user while ranks connect."""

    def __init__(self) -> None:
        self.name = ""
        self._accepted: dict[bytes, socket.socket] = {}
        if not is_supported():
            return
        self.name = f"pipedream-{uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._socket)

    def connect(self, name: str, key: str) -> socket.socket | None:
        """Returns a connection to another process under a key; None if it is not on this machine or does not listen."""
        if not name or not self.name:
            return None
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{name}")
            if not _is_same_user(connection):
                raise PermissionError
        except OSError:
            connection.close()
            return None
        connection.sendall(key.encode().ljust(_KEY_BYTES))
        return connection

    def accept(self, key: str) -> socket.socket:
        """Waits for the process that connects with a key."""
        padded_key = key.encode().ljust(_KEY_BYTES)
        while padded_key not in self._accepted:
            for ready, _ in self._selector.select():
                self._read(ready.data)
        return self._accepted.pop(padded_key)

    def make_pair(self, connection: socket.socket, *, sends: bool) -> MemoryPair:
        return MemoryPair(connection, sends)

    def _read(self, ready: socket.socket) -> None:
        """Accepts a new connection, or reads the key of one; one without a key does not delay the others."""
        if ready is self._socket:
            connection, _ = ready.accept()
            if _is_same_user(connection):
                self._selector.register(connection, selectors.EVENT_READ, connection)
            else:
                connection.close()
            return
        self._selector.unregister(ready)
        key = b""
        with suppress(OSError):
            key = ready.recv(_KEY_BYTES)  # a key is sent whole
        if len(key) == _KEY_BYTES and key not in self._accepted:
            self._accepted[key] = ready
        else:
            ready.close()

    def close(self) -> None:
        if self.name:
            for connection in [*self._accepted.values(), *(key.data for key in self._selector.get_map().values())]:
                connection.close()
            self._selector.close()


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


class MemoryPair:
    """A sender and a receiver on one machine; both open their channels in one order."""

    max_unread = MAX_UNREAD

    def __init__(self, connection: socket.socket, sends: bool) -> None:
        self._connection = connection
        self._sends = sends
        self._opened: list[socket.socket] = []

    def open_sender(self, peer: int, max_unread: int, separate: str = "") -> SharedMemorySender:
        return SharedMemorySender(self.open(), peer, max_unread, separate)

    def open_receiver(self, peer: int, device: torch.device | None = None) -> SharedMemoryReceiver:
        return SharedMemoryReceiver(self.open(), peer, device)

    def open(self) -> socket.socket:
        """Returns this process's end of a new socket."""
        with peers_may_end():
            end = self._exchange_end()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._opened.append(end)
        return end

    def _exchange_end(self) -> socket.socket:
        if self._sends:
            end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                socket.send_fds(self._connection, [b"\0"], [other.fileno()])
        else:
            _, descriptors, _, _ = socket.recv_fds(self._connection, 1, 1)
            if not descriptors:
                raise ConnectionError("the other worker has closed the connection")
            end = socket.socket(fileno=descriptors[0])
            end.set_inheritable(False)
        return end

    def close(self) -> None:
        for end in (self._connection, *self._opened):
            end.close()


class _Slots:
    """Shared memory, divided into slots of equal size."""

    def __init__(self, file: int, count: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        # Unlike an mmap object, this keeps no descriptor.
        memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=count * slot_bytes, dtype=torch.uint8)
        self._slots = [memory[i * slot_bytes : (i + 1) * slot_bytes] for i in range(count)]
        self._tensors: list[tuple[MessageFormat | None, list[torch.Tensor | None]]] = [(None, [])] * count

    def tensors(self, slot: int, message_format: MessageFormat) -> list[torch.Tensor | None]:
        newest_format, tensors = self._tensors[slot]
        if newest_format is not message_format:
            tensors = message_format.tensors_in(self._slots[slot])
            self._tensors[slot] = message_format, tensors
        return tensors


class SharedMemorySender(ConnectionSender):
    """The sending end, with room for `max_unread` messages, the last one read, and the next one.

    Args:
        peer: the other end's rank.
        separate: type of device whose tensors are not sent here; None arrives in their place.
    """

    def __init__(self, connection: socket.socket, peer: int, max_unread: int, separate: str = "") -> None:
        self._connection = connection
        self._peer = peer
        self._count = max_unread + 2
        self._formats = SentFormats(separate)
        self._slots: _Slots | None = None
        self._free_slots: list[int] = []  # of messages that have been read
        self._unused_slots: list[int] = []
        self._old_slots_unread = 0  # slots of earlier memory whose numbers were not sent back yet
        self._packet = bytearray(_SOCKET_BYTES)
        self._view = memoryview(self._packet)
        self._head = self._view[_SLOT.size :]
        self._slot_buffer = bytearray(_SLOT.size)

    def send_on(self, message: Message, channel: int) -> MessageFormat:
        number, message_format, description = self._formats.find(message)
        slot, file = _NO_SLOT, None
        if message_format.payload_bytes:
            if self._slots is None or message_format.payload_bytes > self._slots.slot_bytes:
                file = self._allocate_larger(message_format.payload_bytes)
            assert self._slots is not None
            slot = self._free_slot()
            write(message.tensors, self._slots.tensors(slot, message_format))
            wait_for_copies(message_format)
        header = Header.of(message, number, channel, len(description))
        end = _SLOT.size + header.head_bytes
        if end > _SOCKET_BYTES // 2:
            raise ValueError(
                f"the value's structure takes {len(description):,} bytes, and shared memory allows "
                f"{_SOCKET_BYTES // 2:,}; cut where less crosses"
            )
        _SLOT.pack_into(self._packet, 0, slot)
        header.write(self._head, message.numbers, description)
        if file is None:
            self._send_packet(end)
        else:
            assert self._slots is not None
            _MEMORY.pack_into(self._packet, end, self._count, self._slots.slot_bytes)
            self._send_packet(end + _MEMORY.size, file)
        self._sent_bytes += message_format.sent_bytes
        return message_format

    def _send_packet(self, size: int, file: int | None = None) -> None:
        try:
            if file is None:
                self._connection.send(self._view[:size])
            else:
                socket.send_fds(self._connection, [self._view[:size]], [file])
                os.close(file)
        except OSError as error:
            raise _make_lost_error(self._peer) from error

    def begin_drain(self) -> None:
        header = Header.of_filler()
        header.write(self._head, (), b"")
        self._send_packet(_SLOT.size + header.head_bytes)

    def _allocate_larger(self, payload_bytes: int) -> int:
        """Allocates memory with larger slots; returns its file."""
        if self._slots is not None:
            self._old_slots_unread += self._count - len(self._free_slots) - len(self._unused_slots)
        slot_bytes = -(-payload_bytes // _PAGE_BYTES) * _PAGE_BYTES
        file = os.memfd_create("pipedream")
        os.ftruncate(file, self._count * slot_bytes)
        self._slots = _Slots(file, self._count, slot_bytes)
        self._free_slots, self._unused_slots = [], list(range(self._count))
        return file

    def _free_slot(self) -> int:
        """Returns a slot, if possible one that was used: the kernel allocates a slot when it is first used."""
        while not self._free_slots:
            try:
                self._receive_free_slot(socket.MSG_DONTWAIT if self._unused_slots else 0)
            except BlockingIOError:
                return self._unused_slots.pop()
        return self._free_slots.pop()

    def _receive_free_slot(self, flags: int) -> None:
        """Receives the number of a slot that has been read."""
        try:
            if not self._connection.recv_into(self._slot_buffer, 0, flags):
                raise _make_lost_error(self._peer)
        except BlockingIOError:
            raise
        except OSError as error:
            raise _make_lost_error(self._peer) from error
        if self._old_slots_unread:
            self._old_slots_unread -= 1
        else:
            self._free_slots.append(_SLOT.unpack(self._slot_buffer)[0])


class SharedMemoryReceiver(ConnectionReceiver):
    """The receiving end.

    Args:
        peer: the other end's rank.
        device: where received tensors go that were not in the memory of the CPU.
    """

    def __init__(self, connection: socket.socket, peer: int, device: torch.device | None = None) -> None:
        self._connection = connection
        self._peer = peer
        self._device = device or torch.device("cpu")
        self._formats = ReceivedFormats()
        self._slots: _Slots | None = None
        self._packets = [bytearray(_SOCKET_BYTES)]
        self._head = memoryview(self._packets[0])[_SLOT.size :]
        self._extra_bytes = socket.CMSG_SPACE(4)  # of a file descriptor
        self._read_slot = _NO_SLOT

    def take(self) -> tuple[Message, MessageFormat, int]:
        self._release_slot()
        header, extra = self._receive_header()
        head = self._head
        if extra:
            self._slots = self._map_memory(extra[0][2], *_MEMORY.unpack_from(head, header.head_bytes))
        message_format = self._formats.find(header, head)
        (slot,) = _SLOT.unpack_from(self._packets[0])
        if slot == _NO_SLOT:
            tensors = message_format.tensors_in(torch.empty(0, dtype=torch.uint8))
        else:
            assert self._slots is not None
            tensors = [None if t is None else t.clone() for t in self._slots.tensors(slot, message_format)]
            self._read_slot = slot
        tensors = restore_device(tensors, message_format, self._device)
        return header.message(message_format, tuple(tensors), header.read_numbers(head)), message_format, header.channel

    def _receive_header(self) -> tuple[Header, list[tuple[int, int, bytes]]]:
        try:
            size, extra, _, _ = self._connection.recvmsg_into(self._packets, self._extra_bytes)
        except OSError as error:
            raise _make_lost_error(self._peer) from error
        if not size:
            raise _make_lost_error(self._peer)
        return Header.read(self._head), extra

    def _release_slot(self) -> None:
        """Sends the number of the last message's slot back, before waiting for the next message."""
        slot, self._read_slot = self._read_slot, _NO_SLOT
        if slot != _NO_SLOT:
            with suppress(OSError):  # a sender that has ended does not need it
                self._connection.send(_SLOT.pack(slot))

    def _map_memory(self, descriptor: bytes, count: int, slot_bytes: int) -> _Slots:
        (file,) = struct.unpack("=i", descriptor)
        try:
            return _Slots(file, count, slot_bytes)
        finally:
            os.close(file)

    def drain(self) -> None:
        assert self._receive_header()[0].content == FILLER, "a message was left on a channel"


def _make_lost_error(peer: int) -> RuntimeError:
    return RuntimeError(f"Connection closed by rank {peer}")

"""Channels between two processes of one machine, through memory that both map.

Each channel has a region of memory and two pipes. The sender copies a message into a free block and writes its place
to one pipe; the receiver copies it out and says so in the other. So a message takes a copy and a system call or two at
each end, and wakes nobody but its receiver; gloo has a thread for that, and copies through the network's buffers. A
process that ends closes its pipes, which ends the other's wait.

The memory is in no file system (`memfd_create`): nothing is left by a process that is killed, and the size of /dev/shm
is no limit. Processes find each other by Unix sockets without a file, which reach as far as a network namespace does;
so what is shaped like a network of several machines remains one.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections import deque
from contextlib import suppress
from io import FileIO
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist

from pipedream.runtime.comm.distributed import ChannelEndpoint

__all__ = ["REGION_BYTES", "Listener", "MemoryPair", "SharedMemoryEndpoint"]

REGION_BYTES = 1 << 30
"""Of each channel. Only blocks that were used take memory; a message that finds none travels over gloo."""
_BLOCK_BYTES = 1 << 12
_RECORD = struct.Struct("=qq")
_ELSEWHERE = -1
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """Where other processes of this machine and user reach this one while ranks connect."""

    def __init__(self) -> None:
        self.name = ""
        self._waiting: dict[bytes, socket.socket] = {}
        if os.environ.get("PIPEDREAM_SHARED_MEMORY") == "0" or not hasattr(os, "memfd_create"):
            return
        self.name = f"pipedream-{uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(64)

    def connect(self, name: str, key: str) -> socket.socket | None:
        """Reaches another process under a key; None if it is elsewhere, or does not want it."""
        if not name or not self.name:
            return None
        found = socket.socket(socket.AF_UNIX)
        try:
            found.connect(f"\0{name}")
            if not _same_user(found):
                raise PermissionError
        except OSError:
            found.close()
            return None
        found.sendall(key.encode().ljust(32))
        return found

    def accept(self, key: str) -> socket.socket:
        """Waits for the process that connects with a key."""
        wanted = key.encode().ljust(32)
        while wanted not in self._waiting:
            found, _ = self._socket.accept()
            if _same_user(found):
                self._waiting[found.recv(32, socket.MSG_WAITALL)] = found
        return self._waiting.pop(wanted)

    def close(self) -> None:
        if self.name:
            self._socket.close()


def _same_user(found: socket.socket) -> bool:
    credentials = found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


class MemoryPair:
    """A sender and a receiver on one machine; both open their channels in one order."""

    def __init__(self, connection: socket.socket, sends: bool) -> None:
        self._connection = connection
        self._sends = sends
        self._files: list[FileIO] = []

    def open(self) -> tuple[Any, FileIO, FileIO]:
        """Returns the region, uint8[n] of NumPy, and this process's pipes of records and acknowledgements."""
        if self._sends:
            memory = os.memfd_create("pipedream")
            os.ftruncate(memory, REGION_BYTES)
            (read, records), (acks, write) = os.pipe(), os.pipe()
            os.set_blocking(acks, False)
            socket.send_fds(self._connection, [b"\0"], [memory, read, write])
            os.close(read)
            os.close(write)
            files = FileIO(records, "wb"), FileIO(acks, "rb")
        else:
            _, (memory, read, write), _, _ = socket.recv_fds(self._connection, 1, 3)
            for descriptor in (memory, read, write):
                os.set_inheritable(descriptor, False)
            files = FileIO(read, "rb"), FileIO(write, "wb")
        self._files += files
        region = np.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=np.uint8)
        os.close(memory)
        return region, *files

    def close(self) -> None:
        self._connection.close()
        for file in self._files:
            file.close()


class _Blocks:
    """Which blocks of a region are free; those of a message are freed in the order of the messages."""

    def __init__(self, region_bytes: int) -> None:
        self._most = region_bytes
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> int | None:
        """Returns the place of a block of at least `size` bytes; None if there is none."""
        size = max(_BLOCK_BYTES, 1 << (size - 1).bit_length())
        free = self._free.get(size)
        if free:
            place = free.pop()
        elif self._end + size <= self._most:
            place = self._end
            self._end += size
        else:
            return None
        self._taken.append((size, place))
        return place

    def has(self, size: int) -> bool:
        """Returns whether a block of this size was freed."""
        return bool(self._free.get(max(_BLOCK_BYTES, 1 << (size - 1).bit_length())))

    def free(self, count: int) -> None:
        for _ in range(count):
            size, place = self._taken.popleft()
            self._free.setdefault(size, []).append(place)


class SharedMemoryEndpoint(ChannelEndpoint):
    """One end of a channel within a machine. What is sent is received in the same order, whatever the tags."""

    def __init__(
        self,
        pair: MemoryPair,
        peer: int,
        number: int,
        depth: int,
        group: dist.ProcessGroup,
        device: torch.device | None = None,
        apart: str = "",
    ) -> None:
        super().__init__(peer, number, depth, group, device, apart)
        self._region, self._records, self._acks = pair.open()
        self._blocks = _Blocks(len(self._region))

    def send(self, tensors: list[torch.Tensor], tag: int) -> Any:
        source = tensors[0].numpy()
        size = source.size
        if not self._blocks.has(size):
            self._blocks.free(len(self._acks.read(_BLOCK_BYTES) or b""))
        place = self._blocks.take(size)
        if place is not None:
            self._region[place : place + size] = source
        try:
            self._records.write(_RECORD.pack(_ELSEWHERE if place is None else place, size))
        except BrokenPipeError:
            raise self._lost() from None
        return _SENT if place is not None else super().send(tensors, tag)

    def receive(self, tensors: list[torch.Tensor], tag: int) -> Any:
        return _Arriving(self, tensors, tag)

    def take(self, tensors: list[torch.Tensor], tag: int) -> None:
        """Waits for the next message, which may be shorter than its tensor."""
        record = self._records.read(_RECORD.size)
        if not record:
            raise self._lost()
        place, size = _RECORD.unpack(record)
        if place == _ELSEWHERE:
            super().receive(tensors, tag).wait()
            return
        tensors[0].numpy()[:size] = self._region[place : place + size]
        with suppress(BrokenPipeError):  # the sender needs no block any more
            self._acks.write(b"\0")

    def _lost(self) -> RuntimeError:
        return RuntimeError(f"Connection closed by rank {self.peer}")


class _Sent:
    """Of what was copied."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_SENT = _Sent()


class _Arriving:
    def __init__(self, endpoint: SharedMemoryEndpoint, tensors: list[torch.Tensor], tag: int) -> None:
        self._endpoint = endpoint
        self._tensors = tensors
        self._tag = tag

    def wait(self) -> None:
        self._endpoint.take(self._tensors, self._tag)

"""Moves blocks of memory to a disk or the host, and back before their use.

A block is the storage of tensors that a graph has saved. It is written after the last of them was saved, because
other tensors in it may be written in place before.

While the system's cache takes and returns blocks at once, the passes themselves copy them: to wake a thread takes more
of a core than to copy a megabyte. Once the disk keeps a pass waiting, and always on GPUs, one thread writes the blocks
and another reads each ahead of its backward, the last block of a forward first. Two windows then limit what is in
memory: blocks still to be written, for which the forward waits, and blocks that were read ahead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from pipedream.core.units import format_bytes

_PAGE_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MIN_SLOW_S = 0.0005
"""A pass may wait for the disk for as long as a thread takes to wake."""

_MIN_BYTES_PER_S = 1e9
"""Of the system's cache, at worst."""

_THREADED_BLOCKS = 64
"""How many blocks the threads move before the passes try again."""


class BlockFile:
    """Holds the blocks of one microbatch, in a file without a name, which the kernel frees with the process.

    Args:
        folder: None for blocks in the memory of the host, without a file.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = None if folder is None else tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.used_bytes = 0

    def reserve(self, size: int) -> int:
        """Returns where a block is to be written."""
        offset = self.used_bytes
        self.used_bytes += -(-size // _PAGE_BYTES) * _PAGE_BYTES
        return offset

    def write(self, offset: int, data: memoryview) -> None:
        assert self._file is not None
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], offset + done)

    def read(self, offset: int, data: memoryview) -> None:
        assert self._file is not None
        done = 0
        while done < len(data):
            count = os.preadv(self._file.fileno(), [data[done:]], offset + done)
            if not count:
                raise OSError(f"a file there ends {len(data) - done} bytes too early")
            done += count

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Block:
    """An offloaded storage.

    Attributes:
        memory: None while it is not in the worker's memory.
        host: its copy in the memory of the host, if it is there.
        is_away: its newest contents have been written.
        tensors: how many saved tensors a graph still has.
        unpacks_left: how many of them the next pass still has to unpack.
        needed: its backward comes next, so `memory` stays.
        is_loading: a thread is about to fill `memory`.
        saves: how many of its tensors were saved so far; another one outdates what was written.
        ready: on a GPU, the event after which it may be read.
    """

    __slots__ = (
        "file", "host", "is_away", "is_loading", "memory", "needed", "offset", "ready", "saves", "size", "tensors",
        "unpacks_left",
    )  # fmt: skip

    def __init__(self, memory: torch.UntypedStorage, file: BlockFile) -> None:
        self.memory: torch.UntypedStorage | None = memory
        self.size = memory.nbytes()
        self.file = file
        self.offset = file.reserve(self.size)
        self.host: torch.UntypedStorage | None = None
        self.tensors = self.unpacks_left = self.saves = 0
        self.is_away = self.needed = self.is_loading = False
        self.ready: Any = None


class BlockMover:
    """Moves blocks, for one worker. Lifecycle: `put` each block; `load` its tensors; `free`, `send_away`; `close`.

    Args:
        folder: None for the memory of the host.
        choose_next: called with the lock; returns the next block to read for a coming backward, or None.

    Attributes:
        lock: of all that the threads share with the passes.
        is_last_pass: no later backward reads the blocks of the running one.
        is_threaded: the threads move blocks, not the passes.
    """

    def __init__(self, folder: str | None, device: torch.device, choose_next: Callable[[], Block | None]) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.is_last_pass = True
        self.is_threaded = device.type == "cuda"
        self._threaded_blocks = 0  # that threads were given since `is_threaded`
        self._slowness = 0  # rises with slow moves of passes, falls with quick ones
        self._changed = threading.Condition(self.lock)
        self._device = device
        self._choose_next = choose_next
        self._window_bytes = self._unwritten_bytes = self._read_ahead_bytes = self._written_bytes = 0
        self._newest: Block | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._queue: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
        self._stream: Any = torch.cuda.Stream(device) if self.is_threaded else None  # type: ignore[no-untyped-call]
        self._threads = [
            threading.Thread(target=target, name=f"pipedream-{name}", daemon=True)
            for name, target in (("write-activations", self._write_blocks), ("read-activations", self._read_blocks))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, block: Block, memory: torch.UntypedStorage, window_bytes: int) -> None:
        """Takes a block each time that one of its tensors is saved; waits while more than a window is unwritten.

        The block is written once another one comes, or at `flush`.
        """
        with self.lock:
            if block is not self._newest:
                self._send_newest()
            if block.memory is None or not block.saves:
                block.memory = memory
                self._unwritten_bytes += block.size
            block.saves += 1
            block.is_away = False
            block.ready = self._stream and torch.cuda.current_stream(self._device).record_event()
            self._newest, self._window_bytes = block, window_bytes
            while self._unwritten_bytes > max(window_bytes, block.size) and self._error is None:
                self._changed.wait()
            self._raise_if_failed()

    def flush(self) -> None:
        """Writes the last block of a forward."""
        with self.lock:
            self._send_newest()

    def _send_newest(self) -> None:
        block, self._newest = self._newest, None
        if block is not None:
            self._send(block)

    def _send(self, block: Block) -> None:
        if not self.is_threaded:
            self._write(block)
            self._raise_if_failed()
            return
        self._queue.put(block)
        self._threaded_blocks += 1
        self.is_threaded = self._stream is not None or self._threaded_blocks < _THREADED_BLOCKS

    def load(self, block: Block) -> torch.UntypedStorage:
        """Returns the memory of a block, one of whose tensors is unpacked."""
        with self.lock:
            self._mark_needed(block)
            while block.is_loading and self._error is None:
                self._changed.wait()
            self._raise_if_failed()
            memory = block.memory
        if memory is None:
            try:
                memory = self._read(block)
            except OSError as error:
                self.fail(error)
                self.raise_failure()
        assert memory is not None
        with self.lock:
            block.memory = memory
            block.unpacks_left -= 1
            if block.unpacks_left <= 0 and (self.is_last_pass or block.is_away):
                self.drop(block)
        if self._stream is not None:
            data = torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory)
            data.record_stream(torch.cuda.current_stream(self._device))
        return memory

    def free(self, block: Block) -> None:
        """Records that a graph has freed one of a block's tensors."""
        with self.lock:
            block.tensors -= 1
            if not block.tensors:
                self.drop(block)

    # -- called with the lock --------------------------------------------------------------------------

    def wake_threads(self) -> None:
        """Lets the threads look for what to read, if they are to."""
        if self.is_threaded:
            self._changed.notify_all()

    def _mark_needed(self, block: Block) -> None:
        if not block.needed:
            block.needed = True
            self._read_ahead_bytes += block.size
            self._unwritten_bytes -= block.size if block.memory is not None else 0
            self.wake_threads()

    def drop(self, block: Block) -> None:
        """Frees a block's memory."""
        if block.needed:
            self._read_ahead_bytes -= block.size
        elif block.memory is not None:
            self._unwritten_bytes -= block.size
        block.memory, block.needed = None, False
        self.wake_threads()

    def send_away(self, block: Block) -> None:
        """Frees a block's memory until a later pass, after writing it if necessary."""
        block.unpacks_left = block.tensors
        if block.is_away:
            self.drop(block)
        elif block.needed and block.memory is not None:
            block.needed = False
            self._read_ahead_bytes -= block.size
            self._unwritten_bytes += block.size
            self._send(block)

    def _raise_if_failed(self) -> None:
        """Raises a `RuntimeError` if a thread has failed."""
        if self._error is None:
            return
        if self.folder is None or not isinstance(self._error, OSError):
            where = "the memory of the host" if self.folder is None else f"the folder {self.folder!r}"
            raise RuntimeError(f"activations are offloaded to {where}, but {self._error}") from self._error
        code = self._error.errno
        remedy = "free some of it" if code in _FULL else "make it again" if code == errno.ENOENT else "check its disk"
        raise RuntimeError(
            f"activations are offloaded to the folder {self.folder!r}, but: {self._error.strerror or self._error} "
            f"(this rank has written {format_bytes(self._written_bytes)} so far); {remedy}, or name another folder "
            "(--activations disk:FOLDER)"
        ) from self._error

    # -- the threads ----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self._error = error
            self._changed.notify_all()

    def raise_failure(self) -> None:
        with self.lock:
            self._raise_if_failed()

    def _write_blocks(self) -> None:
        while self._error is None and (block := self._queue.get()) is not None:
            self._write(block)
            with self.lock:
                self._changed.notify_all()

    def _write(self, block: Block) -> None:
        with self.lock:
            is_skipped = self._closed or block.needed or block.is_away
            memory, saves = None if is_skipped else block.memory, block.saves
        if memory is None:
            return
        try:
            self._copy_out(block, memory)
        except BaseException as error:
            self.fail(error)
            return
        del memory
        with self.lock:
            self._written_bytes += block.size
            if block.saves == saves:
                block.is_away = True
                if not block.needed and block.memory is not None:
                    self.drop(block)

    def _read_blocks(self) -> None:
        while True:
            with self.lock:
                while not self._closed and (block := self._choose_to_read()) is None:
                    self._changed.wait()
                if self._closed or block is None:
                    return
                self._mark_needed(block)
                if block.memory is not None:
                    continue
                block.is_loading = True
            try:
                memory = self._read(block)
            except BaseException as error:
                self.fail(error)
                return
            with self.lock:
                block.is_loading = False
                block.memory = memory if block.needed else None
                self._changed.notify_all()
            del memory

    def _choose_to_read(self) -> Block | None:
        may_read = self.is_threaded and self._read_ahead_bytes < self._window_bytes
        return self._choose_next() if may_read else None

    def _copy_out(self, block: Block, memory: torch.UntypedStorage) -> None:
        if self._stream is not None:
            host = torch.empty(block.size, dtype=torch.uint8, pin_memory=True)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(block.ready)
                host.copy_(torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory), non_blocking=True)
                self._stream.synchronize()
            memory = host.untyped_storage()
        if self.folder is None:
            block.host = memory
        else:
            self._move(block.file.write, block, memory)

    def _read(self, block: Block) -> torch.UntypedStorage:
        memory = block.host
        if memory is None:
            pins = self._stream is not None
            memory = torch.empty(block.size, dtype=torch.uint8, pin_memory=pins).untyped_storage()
            self._move(block.file.read, block, memory)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                host = torch.empty(0, dtype=torch.uint8).set_(memory)
                memory = host.to(self._device, non_blocking=True).untyped_storage()
                self._stream.synchronize()
        return memory

    def _move(self, move: Callable[[int, memoryview], None], block: Block, memory: torch.UntypedStorage) -> None:
        """Writes or reads a block; if passes have been slow at it twice, threads move the next ones.

        Once, a pass may have lost its core to another process.
        """
        was_threaded, start_s = self.is_threaded, time.perf_counter()
        move(block.offset, view_bytes(memory))
        if was_threaded:
            return
        if time.perf_counter() - start_s < max(_MIN_SLOW_S, block.size / _MIN_BYTES_PER_S):
            self._slowness = max(0, self._slowness - 1)
        elif self._slowness:
            self.is_threaded, self._threaded_blocks = True, 0
        else:
            self._slowness = 4

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()


def view_bytes(memory: torch.UntypedStorage) -> memoryview:
    """Returns a view of memory of the CPU, valid while the storage is."""
    return memoryview((ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr()))

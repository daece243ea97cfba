"""Moves blocks of a GPU's memory to the host, and back before their use.

A block is the storage of tensors that a graph has saved. It is copied after the last of them was saved, because other
tensors in it may be written in place before.

One thread copies blocks to the host, and another copies each back ahead of its backward, the last block of a forward
first. Two windows limit what is on the GPU: blocks still to be copied, for which the forward waits, and blocks that
were copied ahead.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch


class Block:
    """An offloaded storage.

    Attributes:
        memory: None while it is not on the device.
        host: its copy in the memory of the host, if it is there.
        is_away: its newest contents have been copied.
        tensors: how many saved tensors a graph still has.
        unpacks_left: how many of them the next pass still has to unpack.
        needed: its backward comes next, so `memory` stays.
        is_loading: a thread is about to fill `memory`.
        saves: how many of its tensors were saved so far; another one outdates what was copied.
        ready: on a GPU, the event after which it may be copied.
    """

    __slots__ = (
        "host", "is_away", "is_loading", "memory", "needed", "ready", "saves", "size", "tensors", "unpacks_left",
    )  # fmt: skip

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory: torch.UntypedStorage | None = memory
        self.size = memory.nbytes()
        self.host: torch.Tensor | None = None
        self.tensors = self.unpacks_left = self.saves = 0
        self.is_away = self.needed = self.is_loading = False
        self.ready: Any = None


class BlockMover:
    """Moves blocks, for one worker. Lifecycle: `put` each block; `load` its tensors; `free`, `send_away`; `close`.

    Args:
        device: without a GPU, blocks are copied within the host's memory, which only shows that it works.
        choose_next: called with the lock; returns the next block to copy back for a coming backward, or None.

    Attributes:
        lock: of all that the threads share with the passes.
        is_last_pass: no later backward reads the blocks of the running one.
    """

    def __init__(self, device: torch.device, choose_next: Callable[[], Block | None]) -> None:
        self.lock = threading.RLock()
        self.is_last_pass = True
        self._changed = threading.Condition(self.lock)
        self._device = device
        self._choose_next = choose_next
        self._window_bytes = 0
        self._resident_bytes = 0  # on the device, and not `needed`: still to be copied
        self._ahead_bytes = 0  # of `needed` blocks
        self._newest: Block | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._queue: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._threads = [
            threading.Thread(target=target, name=f"pipedream-{name}", daemon=True)
            for name, target in (("offload-activations", self._copy_blocks), ("load-activations", self._load_blocks))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, block: Block, memory: torch.UntypedStorage, window_bytes: int) -> None:
        """Takes a block each time that one of its tensors is saved; waits while more than a window is to be copied.

        The block is copied once another one comes, or at `flush`.
        """
        with self.lock:
            if block is not self._newest:
                self.flush()
            if block.memory is None or not block.saves:  # new, or copied and dropped already
                block.memory = memory
                self._resident_bytes += block.size
            block.saves += 1
            block.is_away = False
            block.ready = self._stream and torch.cuda.current_stream(self._device).record_event()
            self._newest, self._window_bytes = block, window_bytes
            while self._resident_bytes > max(window_bytes, block.size) and self._error is None:
                self._changed.wait()
            self._raise_if_failed()

    def flush(self) -> None:
        """Lets the newest block be copied, as another one comes or the forward has ended."""
        with self.lock:
            block, self._newest = self._newest, None
            if block is not None:
                self._queue.put(block)

    def load(self, block: Block) -> torch.UntypedStorage:
        """Returns the memory of a block, one of whose tensors is unpacked."""
        with self.lock:
            self._mark_needed(block)
            while block.is_loading and self._error is None:
                self._changed.wait()
            self._raise_if_failed()
            memory = block.memory
        # Without the lock; nobody else loads a block that is `needed`.
        memory = self._copy_back(block) if memory is None else memory
        with self.lock:
            block.memory = memory
            block.unpacks_left -= 1
            if block.unpacks_left <= 0 and (self.is_last_pass or block.is_away):  # else `send_away` copies it first
                self.drop(block)
        if self._stream is not None:  # allocated on the mover's stream, the memory must outlive its use on this one
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
        """Lets the threads look for what to copy back."""
        self._changed.notify_all()

    def _mark_needed(self, block: Block) -> None:
        if not block.needed:
            block.needed = True
            self._ahead_bytes += block.size
            self._resident_bytes -= block.size if block.memory is not None else 0
            self.wake_threads()

    def drop(self, block: Block) -> None:
        """Frees a block's memory on the device."""
        if block.needed:
            self._ahead_bytes -= block.size
        elif block.memory is not None:
            self._resident_bytes -= block.size
        block.memory, block.needed = None, False
        self.wake_threads()

    def send_away(self, block: Block) -> None:
        """Frees a block's memory until a later pass, after copying it if necessary."""
        block.unpacks_left = block.tensors
        if block.is_away:
            self.drop(block)
        elif block.needed and block.memory is not None:  # others wait to be copied since their forward
            block.needed = False
            self._ahead_bytes -= block.size
            self._resident_bytes += block.size
            self._queue.put(block)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"activations are offloaded to the host's memory, but: {self._error}") from self._error

    # -- the threads ----------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self._error = error
            self._changed.notify_all()

    def _copy_blocks(self) -> None:
        while self._error is None and (block := self._queue.get()) is not None:
            with self.lock:
                is_skipped = self._closed or block.needed or block.is_away
                memory, saves = None if is_skipped else block.memory, block.saves
            if memory is not None:
                try:
                    block.host = self._copy_out(block, memory)
                except BaseException as error:
                    self._fail(error)
                    return
            with self.lock:
                if memory is not None and block.saves == saves:
                    block.is_away = True
                    if not block.needed and block.memory is not None:
                        self.drop(block)
                self._changed.notify_all()
            del memory  # not kept while this waits for the next block

    def _load_blocks(self) -> None:
        while True:
            with self.lock:
                while not self._closed and (block := self._choose_to_load()) is None:
                    self._changed.wait()
                if self._closed or block is None:
                    return
                self._mark_needed(block)
                if block.memory is not None:  # it never left, and now stays
                    continue
                block.is_loading = True
            try:
                memory = self._copy_back(block)
            except BaseException as error:
                self._fail(error)
                return
            with self.lock:
                block.is_loading = False
                block.memory = memory if block.needed else None  # its backward may have ended meanwhile
                self._changed.notify_all()
            del memory

    def _choose_to_load(self) -> Block | None:
        return self._choose_next() if self._ahead_bytes < self._window_bytes else None

    def _copy_out(self, block: Block, memory: torch.UntypedStorage) -> torch.Tensor:
        host = torch.empty(block.size, dtype=torch.uint8, pin_memory=self._stream is not None)
        data = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        if self._stream is None:
            return host.copy_(data)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(block.ready)
            host.copy_(data, non_blocking=True)
            self._stream.synchronize()  # the block's memory is dropped next
        return host

    def _copy_back(self, block: Block) -> torch.UntypedStorage:
        assert block.host is not None
        if self._stream is None:
            return block.host.clone().untyped_storage()
        with torch.cuda.stream(self._stream):
            memory = block.host.to(self._device, non_blocking=True).untyped_storage()
            self._stream.synchronize()
        return memory

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()

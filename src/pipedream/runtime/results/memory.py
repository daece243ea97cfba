"""The memory that the workers of a process need."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_SCARCE_SHARE = 0.75  # of the free memory: gaps between blocks are up to a quarter of what is in use
_FIRST_OPS = 32  # whose peak does not count if there are more: modules are imported, kernels set up
_FIRST_READS_S, _READING_SHARE = 0.01, 0.003  # what reading may take of a phase's CPU time: a stage may mostly wait
_APART = 7  # ops from one that may be read to the next, after the first reads: to ask for the CPU time takes 2 us, too


class Peak(NamedTuple):
    """Bytes in a phase.

    Attributes:
        rise_bytes: from what is in use when the pipeline is drained to the most before, if known; most of all drains.
        reserved_bytes: the most that the allocator took; on a CPU, that the process ever had.
    """

    rise_bytes: int | None
    reserved_bytes: int


class MemoryMeter:
    """Measures a phase's peak: on a GPU what tensors took, on a CPU what malloc gave out at the ends of ops, and
    on a mesh also in backwards.

    The heap has more than tensors: modules that were imported, caches of kernels, the user's data. What is there when
    the pipeline is drained is therefore counted by `tensor_bytes`, and only the rise to the peak is read from the heap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Begins a phase, at a drain."""
        self._ops = self._most_bytes = self._rise_bytes = 0
        self._begin_s, self._reading_s = time.process_time(), 0.0
        self._trains = True
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def sample(self, is_forward: bool) -> None:
        """Reads the heap of a CPU, in 2 to 300 us, unless that has taken too long; called at the end of an op.

        Between a drain and the next backward forwards do not count: they may be those of an evaluation.
        """
        self._ops += 1
        self._trains |= not is_forward
        if self._ops == _FIRST_OPS:  # however long their reads took: those that count begin here
            self._most_bytes = self._rise_bytes = 0
            self._begin_s, self._reading_s = time.process_time(), 0.0
        self.look()

    def look(self) -> None:
        """Reads the heap of a CPU, also inside an op, as `sample` does."""
        if self._device is not None or not self._trains or (self._reading_s > _FIRST_READS_S and self._ops % _APART):
            return
        before_s = time.process_time()
        if self._reading_s <= _FIRST_READS_S + _READING_SHARE * (before_s - self._begin_s):
            self._most_bytes = max(self._most_bytes, _read_heap_bytes())
            self._reading_s += time.process_time() - before_s

    def at_drain(self) -> Peak:
        """Returns the peak of the phase until now."""
        self._trains = False
        if self._device is not None:
            now = torch.cuda.memory_allocated(self._device)
            return Peak(torch.cuda.max_memory_allocated(self._device) - now, self.reserved_bytes)
        # Each drain has its own base: what an evaluation loads stays in the heap.
        self._rise_bytes = max(self._rise_bytes, self._most_bytes - _read_heap_bytes())
        self._most_bytes = 0
        return Peak(self._rise_bytes if _heap_has_tensors() else None, self.reserved_bytes)

    @property
    def reserved_bytes(self) -> int:
        if self._device is not None:
            return torch.cuda.max_memory_reserved(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keep_freed_memory(peak_bytes: int = 0, free_bytes: int = sys.maxsize) -> None:
    """Lets malloc keep up to 256 MiB of freed memory, and blocks of up to 32 MiB in it.

    By default it gives much of what an update has freed back to the system, and each minibatch pays for taking it
    again, page by page: up to 6% of its time. Where memory is scarce, blocks above 4 MiB are given back at once
    instead, which lengthened minibatches by up to 30%. The user's own settings in the environment count.

    Args:
        peak_bytes: what this process is going to take.
        free_bytes: what it may take.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_")]
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and not chosen and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        is_scarce = peak_bytes > _SCARCE_SHARE * free_bytes
        set_option(_TRIM_THRESHOLD, 1 << (17 if is_scarce else 28))
        set_option(_MMAP_THRESHOLD, 1 << (22 if is_scarce else 25))


def tensor_bytes(*roots: Any) -> int:
    """Returns the bytes of the tensors that objects of the runtime, their modules and optimizers hold."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    left = deque(roots)
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
            left.append(item.grad if item.is_leaf else None)
        elif isinstance(item, nn.Module):
            left.extend((*item.parameters(), *item.buffers()))
        elif isinstance(item, torch.optim.Optimizer):
            left.extend((item.state, item.param_groups))
        elif isinstance(item, Mapping):
            left.extend(item.values())
        elif isinstance(item, (list, tuple, set, deque)):
            left.extend(item)
        elif type(item).__module__.startswith("pipedream.runtime."):
            left.extend(getattr(item, "__dict__", {}).values())
            left.extend(getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return sum(storages.values())


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "blocks", "small", "maps", "map_bytes", "peak", "fast", "used_bytes", "free_bytes", "top")
    )


def _read_heap_bytes() -> int:
    """Returns the bytes that malloc has given out, from its heaps and as maps of their own; 0 without glibc 2.33."""
    read = _find_heap_reader()
    if read is None:
        return 0
    heap = read()
    return int(heap.used_bytes + heap.map_bytes)


@cache
def _find_heap_reader() -> Any:
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is not None:
        read.restype = _Heap
    return read


@cache
def _heap_has_tensors() -> bool:
    """Returns whether torch's memory is in the heap that is read; not if another malloc was loaded first."""
    before = _read_heap_bytes()
    block = torch.empty(1 << 20, dtype=torch.uint8)
    return _read_heap_bytes() - before >= block.numel()

"""The memory that the workers of a process need."""

import ctypes
import resource
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

_FIRST_OPS = 32  # ignored in the peak if more follow: they import modules and set up kernels
_FIRST_READS_S, _READING_SHARE = 0.01, 0.003  # limits of reading: in all, and of a phase's CPU time, as stages wait
_STRIDE = 7  # after the first reads only every seventh op may be read, as reading the CPU time takes 2 us


class Peak(NamedTuple):
    """Bytes in a phase.

    Attributes:
        rise_bytes: from the bytes in use at a drain to the peak before it, if known; the greatest of all drains.
        reserved_bytes: the most that the allocator had reserved; on a CPU, that the process ever had.
    """

    rise_bytes: int | None
    reserved_bytes: int


class MemoryMeter:
    """Measures a phase's peak: of tensors on a GPU; on a CPU of the heap at the ends of ops, and on a mesh within
    backwards too.

    The heap also holds imported modules, caches of kernels and the user's data. So `tensor_bytes` counts what is in use
    at a drain, and the heap gives only the rise to the peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Begins a phase, at a drain."""
        self._ops = self._heap_peak_bytes = self._rise_bytes = 0
        self._begin_s, self._reading_s = time.process_time(), 0.0
        self._trains = True
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def sample(self, is_forward: bool) -> None:
        """Reads the heap of a CPU, in 2 to 300 us, unless reads have taken too long; called at the end of an op.

        Forwards between a drain and the next backward are ignored: they may be an evaluation's.
        """
        self._ops += 1
        self._trains |= not is_forward
        if self._ops == _FIRST_OPS:  # the reads that count begin here, however long the first ones took
            self._heap_peak_bytes = self._rise_bytes = 0
            self._begin_s, self._reading_s = time.process_time(), 0.0
        self.read_heap()

    def read_heap(self) -> None:
        """Reads the heap of a CPU within the same limits; may be called inside an op."""
        if self._device is not None or not self._trains or (self._reading_s > _FIRST_READS_S and self._ops % _STRIDE):
            return
        before_s = time.process_time()
        if self._reading_s <= _FIRST_READS_S + _READING_SHARE * (before_s - self._begin_s):
            self._heap_peak_bytes = max(self._heap_peak_bytes, _read_heap_bytes())
            self._reading_s += time.process_time() - before_s

    def measure_peak(self) -> Peak:
        """Returns the peak of the phase so far; called at a drain."""
        self._trains = False
        if self._device is not None:
            used_bytes = torch.cuda.memory_allocated(self._device)
            return Peak(torch.cuda.max_memory_allocated(self._device) - used_bytes, self.reserved_bytes)
        # Each drain has its own base: what an evaluation loads stays in the heap.
        self._rise_bytes = max(self._rise_bytes, self._heap_peak_bytes - _read_heap_bytes())
        self._heap_peak_bytes = 0
        return Peak(self._rise_bytes if _heap_has_tensors() else None, self.reserved_bytes)

    @property
    def reserved_bytes(self) -> int:
        if self._device is not None:
            return torch.cuda.max_memory_reserved(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def tensor_bytes(*roots: Any) -> int:
    """Returns the bytes of the tensors that objects of the runtime, their modules and optimizers hold."""
    storages: dict[int, int] = {}
    visited_ids: set[int] = set()
    to_visit = deque(roots)
    while to_visit:
        item = to_visit.pop()
        if id(item) in visited_ids:
            continue
        visited_ids.add(id(item))
        if isinstance(item, torch.Tensor) and not item.is_meta:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
            to_visit.append(item.grad if item.is_leaf else None)  # of others torch warns
        elif isinstance(item, nn.Module):
            to_visit.extend((*item.parameters(), *item.buffers()))
        elif isinstance(item, torch.optim.Optimizer):
            to_visit.extend((item.state, item.param_groups))
        elif isinstance(item, Mapping):
            to_visit.extend(item.values())
        elif isinstance(item, (list, tuple, set, deque)):
            to_visit.extend(item)
        elif type(item).__module__.startswith(("pipedream.runtime.", "pipedream.extensions.")):
            to_visit.extend(getattr(item, "__dict__", {}).values())
            to_visit.extend(getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return sum(storages.values())


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "blocks", "small", "maps", "map_bytes", "peak", "fast", "used_bytes", "free_bytes", "top")
    )


def _read_heap_bytes() -> int:
    """Returns the bytes that malloc has allocated, in its heaps and as separate maps; 0 without glibc 2.33."""
    read_heap = _find_heap_reader()
    if read_heap is None:
        return 0
    heap = read_heap()
    return int(heap.used_bytes + heap.map_bytes)


@cache
def _find_heap_reader() -> Any:
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is not None:
        read.restype = _Heap
    return read


@cache
def _heap_has_tensors() -> bool:
    """Returns whether torch's memory is in the heap that is read; False if another malloc was loaded first."""
    old_bytes = _read_heap_bytes()
    block = torch.empty(1 << 20, dtype=torch.uint8)
    return _read_heap_bytes() - old_bytes >= block.numel()

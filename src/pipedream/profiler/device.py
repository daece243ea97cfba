"""Measures what a device can do: its own row in the table of `pipedream.core.devices`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from ..core.devices import Device, device_named
from ..core.errors import ProfileError
from .about import device_text

__all__ = ["device_of", "dtype_of", "measure_device"]

_PRODUCT = 1024  # rows and columns of the matrices that are multiplied on a CPU
_CUDA_PRODUCT = 8192
_COPY_BYTES = 64 << 20  # well above the caches
_CUDA_COPY_BYTES = 1 << 30


def device_of(name: str) -> Device:
    """Returns a device by its name: one of the table, a file's, or 'here', which is measured.

    Raises:
        ProfileError: there is none of this name.
        ArtifactError: the file holds no device.
    """
    if name == "here":
        return measure_device("cuda" if torch.cuda.is_available() else "cpu")
    return Device.load(name) if name.endswith(".json") or Path(name).is_file() else device_named(name)


def dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """Returns a floating-point dtype by its name, as in ``bfloat16``.

    Raises:
        ProfileError: torch has none of this name.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ProfileError(f"dtype {name!r} is not known; write bfloat16, float16, float32 or float64")
    return found


def measure_device(device: str | torch.device = "cpu", *, seconds: float = 1.5) -> Device:
    """Measures matrix products, copies and the overhead of an operation, with the threads that torch is set to.

    Args:
        device: where.
        seconds: to take for it, about.
    """
    place = torch.device(device)
    cuda = place.type == "cuda"
    share_s = seconds / 6
    size = _CUDA_PRODUCT if cuda else _PRODUCT
    peaks = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        one = torch.ones(size, size, dtype=dtype, device=place)
        product_s = _op_s(lambda one=one: torch.mm(one, one), place, share_s)  # type: ignore[misc]
        peaks[str(dtype).removeprefix("torch.")] = 2 * size**3 / product_s
    long = torch.ones((_CUDA_COPY_BYTES if cuda else _COPY_BYTES) // 4, device=place)
    other = torch.ones_like(long)
    copy_s = _op_s(lambda: torch.add(long, other), place, share_s)
    few = torch.ones(8, device=place)
    launch_s = _op_s(lambda: torch.add(few, few), place, share_s)
    memory = (
        torch.cuda.get_device_properties(place).total_memory
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    return Device(
        f"{device_text(place)} (roofline)",
        memory,
        peaks,
        3 * long.nbytes / copy_s,
        launch_s=launch_s,
        flop_share=1.0,
        byte_share=1.0,
    )


def _op_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Returns the median seconds of one operation of a few batches of them, within a time."""

    def batch_s(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / count

    batch_s(1)
    count = max(1, int(seconds / 6 / max(batch_s(2), 1e-9)))
    return median(batch_s(count) for _ in range(5))

"""The machine of a worker, its speed and its memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

__all__ = ["available_bytes", "machine_name", "memory_name", "work_s"]

_MATRIX = {"cpu": 384, "cuda": 4096}


def machine_name() -> str:
    """Returns a text that all processes of a machine share. A container or a network namespace counts as a machine."""
    return "/".join((platform.node(), _boot(), _network()))


def available_bytes(device: torch.device, sharing: int) -> int:
    """Returns the memory of a worker: its GPU's, or its share of the machine's among `sharing` workers."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free // sharing


def work_s(device: torch.device, most_s: float) -> float:
    """Returns the lower quartile of the seconds of a float32 matrix product, repeated for at least `most_s`."""
    edge = _MATRIX.get(device.type, _MATRIX["cpu"])
    one = torch.ones(edge, edge, device=device)
    two = torch.ones(edge, edge, device=device)
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < 5 or time.perf_counter() - begun < most_s:
        start = time.perf_counter()
        torch.mm(one, two)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 4]


def memory_name(device: torch.device) -> str:
    """Returns a text that is equal for workers that share memory: those of a machine, across its containers."""
    return f"{platform.node()}/{_boot()}" if device.type != "cuda" else ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _network() -> str:
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return ""

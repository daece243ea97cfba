"""Measures a worker's machine: its name, its memory, its speed, and its GPUs."""

import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, permutations
from pathlib import Path

import torch

from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.hardware.cluster import Cluster, Level, Workers
from pipedream.core.hardware.devices import GPU_LINKS, OTHER_LINKS, Device, device_named
from pipedream.services.probe.survey import lower_quartile

_CONTEXT_BYTES = 1_500_000_000
"""GPU memory that CUDA, its libraries and kernels take in each process: an estimate."""

_COMMUNICATORS_BYTES = 500_000_000
"""GPU memory that NCCL's buffers take in each process: an estimate for four neighbours."""

_ETHERNET_BYTES_PER_S, _ETHERNET_S = 1.25e9, 50e-6

_MATRIX = {"cpu": 384, "cuda": 4096}
_COPIED_BYTES, _COPIES = 1 << 26, 5


def machine_name() -> str:
    """Returns a text shared by the processes of a machine. A container or network namespace counts as a machine."""
    return "/".join((platform.node(), _read_boot_id(), _read_network()))


def available_bytes(device: torch.device, sharing: int) -> int:
    """Returns the memory of a worker: its GPU's, or its share of the machine's among `sharing` workers.

    For a GPU, what this process may still allocate, less what NCCL will need.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
        return max(1, free - _COMMUNICATORS_BYTES)
    return min([host_bytes() // sharing, *_list_limit_bytes()])


def _list_limit_bytes() -> Iterator[int]:
    """Yields the bytes that each limit of the process (`ulimit -d`, `-v`) leaves it."""
    for limit, row in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most_bytes, _ = resource.getrlimit(limit)
        if most_bytes != resource.RLIM_INFINITY:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{row}:"))
            yield max(0, most_bytes - used)


def host_bytes() -> int:
    """Returns the memory that this machine and its control groups still allow."""
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_list_group_bytes()])


def _list_group_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Yields the bytes left in each control group of this process and those around it."""
    with suppress(OSError, StopIteration):
        row = next(row for row in membership.read_text().splitlines() if row.startswith("0::"))
        folder = root / row.removeprefix("0::").lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                return
            with suppress(OSError, ValueError):  # no number: no limit
                limit = int((group / "memory.max").read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
                yield max(0, limit - used)


def probe_gpus(workers: int | None = None, memory_bytes: int | None = None, device: str = "cuda") -> Cluster:
    """Returns the cluster of this machine's GPUs, by default a worker for each.

    Their links are assumed to be as `GPU_LINKS` says.

    Args:
        memory_bytes: of each worker; by default what is free, or an equal share of it.
        device: 'cuda:N': the workers share this GPU, in one process; 'cuda': each has a GPU, and those that this
            machine lacks are on further ones like it, at 10 Gbit/s Ethernet.

    Raises:
        PlanError: this machine has no such GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shared = torch.device(device).index
    if count <= (shared or 0):
        raise PlanError(f"the cluster of device {device!r} was asked for, but {count} GPUs were found; use the cpu")
    if shared is not None:
        device_row = _find_device(shared)
        # Nothing is copied between workers of one process.
        rate = device_row.bytes_per_s * device_row.byte_share if device_row is not None else 1e11
        size = memory_bytes or max(1, _measure_gpu_bytes(shared) // (workers or 1))
        return replace(Cluster.flat(workers or 1, rate, 0.0, size, _name_gpu(shared)), host_bytes=host_bytes())
    total = workers or count
    width = min(count, total, int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    levels: tuple[Level, ...] = (_describe_links(range(width)),)
    machines, rest = divmod(total, width)
    if machines > 1 or rest:
        sizes = (*(width,) * machines, rest) if rest else ()
        ethernet = Level(machines + bool(rest), _ETHERNET_BYTES_PER_S, _ETHERNET_S)
        levels = (replace(levels[0], sizes=sizes), ethernet) if width > 1 else (ethernet,)
    of_each = [memory_bytes or max(1, _measure_gpu_bytes(gpu) - _COMMUNICATORS_BYTES) for gpu in range(width)]
    kinds = _group_workers(of_each, total)
    unlike = kinds if len({kind.device for kind in kinds}) > 1 else ()
    return Cluster(levels, min(of_each), _name_gpu(0), unlike, host_bytes=host_bytes())


def _describe_links(gpus: range) -> Level:
    """Returns the links among GPUs of this machine: NVLink, or else PCIe, as fast as the slowest has it."""
    named = [_find_device(gpu) for gpu in gpus]
    links = [GPU_LINKS.get(device.name, OTHER_LINKS) if device is not None else OTHER_LINKS for device in named]
    peers = all(torch.cuda.can_device_access_peer(gpu, other) for gpu, other in permutations(gpus, 2))
    rates = [(link.nvlink_bytes_per_s if peers else None) or link.pcie_bytes_per_s for link in links]
    return Level(len(gpus), min(rates) * links[0].share, links[0].latency_s)


def _group_workers(memories: Sequence[int], workers: int) -> tuple[Workers, ...]:
    """Returns all workers in order, every machine like this one, with speeds relative to GPU 0."""
    first, kinds = _find_device(0), []
    for name, group in groupby((worker % len(memories) for worker in range(workers)), _name_gpu):
        gpus = list(group)
        device = _find_device(gpus[0])
        speed = device.speed_against(first) if device is not None and first is not None else 1.0
        kinds.append(Workers(len(gpus), name, speed, min(memories[gpu] for gpu in gpus)))
    return tuple(kinds)


def _name_gpu(gpu: int) -> str:
    return f"cuda: {torch.cuda.get_device_name(gpu)}"


def _find_device(gpu: int) -> Device | None:
    try:
        return device_named(_name_gpu(gpu))
    except ProfileError:
        return None


def _measure_gpu_bytes(gpu: int) -> int:
    """Returns the bytes that tensors may take; for the current GPU, less what other processes use."""
    size = int(torch.cuda.get_device_properties(gpu).total_memory)
    if gpu == torch.cuda.current_device():  # another would be given a context for the question
        size = min(size, torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu))
    return size - _CONTEXT_BYTES


def work_s(device: torch.device, most_s: float) -> float:
    """Returns the lower quartile of the seconds of a float32 matrix product, repeated for at least `most_s`."""
    edge = _MATRIX.get(device.type, _MATRIX["cpu"])
    matrix = torch.ones(edge, edge, device=device)
    seconds: list[float] = []
    begun = time.perf_counter()
    while len(seconds) < 5 or time.perf_counter() - begun < most_s:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 4]


def host_bytes_per_s(device: torch.device) -> float | None:
    """Returns the rate of copies between a GPU and pinned memory of its machine, the slower direction's.

    None for a CPU, whose memory is the host's.
    """
    if device.type != "cuda":
        return None
    on_gpu = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    pinned = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_COPIES):
        for row, (target, source) in zip(seconds, ((pinned, on_gpu), (on_gpu, pinned)), strict=True):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            row.append(time.perf_counter() - start)
    return _COPIED_BYTES / max(map(lower_quartile, seconds))


def memory_name(device: torch.device) -> str:
    """Returns a text that is equal for workers that share memory, also across a machine's containers."""
    return f"{platform.node()}/{_read_boot_id()}" if device.type != "cuda" else ""


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _read_network() -> str:
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return ""

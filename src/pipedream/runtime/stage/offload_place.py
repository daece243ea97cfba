"""The place of offloaded activations: whether they fit, and how fast it is."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import torch

from pipedream.core.errors import PlanError
from pipedream.core.hardware.survey import lower_quartile
from pipedream.core.plan.activations import HOST, Activations
from pipedream.core.plan.plan import Plan, describe_offloads
from pipedream.core.units import format_bytes, format_rate
from pipedream.runtime.stage.block_mover import BlockFile

_MIN_MEASURED_BYTES, _MAX_MEASURED_BYTES = 1 << 16, 1 << 26
_MEASURED_SHARE = 1 / 32  # of the free bytes, since a machine's workers measure at once
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK_FILE_SYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"),
}


def check_place(text: str, device: torch.device, plan: Plan | None = None) -> None:
    """Raises a `PlanError` if a worker on this device cannot offload activations to a place.

    `plan`: asked for it; None for an option.
    """
    place = Activations.read(text)
    request = f"activations={text!r} was asked for, but " if plan is None else _describe_request(plan)
    if place.kind == HOST and device.type == "cpu":
        raise PlanError(f"{request}the workers are CPUs, whose memory is the host's; give disk:FOLDER")
    if place.folder is None:
        return
    try:
        BlockFile(place.folder).close()
    except OSError as error:
        raise PlanError(
            f"{request}no file can be made in {place.folder!r} ({error.strerror}); make the folder on every "
            "machine, on a local disk that this user may write to, or name another (--activations disk:FOLDER, or none)"
        ) from error


def check_offloads(plan: Plan, device: torch.device, stages: Iterable[int]) -> None:
    """Raises a `PlanError` if a plan's activations cannot be offloaded; warns of a network file system.

    Args:
        stages: the stages of all processes of this machine, one item for each replica here.
    """
    request = _describe_request(plan)
    check_place(plan.activations, device, plan)
    if plan.ranks > plan.workers:
        raise PlanError(f"{request}it has meshes, whose ranks keep parts of tensors; leave it out")
    if (folder := Activations.read(plan.activations).folder) is None:
        return
    need_bytes = sum(plan.stages[stage].memory.moved_bytes for stage in stages)
    free_bytes = shutil.disk_usage(folder).free
    if need_bytes > free_bytes:
        raise PlanError(
            f"{request}this takes {format_bytes(need_bytes)} of {folder!r}, where {format_bytes(free_bytes)} are "
            f"free, {format_bytes(need_bytes - free_bytes)} too few; free some, name another folder, or give the "
            "workers more memory"
        )
    file_system = find_file_system(folder)
    if file_system in _NETWORK_FILE_SYSTEMS:
        rate = format_rate(measure_disk(folder))
        warnings.warn(
            f"activations are offloaded to {folder!r}, on a network file system ({file_system}) at {rate}; a "
            "local disk is faster",
            stacklevel=2,
        )


def _describe_request(plan: Plan) -> str:
    return f"the plan {plan.config} ({describe_offloads(plan)}) was asked for, but "


def measure_disk(folder: str) -> float:
    """Returns the bytes/s at which one file in a folder is written and read repeatedly, as activations are.

    Both use the system's cache; the disk's own rate counts once that is full. Raises a `PlanError` if the file cannot
    be written.
    """
    file_bytes = min(
        _MAX_MEASURED_BYTES, max(_MIN_MEASURED_BYTES, int(_MEASURED_SHARE * shutil.disk_usage(folder).free))
    )
    data = memoryview(bytearray(file_bytes))
    seconds: tuple[list[float], list[float]] = ([], [])
    try:
        with closing(BlockFile(folder)) as file:
            for _ in range(5):
                for durations_s, move in zip(seconds, (file.write, file.read), strict=True):
                    start = time.perf_counter()
                    move(0, data)
                    durations_s.append(time.perf_counter() - start)
    except OSError as error:
        raise PlanError(
            f"activations were to be offloaded to {folder!r}, but a file of {format_bytes(file_bytes)} there, to "
            f"measure its rate, failed: {error.strerror or error}; free some space, or name another folder"
        ) from error
    return file_bytes / max(map(lower_quartile, seconds))


def find_file_system(folder: str) -> str:
    """Returns the type of the file system that a folder is on; '' if unknown."""
    device = os.stat(folder).st_dev
    try:
        rows = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    device_number = f"{os.major(device)}:{os.minor(device)}"
    return next((row[row.index("-") + 1] for row in reversed(rows) if row[2] == device_number), "")

"""The device meshes of workers with several ranks, and the groups of their ranks."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipedream.core.plan.ranks import Mesh
from pipedream.runtime.comm.connections import NCCL_TIMEOUT
from pipedream.runtime.comm.process_group import set_timeout

MakeGroup = Callable[[Sequence[int], torch.device], dist.ProcessGroup | None]


def connect_meshes(
    device: torch.device, workers: Sequence[range], meshes: Sequence[Mesh], make_group: MakeGroup
) -> tuple[DeviceMesh | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns the mesh of this rank's worker, a gloo group of its ranks, and one for their device.

    Every rank takes part in making those of all workers, by `make_group`.
    """
    groups_here: tuple[DeviceMesh | None, dist.ProcessGroup | None, dist.ProcessGroup | None] = None, None, None
    for ranks, mesh in zip(workers, meshes, strict=True):
        if not mesh.dimensions:
            continue
        device_mesh = _make_device_mesh(device.type, ranks, mesh)
        if device.type == "cuda" and dist.get_rank() in ranks:
            for mesh_group in device_mesh.get_all_groups():  # made with torch's default timeout
                set_timeout(NCCL_TIMEOUT, mesh_group)
        group = make_group(ranks, torch.device("cpu"))
        on_device = group if device.type == "cpu" else make_group(ranks, device)
        groups_here = (device_mesh, group, on_device) if dist.get_rank() in ranks else groups_here
    return groups_here


_device_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], DeviceMesh]] = WeakKeyDictionary()
"""Process group of the user -> its meshes, which live as long."""


def _make_device_mesh(device_type: str, ranks: range, mesh: Mesh) -> DeviceMesh:
    """Returns the mesh that an earlier pipeline made of these ranks, or a new one; every rank calls it.

    DTensor's cache is keyed by the mesh's ranks and refers to the groups of the first such mesh, so these groups must
    stay. New ones would only be added to them, each with a thread of gloo.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    meshes_by_key = _device_meshes.setdefault(everyone, {})
    key = device_type, ranks, tuple(mesh.dimensions.items())
    if key not in meshes_by_key:
        grid = torch.tensor(ranks).view(*mesh.dimensions.values())
        meshes_by_key[key] = DeviceMesh(device_type, grid, mesh_dim_names=tuple(mesh.dimensions))
    return meshes_by_key[key]

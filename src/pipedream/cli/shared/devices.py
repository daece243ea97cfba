"""Clusters of different devices: ``--devices 4xV100,2xRTX-4090``."""

from __future__ import annotations

from dataclasses import replace

from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.flags import Panel, option
from pipedream.core.hardware.cluster import Cluster, Workers
from pipedream.core.hardware.devices import device_named, workers_of
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile

DEVICES = option(
    None,
    "Devices of the workers in their order, e.g. 4xV100-16GB,2xRTX-4090. Speeds and memory are those of the "
    "datasheets, relative to the profile's device.",
    metavar="NxDEVICE,...",
    panel=Panel.CLUSTER,
)


def kinds_of(text: str | None, profile: Profile | GraphText) -> tuple[Workers, ...]:
    """Reads --devices; raises PlanError if one, or the profile's own device, has no datasheet."""
    if text is None:
        return ()
    if isinstance(profile, GraphText):
        raise PlanError("--devices needs a profile that names its device, found a graph.txt; profile the model again")
    try:
        other = device_named(profile.device)
    except ProfileError:
        raise PlanError(
            f"--devices needs a profile of a device with a datasheet, found one of {profile.device!r}; profile with "
            "--device meta --as DEVICE, or write speeds into a cluster's file"
        ) from None
    try:
        return workers_of(text, other, profile.dtype, profile.work)
    except ProfileError as error:
        raise PlanError(str(error)) from None


def with_kinds(cluster: Cluster, kinds: tuple[Workers, ...]) -> Cluster:
    """Returns the cluster with these workers; raises PlanError for another number of them."""
    if not kinds:
        return cluster
    count = sum(kind.count for kind in kinds)
    if count != cluster.workers:
        raise PlanError(f"--devices gives {count} workers, the network joins {cluster.workers}; make the numbers equal")
    limit = cluster.memory_bytes
    if limit is not None:
        kinds = tuple(replace(kind, memory_bytes=min(limit, kind.memory_bytes or limit)) for kind in kinds)
    return replace(cluster, kinds=kinds)

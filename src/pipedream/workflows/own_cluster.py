"""The cluster of a run's own workers: measured where they are on several machines."""

from __future__ import annotations

import json
import warnings

from pipedream.core.hardware.cluster import LOOPBACK, Cluster, Level
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_rate, format_seconds
from pipedream.probe.machine import machine_name
from pipedream.runtime.comm import process_group
from pipedream.runtime.comm.connections import card_of, has_nccl
from pipedream.workflows.probe import probe
from pipedream.workflows.runtime_costs import measure_runtime

_PROBE_S = 5.0


def own_cluster(device: str, *, workers: int | None = None) -> tuple[Cluster, str]:
    """Returns the cluster of these processes, and at rank 0 in one line what was measured. Every rank calls it.

    On one machine it is `Cluster.here`, on a CPU with the link that messages see, and the line is empty.

    Args:
        workers: of a single process; by default one for each core or GPU.

    Raises:
        PlanError: the ranks of a machine are not consecutive.
    """
    place = process_group.process_device(device)
    rank, processes = process_group.join_group(place)
    count = processes if processes > 1 else workers
    texts = process_group.gather_texts(json.dumps([machine_name(), card_of(place)]), process_group.world_group())
    names, cards = zip(*map(json.loads, texts), strict=True)
    machines = len(set(names))
    if machines > 1 and (place.type == "cpu" or has_nccl(place, cards)):
        survey = probe(device=device, most_s=_PROBE_S)
        cluster = survey.cluster()
        measured = f"{machines} machines, measured in {survey.seconds:.1f} s: {cluster}" if rank == 0 else ""
        return cluster, measured
    if place.type == "cpu":
        return measure_runtime("cpu").on_links(Cluster.here(count)), ""
    # As rank 0 sees it: all must make the same plan.
    text = process_group.from_rank_0(
        lambda: Cluster.here(count, device="cuda" if processes > 1 else device).to_json(), rank
    )
    return Cluster.from_json(text, "rank 0's cluster"), ""


def warn_of_loopback(plan: Plan, rank: int) -> None:
    """Warns at rank 0 if a plan assumes one machine (`Cluster.here`) and its workers are on several.

    Every rank calls it.
    """
    bandwidth, latency_s = LOOPBACK
    if plan.cluster.levels != (Level(plan.cluster.workers, bandwidth, latency_s),):
        return
    names = process_group.gather_texts(machine_name(), process_group.world_group())
    machines = len(set(names))
    if machines > 1 and rank == 0:
        warnings.warn(
            f"the plan assumes one machine ({format_rate(bandwidth)}, {format_seconds(latency_s)} between workers), "
            f"but the workers are on {machines}; leave out the cluster, and pipedream.plan(profile) measures the links",
            stacklevel=4,
        )

"""Memory of machines that stages need besides their workers': weights that GPUs copy, and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes


def check_host_memory(
    stages: Sequence[Stage], versions: Sequence[int] | None, free_bytes: int | None, gradient_sets: int = 1
) -> None:
    """Raises a PlanError if the stages of a machine need more memory than is free (None: unknown).

    Args:
        versions: sets of weights of each stage; None for copies of the trained weights, for an optimizer.
        gradient_sets: see `Rules.gradient_sets`.
    """
    otherwise = "use a smaller model" if versions else "keep the optimizers with the weights"
    trained = [stage.trained_bytes for stage in stages]
    weights, frozen = sum(trained), 0 if versions is None else sum(stage.frozen_bytes for stage in stages)
    versions = versions or [1] * len(stages)
    version_bytes = frozen + sum(size * count for size, count in zip(trained, versions, strict=True))
    state_bytes = sum(stage.optimizer_bytes for stage in stages)
    need_bytes = gradient_sets * weights + version_bytes + state_bytes
    if free_bytes is None or need_bytes <= free_bytes:
        return
    smaller_bytes = {
        "one version of the weights (a method without delay) needs": 2 * weights + frozen + state_bytes,
        "an optimizer without state needs": need_bytes - state_bytes,
    }
    fits = {words: size for words, size in smaller_bytes.items() if size <= free_bytes}
    if not fits and 2 * weights + frozen <= free_bytes:
        fits = {"with one version of the weights an optimizer without state needs": 2 * weights + frozen}
    advice = ", ".join(f"{words} {format_bytes(size)}" for words, size in fits.items())
    raise PlanError(
        f"weights, gradients and optimizer state of {len(stages)} stages were to be kept in the memory of one machine "
        f"and need {format_bytes(need_bytes)}, {format_bytes(need_bytes - free_bytes)} more than the "
        f"{format_bytes(free_bytes)} that are free; {advice or f'nothing smaller fits: {otherwise}'}"
    )


def count_saved_bytes(plan: Plan) -> list[int]:
    """Returns each rank's bytes of weights and optimizer state in a checkpoint: of stages whose replica 0 it is."""
    meshes = plan.placement.meshes(plan.meshes)
    return [size for size, mesh in zip(_count_saved(plan), meshes, strict=True) for _ in range(mesh.size)]


def _count_saved(plan: Plan) -> list[int]:
    """Returns the bytes that each rank of each worker saves."""
    saved_bytes = [0] * plan.workers
    for stage, workers in zip(plan.stages, plan.placement.ranks, strict=True):
        saved_bytes[workers[0]] += stage.parameter_bytes + stage.optimizer_bytes
    return saved_bytes


OWN_COPIES, NEXT_COPIES = 3, 2
"""A worker keeps two snapshots of its own state, the source of the next one, and two of its neighbour's snapshots."""


def find_neighbours(machines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns for each rank one of the next machine in a ring; {} for a single machine.

    Args:
        machines: the ranks of each.
    """
    if len(machines) == 1:
        return {}
    return {
        rank: next_ranks[index % len(next_ranks)]
        for ranks, next_ranks in zip(machines, [*machines[1:], machines[0]], strict=True)
        for index, rank in enumerate(ranks)
    }


def count_snapshot_bytes(plan: Plan) -> list[list[int]]:
    """Returns the snapshot bytes of each replica of each stage; a worker's first stage counts its neighbour's."""
    saved_bytes, cluster = _count_saved(plan), plan.cluster
    workers = sorted(set(plan.worker_order)) or range(plan.workers)
    starts = cluster.starts(1) if len(cluster.levels) > 1 else range(cluster.workers + 1)
    machines = [[rank for rank, w in enumerate(workers) if first <= w < last] for first, last in pairwise(starts)]
    received_bytes = [0] * plan.workers
    if cluster.snapshots == "next":
        for sender, rank in find_neighbours([ranks for ranks in machines if ranks]).items():
            received_bytes[rank] += NEXT_COPIES * saved_bytes[sender]
    rows = []
    for stage, ranks in zip(plan.stages, plan.placement.ranks, strict=True):
        rows.append([received_bytes[rank] for rank in ranks])
        rows[-1][0] += OWN_COPIES * (stage.parameter_bytes + stage.optimizer_bytes)
        for rank in ranks:
            received_bytes[rank] = 0
    return rows


SNAPSHOTS = "snapshots were to be kept in", "use more machines, an optimizer with less state, or no snapshots"
OFFLOADED = "activations were to be offloaded to", "use more microbatches, or recompute"


def check_room(kind: tuple[str, str], need_bytes: int, free_bytes: int) -> int:
    """Returns the bytes needed on one machine; raises a PlanError if they exceed the free bytes.

    `kind`: `SNAPSHOTS` or `OFFLOADED`.
    """
    if need_bytes > free_bytes:
        what, advice = kind
        raise PlanError(
            f"{what} the memory of one machine and need {format_bytes(need_bytes)}, {format_bytes(free_bytes)} are "
            f"free: {format_bytes(need_bytes - free_bytes)} are missing; {advice}"
        )
    return need_bytes


def add_snapshots(plan: Plan) -> Plan:
    """Adds the cluster's snapshots to a plan without any.

    On CPUs its peaks include them; a GPU's are in the machine's memory.
    """
    if not plan.cluster.snapshots:
        return plan
    return _with_snapshots(plan, [max(row) for row in count_snapshot_bytes(plan)])


def drop_snapshots(plan: Plan) -> Plan:
    """Removes snapshots from a plan and its peaks."""
    return _with_snapshots(plan, [0] * len(plan.stages))


def _with_snapshots(plan: Plan, snapshot_bytes: Sequence[int]) -> Plan:
    in_peak = not plan.costs.on_gpus
    stages = (
        replace(
            stage,
            peak_bytes=stage.peak_bytes + in_peak * (size - stage.memory.snapshot_bytes),
            memory=replace(stage.memory, snapshot_bytes=size),
        )
        for stage, size in zip(plan.stages, snapshot_bytes, strict=True)
    )
    return replace(plan, stages=tuple(stages))

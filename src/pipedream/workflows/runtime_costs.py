"""Measuring what the runtime itself costs on these workers, for predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from pipedream import schedules
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.runtime.calibration import calibrate
from pipedream.runtime.comm import process_group
from pipedream.verifier import verify

_AT_ONCE_BYTES_PER_S = 1e30


@dataclass(frozen=True)
class MeasuredRuntime:
    """The runtime's costs at a worker, and the link between two workers as its messages see it.

    Attributes:
        bandwidth_bytes_per_s, latency_s: None if unknown; within a single process a message arrives at once.
    """

    costs: RuntimeCosts
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None

    def on_links(self, cluster: Cluster) -> Cluster:
        """Returns a cluster of one level with the measured link."""
        (level,) = cluster.levels
        bandwidth = self.bandwidth_bytes_per_s or level.bandwidth_bytes_per_s
        latency_s = level.latency_s if self.latency_s is None else self.latency_s
        return replace(cluster, levels=(replace(level, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s),))


def measure_runtime(device: str = "cpu") -> MeasuredRuntime:
    """Runs the runtime on small layers of known cost: in this process, or over the processes of this group.

    It takes some tenths of a second, once for each process. Every rank calls it and gets the same answer. A GPU's
    workers are measured on their CPUs: what keeps a host busy is the same, but its messages' bytes do not.
    """
    place = process_group.process_device(device)
    _, processes = process_group.join_group(place)
    measured = _measure_processes(processes)
    if place.type == "cpu":
        return measured
    return MeasuredRuntime(replace(measured.costs, message_s_per_byte=0.0, overlap_device=True))


@cache
def _measure_processes(processes: int) -> MeasuredRuntime:
    stages = max(2, processes)
    plan = Plan.uniform(stages)
    schedule = schedules.build("pipedream", plan)
    program, evaluation = lower(schedule), lower(schedules.evaluation(plan, schedule.placement))
    verify(program)
    verify(evaluation)
    small, large = calibrate(program, evaluation)
    # The first of several workers also reads the data.
    small_s, large_s = (max(0.0, sum(calibration.other_s[1:] or calibration.other_s)) for calibration in (small, large))
    # An activation and its gradient at each boundary, and the targets from the first to the last stage, at both ends.
    large_ends = 4 if processes == 1 else 4 * (stages - 2) + 2
    ends = large_ends + (2 if processes == 1 else 1)
    rise_bytes = large.message_bytes - small.message_bytes
    message_s = small_s / ends
    costs = RuntimeCosts(
        op_s=max(0.0, small.op_s),
        message_s=message_s,
        message_s_per_byte=max(0.0, large_s - small_s) / large_ends / rise_bytes,
        update_s=small.update_s,
        load_s=0.0 if processes == 1 else max(0.0, small.other_s[0] - 3 * message_s),
    )
    if processes == 1:
        return MeasuredRuntime(costs, _AT_ONCE_BYTES_PER_S, 0.0)
    links_s = [
        max(0.0, calibration.arrival_s - 2 * float(costs.end_s(calibration.message_bytes)))
        for calibration in (small, large)
    ]
    rise_s = links_s[1] - links_s[0]
    return MeasuredRuntime(costs, rise_bytes / rise_s if rise_s > 0 else None, links_s[0])

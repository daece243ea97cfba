"""PlanCosts: the predicted seconds of a plan's messages, sums and stages on its cluster (docs/cost_models.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipedream.core.plan.cost import all_reduce_s, transfer_s
from pipedream.core.plan.site import ports_s
from pipedream.core.plan.tied import least_sum_s

if TYPE_CHECKING:
    from pipedream.core.plan.plan import Plan

NO_GAP = 2e-6
"""A relative gap between a plan and its bound up to which the plan counts as optimal."""


@dataclass(frozen=True)
class PlanCosts:
    """Predicted seconds of a plan; per stage or boundary in the order of the model."""

    plan: Plan

    @property
    def transfers_s(self) -> tuple[float, ...]:
        """One-way seconds across each boundary, over the outermost level that a message crosses."""
        taken = [self.plan.workers_of(stage) for stage in range(len(self.plan.stages))]
        return tuple(
            float(transfer_s(stage.output_bytes, *self.plan.cluster.link(self.plan.cluster.reach(*here, *there))))
            for stage, here, there in zip(self.plan.stages, taken, taken[1:], strict=False)
        )

    @property
    def round_trips_s(self) -> tuple[float, ...]:
        """Seconds, for each boundary, of sending an activation and its gradient, including queues at ports."""
        counts, transfers_s, cluster = self.plan.replicas, self.transfers_s, self.plan.cluster
        inside = [
            [
                max(Counter(cluster.component(level, w) for w in self.plan.workers_of(s)).values())
                for s in range(len(counts))
            ]
            for level in range(1, len(cluster.levels))
        ]
        last = len(transfers_s) - 1
        round_trips = []
        for s, seconds in enumerate(transfers_s):
            queue_s = -(-counts[s - 1] // counts[s]) * transfers_s[s - 1] if s else 0.0
            queue_s += -(-counts[s + 2] // counts[s + 1]) * transfers_s[s + 1] if s < last else 0.0
            queue_s += max(
                (
                    (most[s] + most[s + 1] - 2) * self.plan.stages[s].output_bytes / level.link_bytes_per_s
                    for most, level in zip(inside, cluster.levels[1:], strict=True)
                ),
                default=0.0,
            )
            # All replicas that exchange messages with a worker may share its port at once.
            sharing = max(-(-counts[s] // counts[s + 1]), -(-counts[s + 1] // counts[s]))
            round_trips.append(2 * seconds * sharing + queue_s)
        return tuple(round_trips)

    @property
    def sync_s(self) -> tuple[float, ...]:
        """Seconds of each stage's all-reduce, including the hidden part."""
        return tuple(
            float(
                all_reduce_s(
                    stage.parameter_bytes, stage.replicas, site.sum_bytes_per_s, site.sum_latency_s, how=site.sums
                )
            )
            for stage, site in zip(self.plan.stages, self.plan.sites, strict=True)
        )

    @property
    def tied_s(self) -> tuple[float, ...]:
        """Seconds by which the sums of tied weights at least delay an update of each stage (`least_sum_s`)."""
        seconds = [(tied, least_sum_s(self.plan.cluster, tied.parameter_bytes)) for tied in self.plan.tied]
        return tuple(sum(sum_s for tied, sum_s in seconds if s in tied.stages) for s in range(len(self.plan.stages)))

    @property
    def runtime_s(self) -> tuple[float, ...]:
        """Seconds that the runtime adds to each stage, for one unit (`RuntimeCosts.stage_s`)."""
        edges, last = (0, *(stage.output_bytes for stage in self.plan.stages[:-1]), 0), len(self.plan.stages) - 1
        device_s = [stage.forward_s + stage.backward_s + stage.update_s for stage in self.plan.stages]
        return tuple(
            float(self.plan.runtime.stage_s(seconds, edges[s], edges[s + 1], s == 0, s == last, stage.launch_s))
            for s, (stage, seconds) in enumerate(zip(self.plan.stages, device_s, strict=True))
        )

    @property
    def added_s(self) -> tuple[float, ...]:
        """`tied_s` and `runtime_s` of each stage."""
        return tuple(map(sum, zip(self.tied_s, self.runtime_s, strict=True)))

    @property
    def tied_sums_s(self) -> tuple[float, ...]:
        """Seconds of each of the sums over all holders of `tied`, on idle links."""
        workers = [{w for s in tied.stages for w in self.plan.workers_of(s)} for tied in self.plan.tied]
        return tuple(
            float(
                all_reduce_s(
                    tied.parameter_bytes,
                    len(holders),
                    *self.plan.cluster.sum_link(self.plan.cluster.reach(*holders)),
                    how=self.plan.cluster.sums,
                )
            )
            for tied, holders in zip(self.plan.tied, workers, strict=True)
        )

    @property
    def periods_s(self) -> tuple[float, ...]:
        """Predicted seconds per unit of each stage in a full pipeline (`core.plan.site`)."""
        edges = (0, *(stage.output_bytes for stage in self.plan.stages[:-1]), 0)
        return tuple(
            float(
                site.period_s(
                    stage.forward_s,
                    stage.redone_s,
                    stage.update_s + added_s,
                    stage.parameter_bytes,
                    before_bytes,
                    after_bytes,
                )
            )
            for stage, site, added_s, before_bytes, after_bytes in zip(
                self.plan.stages, self.plan.sites, self.added_s, edges[:-1], edges[1:], strict=True
            )
        )

    @property
    def period_s(self) -> float:
        """Predicted seconds per unit of the full pipeline: of its slowest stage's compute, or of its busiest port.

        Longer than `slowest_stage_s`, which the planner minimises, if stages share a machine's or a rack's port. A
        worker with several stages takes the sum over them, each with the longer of its compute and its messages.
        """
        if self.plan.is_shared:
            seconds = self.periods_s
            return max(sum(seconds[s] for s in stages) for stages in self.plan.stages_by_worker.values())
        if len(self.plan.cluster.levels) == 1:
            return max(self.periods_s)
        taken = [self.plan.workers_of(stage) for stage in range(len(self.plan.stages))]
        compute_s = (
            float(site.compute_s(stage.forward_s, stage.redone_s, stage.update_s + added_s, stage.parameter_bytes))
            for site, stage, added_s in zip(self.plan.sites, self.plan.stages, self.added_s, strict=True)
        )
        sent, summed = zip(*((stage.output_bytes, stage.parameter_bytes) for stage in self.plan.stages), strict=True)
        return max(*compute_s, *ports_s(self.plan.cluster, taken, sent, summed).values())

"""PlanCosts: the predicted seconds of a plan's messages, sums and stages on its cluster (docs/cost_models.md)."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.cost import Site, SumLink, Terms, ports_s, transfer_s
from pipedream.core.plan.stage import Stage, TiedWeights, least_sum_s

NO_GAP = 2e-6
"""Relative gap to the bound up to which a plan counts as optimal."""


@dataclass(frozen=True)
class PlanCosts:
    """Predicted seconds of a plan, for each stage or boundary in the order of the model.

    Attributes:
        stage_workers: workers of each stage.
        terms: what the plan's choices cost each stage.
    """

    stages: tuple[Stage, ...]
    stage_workers: tuple[tuple[int, ...], ...]
    cluster: Cluster
    tied: tuple[TiedWeights, ...]
    runtime: RuntimeCosts
    terms: tuple[Terms, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(map(len, self.stage_workers))

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        before = [None, *(workers[-1] for workers in self.stage_workers[:-1])]
        after = [*(workers[0] for workers in self.stage_workers[1:]), None]
        rows = zip(self.stage_workers, before, after, self.terms, strict=True)
        return tuple(Site.of(self.cluster, *row) for row in rows)

    @property
    def message_share(self) -> float:
        """See `Terms.message_share`."""
        return self.terms[0].message_share

    @property
    def on_gpus(self) -> bool:
        return self.runtime.overlap_device or any(stage.launch_s for stage in self.stages)

    @property
    def stages_by_worker(self) -> dict[int, list[int]]:
        stages: dict[int, list[int]] = {}
        for s, workers in enumerate(self.stage_workers):
            for worker in workers:
                stages.setdefault(worker, []).append(s)
        return stages

    @property
    def transfers_s(self) -> tuple[float, ...]:
        """Seconds one way across each boundary, over the outermost level that messages cross."""
        return tuple(
            float(
                transfer_s(
                    stage.output_bytes * self.message_share,
                    *self.cluster.link(self.cluster.reach(*senders, *receivers)),
                )
            )
            for stage, senders, receivers in zip(self.stages, self.stage_workers, self.stage_workers[1:], strict=False)
        )

    @property
    def round_trips_s(self) -> tuple[float, ...]:
        """Seconds of sending an activation and its gradient across each boundary, with queues at ports."""
        counts, transfers_s, cluster = self.replicas, self.transfers_s, self.cluster
        largest_groups = [
            [
                max(Counter(cluster.component(level, w) for w in self.stage_workers[s]).values())
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
                    (largest_group[s] + largest_group[s + 1] - 2)
                    * self.stages[s].output_bytes
                    * self.message_share
                    / level.link_bytes_per_s
                    for largest_group, level in zip(largest_groups, cluster.levels[1:], strict=True)
                ),
                default=0.0,
            )
            # All replicas that exchange messages with a worker may use its port at once.
            port_users = max(-(-counts[s] // counts[s + 1]), -(-counts[s + 1] // counts[s]))
            round_trips.append(2 * seconds * port_users + queue_s)
        return tuple(round_trips)

    @property
    def sync_s(self) -> tuple[float, ...]:
        """Seconds of each stage's all-reduce, with the hidden part."""
        return tuple(
            float(site.sum_link.all_reduce_s(stage.trained_bytes, stage.replicas, site.sum_costs))
            for stage, site in zip(self.stages, self.sites, strict=True)
        )

    @property
    def tied_s(self) -> tuple[float, ...]:
        """Least seconds by which the sums of tied weights delay each stage's update (`least_sum_s`)."""
        seconds = [(tied, least_sum_s(self.cluster, tied.parameter_bytes)) for tied in self.tied]
        return tuple(sum(sum_s for tied, sum_s in seconds if s in tied.stages) for s in range(len(self.stages)))

    @property
    def runtime_s(self) -> tuple[float, ...]:
        """Seconds that the runtime adds to each stage, for one unit (`RuntimeCosts.stage_s`)."""
        edges, last = (0, *(stage.output_bytes for stage in self.stages[:-1]), 0), len(self.stages) - 1
        device_s = [stage.forward_s + stage.backward_s + stage.update_s for stage in self.stages]
        return tuple(
            float(self.runtime.stage_s(seconds, edges[s], edges[s + 1], s == 0, s == last, stage.launch_s))
            for s, (stage, seconds) in enumerate(zip(self.stages, device_s, strict=True))
        )

    @property
    def added_s(self) -> tuple[float, ...]:
        """`tied_s` and `runtime_s` of each stage."""
        return tuple(map(sum, zip(self.tied_s, self.runtime_s, strict=True)))

    @property
    def tied_sums_s(self) -> tuple[float, ...]:
        """Seconds on idle links of each sum over all holders of `tied`."""
        cluster, workers = self.cluster, [{w for s in tied.stages for w in self.stage_workers[s]} for tied in self.tied]
        return tuple(
            float(SumLink.across(cluster, cluster.reach(*holders)).all_reduce_s(tied.parameter_bytes, len(holders)))
            for tied, holders in zip(self.tied, workers, strict=True)
        )

    @cached_property
    def periods_s(self) -> tuple[float, ...]:
        """Predicted seconds per unit of each stage in a full pipeline (`core.plan.cost`)."""
        edges = (0, *(stage.output_bytes for stage in self.stages[:-1]), 0)
        return tuple(
            float(
                site.period_s(
                    stage.forward_s,
                    stage.redone_s,
                    stage.update_s + added_s,
                    stage.trained_bytes,
                    before_bytes,
                    after_bytes,
                )
            )
            for stage, site, added_s, before_bytes, after_bytes in zip(
                self.stages, self.sites, self.added_s, edges[:-1], edges[1:], strict=True
            )
        )

    @property
    def period_s(self) -> float:
        """Predicted seconds per unit of the full pipeline: of the slowest stage's compute, or of the busiest port.

        Exceeds `slowest_stage_s`, which the planner minimises, if stages share the port of a machine or a rack. For a
        worker with several stages it is the sum over them, each with the longer of compute and messages.
        """
        if len(self.stages_by_worker) < sum(self.replicas):
            seconds = self.periods_s
            return max(sum(seconds[s] for s in stages) for stages in self.stages_by_worker.values())
        if len(self.cluster.levels) == 1:
            return max(self.periods_s)
        compute_s = (
            float(site.compute_s(stage.forward_s, stage.redone_s, stage.update_s + added_s, stage.trained_bytes))
            for site, stage, added_s in zip(self.sites, self.stages, self.added_s, strict=True)
        )
        sent_bytes = [stage.output_bytes for stage in self.stages]
        summed_bytes = [s.trained_bytes * terms.sums.share for s, terms in zip(self.stages, self.terms, strict=True)]
        ports = ports_s(self.cluster, self.stage_workers, sent_bytes, summed_bytes, self.message_share)
        return max(*compute_s, *ports.values())

"""Tied weights of a plan: weights that several stages hold, e.g. an embedding and an output layer that share a matrix.

Each holder keeps its own copy, gradient and optimizer state. At an update the holders sum their gradients, so that the
copies stay equal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.cost import all_reduce_s
from pipedream.core.plan.placement import Placement


@dataclass(frozen=True)
class TiedWeights:
    """Weights that the same stages hold; the first of `stages` counts them in the norm.

    Attributes:
        names: in the user's state dict.
        stages: at least two, in order.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    parameter_bytes: int = 0

    def among(self, stages: Collection[int]) -> TiedWeights:
        """Returns the same weights with the holders in `stages` only."""
        return TiedWeights(self.names, tuple(stage for stage in self.stages if stage in stages), self.parameter_bytes)

    def ranks(self, placement: Placement) -> tuple[int, ...]:
        """Returns the ranks with a holder, in order."""
        return tuple(sorted({rank for stage in self.stages for rank in placement.ranks[stage]}))

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.names[:3])) + (", ..." if len(self.names) > 3 else "")
        return f"{names} (stages {', '.join(map(str, self.stages))})"


def least_sum_s(cluster: Cluster, parameter_bytes: int) -> float:
    """Returns the least seconds of a sum over holders, which are at least two, on the cluster's fastest links.

    The planner adds them to the update of each holder, as work of a worker of speed 1: who the other holders are is
    known only of a whole plan.
    """
    rates, latencies = zip(*(cluster.sum_link(level) for level in range(len(cluster.levels))), strict=True)
    seconds = all_reduce_s(parameter_bytes, 2, max(rates), min(latencies), how=cluster.sums)
    return float(seconds) * min(cluster.speeds)

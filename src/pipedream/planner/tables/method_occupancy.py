"""Microbatches and weight versions that the stages of a plan hold under a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.occupancy import StageOccupancy

VersionsRule = Callable[[int, int], int]
"""(minibatches in flight at a stage, its update delay) -> versions of its weights alive at once."""


def stash(in_flight: int, update_delay: int) -> int:
    """Returns the versions under weight stashing: one for each minibatch in flight, and one for an update delay."""
    return in_flight + update_delay


@dataclass(frozen=True, eq=False)
class MethodOccupancy:
    """One method's rule for what stages hold, for one number of microbatches.

    Attributes:
        of_plan: from a plan to what each of its stages holds.
        versions_grow_with_stages: see `MethodProperties`.
    """

    of_plan: Callable[[Plan], tuple[StageOccupancy, ...]]
    versions_grow_with_stages: bool = False


@dataclass(frozen=True, eq=False)
class OccupancyRule:
    """The occupancy of stages: by the method, or all that they admit, with `versions`."""

    versions: VersionsRule
    method: MethodOccupancy | None
    microbatches: int
    _occupancies: dict[tuple[int, int, int], StageOccupancy] = field(default_factory=dict, init=False)

    def of_stage(self, in_flight: int, update_delay: int = 0, replicas: int = 1) -> StageOccupancy:
        """Returns the least that a stage can hold while its neighbors are not known: what the input stage of two holds.

        If the versions depend on the whole plan, there are two, the least for any stage but the last.
        """
        if self.method is None:
            return StageOccupancy(in_flight, self.versions(in_flight, update_delay))
        share = -(-self.microbatches // replicas)  # replicas matter only through their share of a minibatch
        key = in_flight, update_delay, max(-(-self.microbatches // share), 1 + update_delay)
        if key not in self._occupancies:
            small = replace(
                Plan.uniform(2, replicas=(key[2], 1)), in_flight=(in_flight, 1), update_delay=(update_delay, 0)
            )
            occupancy = self.method.of_plan(small)[0]
            if self.method.versions_grow_with_stages:
                occupancy = replace(occupancy, versions=min(occupancy.versions, 2))
            self._occupancies[key] = occupancy
        return self._occupancies[key]

    def of_plan(self, plan: Plan) -> tuple[StageOccupancy, ...]:
        if self.method is not None:
            return self.method.of_plan(plan)
        return tuple(self.of_stage(*row, 1) for row in zip(plan.in_flight, plan.update_delay, strict=True))

"""What the stages of a plan hold under a method, as the search asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.occupancy import StageOccupancy

__all__ = ["OccupancyRule", "PlanOccupancy", "VersionsRule", "stash"]

VersionsRule = Callable[[int, int], int]
"""From the minibatches in flight at a stage, and its update delay, to the versions of its weights alive at once."""

PlanOccupancy = Callable[[Plan], tuple[StageOccupancy, ...]]
"""From a plan to what each of its stages holds under a method, which is read off the method's schedule."""


def stash(in_flight: int, update_delay: int) -> int:
    """Returns the versions that weight stashing holds: one for each minibatch in flight, and one for an update delay."""
    return in_flight + update_delay


@dataclass(frozen=True, eq=False)
class OccupancyRule:
    """What is held of what is admitted.

    Attributes:
        versions: of the weights, where all that is admitted is held.
        holds: of a method; None: all that is admitted, in so many `versions`.
        microbatches: parts of a minibatch.
    """

    versions: VersionsRule
    holds: PlanOccupancy | None
    microbatches: int

    def of_stage(self, in_flight: int, update_delay: int = 0, replicas: int = 1) -> StageOccupancy:
        """Returns the least that a stage holds, of which the neighbours are not known.

        It is that of the input stage of a small plan; but for the versions where these are a matter of all stages
        (vertical sync), of which a stage that is not the last has at least two.
        """
        if self.holds is None:
            return StageOccupancy(in_flight, self.versions(in_flight, update_delay))
        share = -(-self.microbatches // replicas)  # replicas matter by their share of a minibatch alone
        key = in_flight, update_delay, max(-(-self.microbatches // share), 1 + update_delay)
        if key not in self._known:
            small = replace(
                Plan.uniform(2, replicas=(key[2], 1)), in_flight=(in_flight, 1), update_delay=(update_delay, 0)
            )
            found = self.holds(small)[0]
            self._known[key] = replace(found, versions=min(found.versions, 2)) if self._is_of_all else found
        return self._known[key]

    def of_plan(self, plan: Plan) -> tuple[StageOccupancy, ...]:
        """Returns what the stages of a whole plan hold."""
        if self.holds is not None:
            return self.holds(plan)
        return tuple(self.of_stage(*row, 1) for row in zip(plan.in_flight, plan.update_delay, strict=True))

    @cached_property
    def _is_of_all(self) -> bool:
        """Whether the last stage of more stages holds more versions."""
        assert self.holds is not None
        few, more = (self.holds(Plan.uniform(stages))[-1].versions for stages in (3, 4))
        return more > few

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], StageOccupancy]:
        return {}

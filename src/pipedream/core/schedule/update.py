"""When an update is made, and of what: the update rules.

Update n of a stage (from 1) is one optimizer step, the same on all its replicas, and makes version n. Gradients are
averaged in one of two ways (docs/exact_rules.md, Normalisation):

- a *flushing* or *accumulating* update divides the sum of gradients by the summed loss weight, once;
- a *round* of PipeDream normalises each minibatch by itself and takes the plain mean over the replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedream.core.schedule.compensation import Compensation, rate_factor


@dataclass(frozen=True)
class UpdateRule:
    """How many microbatches each update of each stage holds.

    Attributes:
        per_update: for each stage, over all replicas.
        mean_of_rounds: each microbatch is a whole minibatch, normalised by itself (PipeDream).
    """

    per_update: tuple[int, ...]
    mean_of_rounds: bool = False
    compensation: tuple[Compensation, ...] = ()

    def members(self, stage: int, update: int, total: int | None = None) -> range:
        count = self.per_update[stage]
        stop = update * count if total is None else min(update * count, total)
        return range((update - 1) * count, stop)

    def update_of(self, stage: int, microbatch: int) -> int:
        return microbatch // self.per_update[stage] + 1

    def updates(self, stage: int, total: int) -> int:
        return -(-total // self.per_update[stage])

    def kept_tensors(self, staleness: int) -> int:
        """Returns how many tensors are kept for each weight."""
        return sum(compensation.kept_tensors(staleness) for compensation in self.compensation)

    def rate_factor(self, stage: int, staleness: float, rounds: int) -> float:
        """Returns the factor on the user's learning rate at a stage; `rounds` are updates of the input stage."""
        return self.per_update[stage] / self.per_update[0] * rate_factor(self.compensation, staleness, rounds)

"""What a rank holds for remote forwards (`core.schedule.dispatch`)."""

from __future__ import annotations

from pipedream.core.schedule.program import Program


class _Remote:
    """A stage whose forwards run on a rank where its weights do not live.

    Held are the posted receive of the weights; the weights, if they are there; inputs, from their forward to the next
    fetch, because they wait at home.
    """

    def __init__(self, program: Program, stage: int, total: int) -> None:
        plan, row = program.plan, program.plan.stages[stage]
        parts = program.microbatches if plan.unit == "minibatch" else 1
        before = plan.stages[stage - 1].output_bytes if stage else 0
        sizes = row.sizes(parts, before, samples=plan.batch, is_last=stage + 1 == len(plan.stages))
        self._trains = program.trains
        self._per_update = program.updates.per_update[stage]
        self._total = total
        self._weights_bytes: int = row.parameter_bytes
        self._input_bytes = int(sizes.input_bytes)
        self._pass_bytes = int(sizes.activation_bytes + sizes.working_bytes)
        self._kept = 0
        self.has_weights = not self._trains

    @property
    def held_bytes(self) -> int:
        return (1 + self.has_weights) * self._weights_bytes + self._kept * self._input_bytes

    def forward(self, index: int) -> int:
        """Returns the most that it holds; after the last of its fetch the weights are gone."""
        if not self._trains:
            return self.held_bytes
        self._kept = 1 if index % self._per_update == 0 else self._kept + 1
        self.has_weights = True
        most = self.held_bytes + self._pass_bytes
        self.has_weights = (index + 1) % self._per_update > 0 and index + 1 < self._total
        return most


class RemoteForwardsTrace:
    """All stages whose forwards a rank runs on fetched weights."""

    def __init__(self, program: Program, rank: int, total: int) -> None:
        remote = program.placement.remote_forwards(rank)
        self.stages = {stage: _Remote(program, stage, total) for stage, _ in remote}
        self.peak_versions = 0

    @property
    def held_bytes(self) -> int:
        return sum(stage.held_bytes for stage in self.stages.values())

    def forward(self, stage: int, index: int) -> int:
        """Returns the most that all these stages hold during it."""
        others = [other for at, other in self.stages.items() if at != stage]
        self.peak_versions = max(self.peak_versions, 1 + sum(other.has_weights for other in others))
        return self.stages[stage].forward(index) + sum(other.held_bytes for other in others)

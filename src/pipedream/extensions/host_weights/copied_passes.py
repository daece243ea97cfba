"""Passes on copies of weights that are in the memory of the machine: their bytes, and how long copies exist."""

from collections.abc import Iterator
from dataclasses import replace

from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.stage_memory import StageBytes
from pipedream.core.units import format_bytes
from pipedream.simulator.clock import simulate
from pipedream.simulator.costs import costs
from pipedream.simulator.memory import CopiedPasses, count_during, count_stage
from pipedream.verifier.unrolled import Unrolled


class _StagePasses:
    """Passes of a stage with weights that are copied from the machine's memory.

    The rank holds a copy of the weights, from the first of an update's forwards, or backwards, to the last. Inputs of
    forwards wait until they have been sent: until the first forward of the next update here.
    """

    def __init__(self, program: Program, stage: int, total: int, stage_bytes: StageBytes) -> None:
        self._trains = program.trains
        self._per_update = program.updates.per_update[stage]
        self._total = total
        self._runs_backward_elsewhere = program.placement.runs_backward_elsewhere(stage)
        self._weights_bytes = int(stage_bytes.copied_bytes or stage_bytes.sizes.parameter_bytes)
        self._sums_bytes = int(stage_bytes.sizes.trained_bytes)
        self._input_bytes = int(stage_bytes.waiting.total_bytes)
        weights_bytes = 0 if stage_bytes.copied_bytes else self._weights_bytes
        self._during = {op: weights_bytes + size for op, size in count_during(stage_bytes).items()}
        self._kept_inputs = 0
        self._has_sums = False
        self.has_weights = not self._trains

    @property
    def held_bytes(self) -> int:
        weights_bytes = self.has_weights * self._weights_bytes + self._has_sums * self._sums_bytes
        return weights_bytes + self._kept_inputs * self._input_bytes

    def run(self, kind: str, index: int) -> int:
        """Returns the most bytes during a pass; after the last one of an update the weights are dropped."""
        if not self._trains:
            return self.held_bytes
        ends = (index + 1) % self._per_update == 0 or index + 1 == self._total
        inputs = int(self._runs_backward_elsewhere)  # of a backward, whose input has come from another rank
        if kind == "F":
            inputs = self._kept_inputs = (
                self._kept_inputs + 1 if self._runs_backward_elsewhere and index % self._per_update else 1
            )
        else:
            inputs += self._kept_inputs
        most_bytes = inputs * self._input_bytes + self._during[kind, self._has_sums]
        if kind == "B":
            self._has_sums = not ends
            self._kept_inputs *= self._runs_backward_elsewhere
        self.has_weights = not ends or (kind == "F" and not self._runs_backward_elsewhere)
        return most_bytes


class CopiedPassesTrace(CopiedPasses):
    """All passes of a rank with copied weights."""

    def __init__(self, program: Program, rank: int, total: int, in_flight: tuple[int, ...]) -> None:
        passes = [program.placement.passes_on_copies(rank, forward=forward) for forward in (True, False)]
        self.passes = {(kind, stage) for kind, row in zip("FB", passes, strict=True) for stage, _ in row}
        stages = {stage for _, stage in self.passes}
        self._stages = {s: _StagePasses(program, s, total, count_stage(program, s, in_flight)) for s in sorted(stages)}
        self.peak_versions = 0

    @property
    def held_bytes(self) -> int:
        return sum(stage.held_bytes for stage in self._stages.values())

    def run(self, kind: str, stage: int, index: int) -> int:
        """Returns the most bytes of all these stages during a pass."""
        others = [other for other_stage, other in self._stages.items() if other_stage != stage]
        self.peak_versions = max(self.peak_versions, 1 + sum(other.has_weights for other in others))
        return self._stages[stage].run(kind, index) + sum(other.held_bytes for other in others)


def iterate_spans(run: Unrolled, rank: int) -> Iterator[tuple[list[tuple[int, int]], tuple[int, int]]]:
    """Yields, for the passes of each update of a stage on a rank, the spans of their inputs and that of the copy.

    Inputs of forwards last until the next update's forwards here.
    """
    placement = run.program.placement
    for kind in (Kind.FORWARD, Kind.BACKWARD)[: len(run.program.kinds)]:
        for stage, replica in placement.passes_on_copies(rank, forward=kind is Kind.FORWARD):
            runs_backward_elsewhere = placement.runs_backward_elsewhere(stage)
            if kind is Kind.FORWARD and not runs_backward_elsewhere and len(run.program.kinds) > 1:
                continue  # its backwards follow, with the same copy
            spans_by_update: dict[int, list[tuple[int, int]]] = {}
            for k in placement.microbatches(rank, stage, run.total, forward=kind is Kind.FORWARD):
                end = run.ops[Op(kind, stage, k, replica)][1]
                begin = end if runs_backward_elsewhere else run.ops[Op(Kind.FORWARD, stage, k, replica)][1]
                spans_by_update.setdefault(run.program.updates.update_of(stage, k), []).append((begin, end))
            next_begins = [*[spans[0][0] for spans in spans_by_update.values()][1:], len(run.streams[rank])]
            for next_begin, spans in zip(next_begins, spans_by_update.values(), strict=False):
                inputs = [
                    (begin, next_begin if kind is Kind.FORWARD else end + runs_backward_elsewhere)
                    for begin, end in spans
                ]
                yield inputs, (spans[0][0], spans[-1][1] + 1)


def add_passes(built: Schedule) -> Plan:
    """Returns a schedule's plan, whose stages must have their bytes, with those of passes that copy weights.

    Such passes run beside the stages of their worker, so only a simulation shows what they add to its peak.
    Raises PlanError if a worker lacks the memory for them.
    """
    plan, m, memories = built.plan, built.microbatches, built.plan.cluster.memories
    # Each rank has had its turns, while inputs and gradients of the minibatch before were there.
    total = max(m, built.placement.cycle) * (2 + max(map(built.weights.staleness, range(len(plan.stages)))))
    peaks = simulate(lower(built), costs(plan, split=m), total).peak_bytes
    stages = list(plan.stages)
    for rank, (worker, peak) in enumerate(zip(sorted(set(plan.worker_order)), peaks, strict=True)):
        limit = memories[worker]
        if limit is not None and peak > limit:
            passes = (built.placement.passes(rank, forward=forward) for forward in (True, False))
            numbers = sorted({stage for row in passes for stage, _ in row})
            raise PlanError(
                f"worker {worker} needs up to {format_bytes(peak)} for the passes of the stages "
                f"{', '.join(map(str, numbers))}, and has {format_bytes(limit)}; use smaller microbatches, more "
                "workers or another method"
            )
        more_bytes, s = max(peak - plan.worker_bytes[worker], 0), plan.costs.stages_by_worker[worker][0]
        memory = replace(stages[s].memory, activation_bytes=stages[s].memory.activation_bytes + more_bytes)
        stages[s] = replace(stages[s], memory=memory, peak_bytes=memory.total_bytes)
    return replace(plan, stages=tuple(stages))

"""Facts that planning needs about a method: its properties, and the microbatches and versions that a stage holds.

At the paper's depth, for a straight pipeline of p stages and m microbatches: 1F1B holds min(p - s, m) in flight, GPipe
m, the naive order 1; PipeDream p - s versions, vertical sync p, 2BW 2, a flush 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pipedream.core.model.matrices import Matrices
from pipedream.core.plan.placement import Dispatched
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op, ends_backward
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.rules import Rules, UpdateRule
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.weights import DoubleBuffer


@dataclass(frozen=True)
class MethodProperties:
    """The facts about a method that planning needs before there is a plan; the defaults are GPipe's.

    Attributes:
        flushes: an update waits until nothing is in flight.
        reads_stored_weights: forward and backward of a microbatch read the same version, one that the stage has had.
            Not every model and optimizer tolerates anything else.
        uses_depth, delays_updates: the plan's in-flight counts and update delay make a difference.
        replicates_stages: any stage can have replicas.
        recomputes: whether or not the plan says so.
        versions_grow_with_stages: not only with a stage's own depth.
        same_updates: all stages make the same updates on any plan (`core.schedule.coupling.makes_same_updates`), so
            that several may hold a weight.
    """

    flushes: bool = True
    splits_minibatch: bool = True
    splits_backward: bool = False
    reads_stored_weights: bool = True
    uses_depth: bool = False
    delays_updates: bool = False
    replicates_stages: bool = True
    recomputes: bool = False
    versions_grow_with_stages: bool = False
    same_updates: bool = True


@dataclass(frozen=True)
class StageOccupancy:
    """The most that a replica of a stage holds.

    Attributes:
        in_flight: microbatches from their forward to the end of their backward.
        versions: sets of weights alive at once, and buffers of the same size.
        deferred: microbatches that wait for their weight gradient alone.
        apart: weights are in the memory of the machine; a GPU has copies.
        double_buffered: an update may be made beside the passes of the next minibatch.
        updates: None: nothing is kept that depends on the shapes of weights.
    """

    in_flight: int
    versions: int
    kept_tensors: int = 0
    deferred: int = 0
    apart: bool = False
    double_buffered: bool = False
    updates: UpdateRule | None = None

    def matrix_bytes(self, matrices: Sequence[Matrices]) -> tuple[int, int]:
        return (0, 0) if self.updates is None else self.updates.matrix_bytes(matrices)


def occupancy(schedule: Schedule) -> tuple[StageOccupancy, ...]:
    """Returns what the fullest replica of each stage holds."""
    rows, double_buffered = [], isinstance(schedule.weights, DoubleBuffer)
    for stage in range(len(schedule.plan.stages)):
        in_flight, deferred = _count_in_flight(schedule, stage)
        kept = schedule.updates.kept_tensors(schedule.weights.staleness(stage))
        sets = schedule.weights.versions(stage) + schedule.weights.buffers(stage)
        updates = schedule.updates if schedule.updates.compensation else None
        apart = isinstance(schedule.placement, Dispatched)
        rows.append(StageOccupancy(in_flight, sets, kept, deferred, apart, double_buffered, updates))
    return tuple(rows)


def _count_in_flight(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Returns the most in flight, and the most that wait for their weight gradients.

    Follows the first replica, which has the most, until the first forward after the warm-up; later nothing new happens.
    """
    if schedule.placement.is_remote(stage):
        return _count_waiting(schedule, stage), 0
    replicas = schedule.plan.replicas[stage]
    last = max(schedule.microbatches, (schedule.plan.in_flight[stage] + 1) * replicas)
    ends = ends_backward(schedule.kinds)
    now = most = deferred = most_deferred = 0
    for kind, at, index, _ in schedule.order(schedule.placement.ranks[stage][0]):
        if at != stage:
            continue
        if kind is Kind.FORWARD:
            if index >= last:
                break
            now += 1
            most = max(most, now)
        elif kind is Kind.INPUT_GRADIENT:
            deferred += 1
            most_deferred = max(most_deferred, deferred)
        elif kind is ends:
            now -= 1
            deferred -= schedule.splits_backward
    return most, most_deferred


def _count_waiting(rules: Rules, stage: int) -> int:
    """Returns the most inputs of a stage's forwards on another rank that wait for their backwards."""
    return rules.microbatches * (1 + rules.weights.staleness(stage))


def most_in_flight(program: Program, total: int | None = None) -> tuple[int, ...]:
    """Returns the most in flight in a replica of each stage, in a run of `total` microbatches or without end.

    An evaluation has no backwards: it holds what its plan admits.
    """
    if not program.trains:
        return program.plan.in_flight
    counts = []
    ends = ends_backward(program.kinds)
    enough = 2 * program.cycle * (program.microbatches + max(program.plan.in_flight))
    counted = enough if total is None else min(enough, total)
    for stage, (rank, *_) in enumerate(program.placement.ranks):
        if program.placement.is_remote(stage):
            counts.append(_count_waiting(program, stage))
            continue
        in_flight = most = 0
        for op in program.instructions(rank, counted):
            if isinstance(op, Op) and op.stage == stage:
                in_flight += (op.kind is Kind.FORWARD) - (op.kind is ends)
                most = max(most, in_flight)
        counts.append(most)
    return tuple(counts)


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

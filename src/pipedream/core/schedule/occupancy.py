"""What planning needs to know about a method: its properties, and the microbatches and versions that stages hold.

At the paper's depth, for a straight pipeline of p stages and m microbatches: 1F1B holds min(p - s, m) in flight, GPipe
m, the naive order 1; PipeDream p - s versions, vertical sync p, 2BW 2, a flush 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pipedream.core.model.weight_shapes import Matrices
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op, find_last_kind
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.rules import Rules, UpdateRule
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.weights import DoubleBuffer


@dataclass(frozen=True)
class MethodProperties:
    """Properties of a method that planning needs before there is a plan; the defaults are GPipe's.

    Attributes:
        flushes: an update waits until nothing is in flight.
        reads_stored_weights: both passes of a microbatch read the same stored version. Some models and optimizers
            tolerate nothing else.
        uses_depth, delays_updates: the schedule depends on the plan's in-flight counts, or its update delay.
        replicates_stages: any stage can have replicas.
        recomputes: all stages recompute, whatever the plan says.
        versions_grow_with_stages: the versions depend on the number of stages, not only on a stage's depth.
        same_updates: all stages make the same updates on any plan (`Schedule.makes_same_updates`), so
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
        versions: sets of weights that exist at once, and buffers as large.
        deferred: microbatches that wait only for their weight gradient.
        weights_on_host: weights are in the memory of the machine; a GPU has copies.
        double_buffered: an update may overlap the passes of the next minibatch.
        updates: None unless something is kept whose size depends on the shapes of weights.
        flushes: nothing is in flight at an update.
    """

    in_flight: int
    versions: int
    kept_tensors: int = 0
    deferred: int = 0
    weights_on_host: bool = False
    double_buffered: bool = False
    updates: UpdateRule | None = None
    flushes: bool = False

    def matrix_bytes(self, matrices: Sequence[Matrices]) -> tuple[int, int]:
        return (0, 0) if self.updates is None else self.updates.matrix_bytes(matrices)


def occupancy(schedule: Schedule) -> tuple[StageOccupancy, ...]:
    """Returns what the fullest replica of each stage holds."""
    stages = range(len(schedule.plan.stages))
    return tuple(occupancy_in(schedule, stage, *_count_in_flight(schedule, stage)) for stage in stages)


def occupancy_in(rules: Rules, stage: int, in_flight: int, deferred: int = 0) -> StageOccupancy:
    """Returns what a stage holds under these rules, given the microbatches that it holds."""
    return StageOccupancy(
        in_flight,
        versions=rules.weights.versions(stage) + rules.weights.buffers(stage),
        # A stage's own bytes have one set of gradients.
        kept_tensors=rules.updates.kept_tensors(rules.weights.staleness(stage)) + rules.gradient_sets - 1,
        deferred=deferred,
        weights_on_host=rules.placement.shares_weights,
        double_buffered=isinstance(rules.weights, DoubleBuffer),
        updates=rules.updates if rules.updates.compensation else None,
        flushes=rules.flushes,
    )


def _count_in_flight(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Returns the most microbatches in flight, and the most that wait for their weight gradients.

    Follows the first replica, which has the most, until the first forward after the warm-up; later the counts repeat.
    """
    if schedule.placement.runs_backward_elsewhere(stage):
        return _count_waiting(schedule, stage), 0
    replicas = schedule.plan.replicas[stage]
    # A flush begins anew after a minibatch; any other order is full after in_flight + 1 forwards of each replica.
    first_repeated = max(schedule.microbatches, (schedule.plan.in_flight[stage] + 1) * replicas)
    last_kind = find_last_kind(schedule.kinds)
    in_flight = most_in_flight = deferred = most_deferred = 0
    for kind, op_stage, index, _ in schedule.order(schedule.placement.ranks[stage][0]):
        if op_stage != stage:
            continue
        if kind is Kind.FORWARD:
            if index >= first_repeated:
                break
            in_flight += 1
            most_in_flight = max(most_in_flight, in_flight)
        elif kind is Kind.INPUT_GRADIENT:
            deferred += 1
            most_deferred = max(most_deferred, deferred)
        elif kind is last_kind:
            in_flight -= 1
            deferred -= schedule.splits_backward
    return most_in_flight, most_deferred


def _count_waiting(rules: Rules, stage: int) -> int:
    """Returns the most inputs from forwards on another rank that wait for their backwards.

    Forwards are at most `staleness` minibatches ahead of the backwards.
    """
    return rules.microbatches * (1 + rules.weights.staleness(stage))


def count_most_in_flight(program: Program, total: int | None = None) -> tuple[int, ...]:
    """Returns each stage's most microbatches in flight in a replica, in a run of `total` microbatches (None: endless).

    An evaluation, without backwards, holds as many as its plan admits.
    """
    if not program.trains:
        return program.plan.in_flight
    counts = []
    last_kind = find_last_kind(program.kinds)
    for stage, (rank, *_) in enumerate(program.placement.ranks):
        if program.placement.runs_backward_elsewhere(stage):
            counts.append(_count_waiting(program, stage))
            continue
        in_flight = most_in_flight = 0
        # Later periods only repeat these counts. Forwards are in order, so that after a last one here they only fall.
        for op in (*program.ranks[rank].warmup, *program.ranks[rank].period):
            if isinstance(op, Op) and op.stage == stage and (total is None or op.index < total):
                in_flight += (op.kind is Kind.FORWARD) - (op.kind is last_kind)
                most_in_flight = max(most_in_flight, in_flight)
        counts.append(most_in_flight)
    return tuple(counts)


@dataclass(frozen=True, eq=False)
class MethodOccupancy:
    """A method's occupancy of stages, for one number of microbatches.

    Attributes:
        of_plan: plan -> what each of its stages holds.
        versions_grow_with_stages: see `MethodProperties`.
    """

    of_plan: Callable[[Plan], tuple[StageOccupancy, ...]]
    versions_grow_with_stages: bool = False
    _of_stages: dict[tuple[int, int, int], StageOccupancy] = field(default_factory=dict, init=False)

    def of_stage(
        self, in_flight: int, update_delay: int = 0, replicas: int = 1, microbatches: int = 1
    ) -> StageOccupancy:
        """Returns the least that a stage can hold, whatever its neighbours: what the input stage of two holds.

        If versions depend on the whole plan, it has two, the least of any stage but the last.
        """
        # Replicas matter only through their share of a minibatch, so the fewest with that share stand for all of
        # them; a plan with an update delay needs two.
        share = -(-microbatches // replicas)
        replicas = max(-(-microbatches // share), 1 + update_delay)
        key = in_flight, update_delay, replicas
        if key not in self._of_stages:
            small = replace(
                Plan.uniform(2, replicas=(replicas, 1)), in_flight=(in_flight, 1), update_delay=(update_delay, 0)
            )
            occupancy = self.of_plan(small)[0]
            if self.versions_grow_with_stages:
                occupancy = replace(occupancy, versions=min(occupancy.versions, 2))
            self._of_stages[key] = occupancy
        return self._of_stages[key]


def fill_depth(versions: Callable[[int, int], int]) -> MethodOccupancy:
    """Returns the occupancy of stages that hold all microbatches that their depth admits.

    Args:
        versions: (minibatches in flight at a stage, its update delay) -> versions of its weights that exist at once.
    """

    def find_usages(plan: Plan) -> tuple[StageOccupancy, ...]:
        rows = [(count, versions(count, delay)) for count, delay in zip(plan.in_flight, plan.update_delay, strict=True)]
        return tuple(StageOccupancy(*row, flushes=row[1] == 1) for row in rows)  # one is enough only if updates wait

    return MethodOccupancy(find_usages)


STASHING = fill_depth(lambda in_flight, update_delay: in_flight + update_delay)
"""Weight stashing: one version for each minibatch in flight, and one for an update delay."""

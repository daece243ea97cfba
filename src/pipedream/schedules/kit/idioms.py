"""Building blocks of methods: orders of ops, schedules with and without a flush or of forwards only, and common checks.

Orders never end. W_s: warm-up forwards of stage s. m: microbatches of a minibatch.

Options that several methods share:

- ``by``: what a weight prediction is computed from: 'velocity' (SGD with momentum, Adam, AdamW) or 'difference' (any
  optimizer);
- ``backward_rule``: how a backward reads newer weights than its forward (`core.schedule.weights`): 'graph' or
  'recompute', with which all stages recompute.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.depth import raise_to_legal
from pipedream.core.plan.placement import Placement, StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.rules import UpdateRule
from pipedream.core.schedule.schedule import Claims, Order, Schedule
from pipedream.core.schedule.weights import Flush, Latest, WeightPrediction, WeightRule

__all__ = [
    "SPLIT",
    "B",
    "F",
    "I",
    "MicrobatchProgress",
    "W",
    "all_microbatches",
    "backward",
    "check_input_replicas",
    "choose_microbatches",
    "each_minibatch",
    "flushing",
    "forward",
    "input_gradient",
    "latest_weights",
    "max_in_flight",
    "minibatch_by_minibatch",
    "one_forward_one_backward",
    "one_forward_one_input_gradient",
    "one_stage_per_rank",
    "refuse_microbatches",
    "refuse_update_delay",
    "repeated_wave",
    "steady_1f1b",
    "unflushed",
    "update",
    "warmup_forwards",
    "weight_gradient",
    "with_backward_rule",
    "with_updates",
]

F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
I, W = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741  # the field's letters
SPLIT = (F, I, W)
"""Kinds of op of a microbatch whose backward is split."""

_ENDLESS = 2**62


# -- ops ------------------------------------------------------------------------------------------------


def _make_op(kind: Kind, stage_replica: tuple[int, int], number: int) -> Op:
    stage, replica = stage_replica
    return Op(kind, stage, number, replica)


forward, backward = partial(_make_op, F), partial(_make_op, B)
"""(stage replica, microbatch) -> its op."""

input_gradient, weight_gradient = partial(_make_op, I), partial(_make_op, W)
"""The half of a backward that the previous stage needs, and the one that only the update needs."""

update = partial(_make_op, U)
"""(stage replica, n) -> the update that makes version n."""


# -- orders ---------------------------------------------------------------------------------------------


def all_microbatches(stage_replica: StageReplica, replicas: int) -> range:
    """Returns a stage replica's microbatches."""
    return range(stage_replica.replica, _ENDLESS, replicas)


def one_stage_per_rank(placement: Placement, ops: Callable[[StageReplica], Iterator[Op]]) -> Order:
    """Returns the order of ranks with one stage replica each; raises ScheduleError if a rank has several stages."""
    for rank in range(placement.workers):
        if len(stage_replicas := placement.stage_replicas(rank)) > 1:
            stages = ", ".join(str(stage) for stage, _ in stage_replicas)
            raise ScheduleError(
                f"this method has one stage per worker, but in the plan worker {rank} has the stages {stages}; plan "
                "for this method, or choose one with several stages per worker, such as the plan's own"
            )

    def order(rank: int) -> Iterator[Op]:
        (stage_replica,) = placement.stage_replicas(rank)
        return ops(stage_replica)

    return order


def one_forward_one_backward(stage_replica: StageReplica, *, mine: range, warmup: int) -> Iterator[Op]:
    """Yields `warmup` forwards, then forwards and backwards in turn, then the remaining backwards."""
    for i in range(len(mine) + warmup):
        if i < len(mine):
            yield forward(stage_replica, mine[i])
        if i >= warmup:
            yield backward(stage_replica, mine[i - warmup])


def one_forward_one_input_gradient(
    stage_replica: StageReplica, *, mine: range, warmup: int, deferred: int
) -> Iterator[Op]:
    """Yields 1F1B with split backwards: each weight gradient comes `deferred` input gradients after its own."""
    for i in range(len(mine) + warmup):
        if i < len(mine):
            yield forward(stage_replica, mine[i])
        if i >= warmup:
            yield input_gradient(stage_replica, mine[i - warmup])
            if i >= warmup + deferred:
                yield weight_gradient(stage_replica, mine[i - warmup - deferred])
    yield from (weight_gradient(stage_replica, k) for k in mine[max(0, len(mine) - deferred) :])


def with_updates(ops: Iterator[Op], *, replicas: int, per_update: int, update_delay: int = 0) -> Iterator[Op]:
    """Yields ops with their updates, each after the last backward of its microbatches.

    Args:
        ops: backwards (or weight gradients) must be in the order of microbatches.
        per_update: microbatches in an update, over all replicas; at least `replicas`.
        update_delay: 1 puts the next forward before the update.
    """
    next_update: Op | None = None
    for op in ops:
        yield op
        if op.kind in (B, W) and (op.index + replicas) // per_update > op.index // per_update:
            next_update = update((op.stage, op.replica), op.index // per_update + 1)
        if next_update is not None and (not update_delay or op.kind is F):
            yield next_update
            next_update = None


def each_minibatch(
    plan: Plan, stage_replica: StageReplica, microbatches: int, ops: Callable[[range], Iterator[Op]]
) -> Iterator[Op]:
    """Yields, for each minibatch, the ops on the stage replica's microbatches and one update."""
    replicas = plan.replicas[stage_replica.stage]
    for number in count():
        first = number * microbatches
        yield from ops(range(first + (stage_replica.replica - first) % replicas, first + microbatches, replicas))
        yield update(stage_replica, number + 1)


def minibatch_by_minibatch(m: int, ops: Callable[[int, range], Iterator[Op]]) -> Order:
    """Returns the order of ranks with several stages; `ops`: (rank, microbatches of one minibatch) -> their passes."""

    def order(rank: int) -> Iterator[Op]:
        passes = (op for number in count() for op in ops(rank, range(number * m, (number + 1) * m)))
        return with_updates(passes, replicas=1, per_update=m)

    return order


def repeated_wave(plan: Plan, m: int, hops: tuple[int, ...], waits: tuple[int, ...]) -> Order:
    """Returns the order that repeats a block of six unit ops on each worker of a `wave` every six slots.

    In a block a microbatch passes the workers there and back, twice: by forwards, then by input gradients. Weight
    gradients fill the two free slots (Qi et al., NeurIPS 2024, section 3).

    Args:
        hops: slots from one worker to the next, on each of the four ways.
        waits: slots that the first worker waits on the second, the third and the fourth way.
    """
    p = plan.workers

    def ops(rank: int, mine: range) -> Iterator[Op]:
        outward_stage, return_stage = rank, 2 * p - 1 - rank
        slots: list[tuple[int, Kind, int]] = []
        begin = 0
        for way, (hop_slots, wait_slots) in enumerate(zip(hops, (0, *waits), strict=True)):
            is_back = way % 2
            slot = begin + wait_slots + hop_slots * (p - 1 - rank if is_back else rank)
            slots.append((slot, I if way > 1 else F, return_stage if (way in (1, 2)) else outward_stage))
            begin += wait_slots + hop_slots * (p - 1) + 1
        free_slots = set(range(6)) - {slot % 6 for slot, _, _ in slots}
        for previous_slot, _, stage in slots[2:]:
            slot = next(slot for slot in count(previous_slot + 1) if slot % 6 in free_slots)
            free_slots.remove(slot % 6)
            slots.append((slot, W, stage))
        rows = sorted((slot + 6 * i, kind, stage, k) for slot, kind, stage in slots for i, k in enumerate(mine))
        return (Op(kind, stage, k, 0) for _, kind, stage, k in rows)

    return minibatch_by_minibatch(m, ops)


def steady_1f1b(plan: Plan, per_update: int | None = None) -> Order:
    """Returns 1F1B without a flush, at the plan's depth.

    Args:
        per_update: microbatches in an update, over all replicas. None: one of each replica, with the plan's update
            delay.
    """

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        stage = stage_replica.stage
        replicas = plan.replicas[stage]
        steady = one_forward_one_backward(
            stage_replica, mine=all_microbatches(stage_replica, replicas), warmup=plan.in_flight[stage] - 1
        )
        update_delay = plan.update_delay[stage] if per_update is None else 0
        return with_updates(steady, replicas=replicas, per_update=per_update or replicas, update_delay=update_delay)

    return one_stage_per_rank(plan.placement, ops)


class MicrobatchProgress:
    """The ops that a worker with several stages has done; each kind of op takes the microbatches in order."""

    def __init__(self, mine: range) -> None:
        self._mine = mine
        self._done: Counter[tuple[Kind, tuple[int, int]]] = Counter()

    def count_left(self, kind: Kind, stage_replica: tuple[int, int]) -> int:
        """Returns how many microbatches still need this kind of op."""
        return len(self._mine) - self._done[kind, stage_replica]

    def take(self, *steps: tuple[Kind, tuple[int, int]], times: int = 1) -> Iterator[Op]:
        """Yields the next op of each step, `times` over; skips a step that has no op ready."""
        for _ in range(times):
            for kind, stage_replica in steps:
                previous_kind = {F: None, B: F, I: F, W: I}[kind]
                ready = len(self._mine) if previous_kind is None else self._done[previous_kind, stage_replica]
                if self._done[kind, stage_replica] < ready:
                    stage, replica = stage_replica
                    yield Op(kind, stage, self._mine[self._done[kind, stage_replica]], replica)
                    self._done[kind, stage_replica] += 1


# -- schedules ------------------------------------------------------------------------------------------


def flushing(
    name: str, plan: Plan, m: int, order: Order, claims: Claims, *, kinds: tuple[Kind, ...] = (F, B)
) -> Schedule:
    """Returns the schedule of an order (updates included) that flushes: one update per minibatch.

    Claims default to no staleness and one version of each stage's weights.
    """
    stages_per_worker = sum(plan.replicas) // plan.workers
    claims = replace(
        claims,
        staleness=claims.staleness or (lambda p, m, s: 0),
        versions=claims.versions or (lambda p, m, s: stages_per_worker),
    )
    return Schedule(
        name=name,
        plan=plan,
        placement=plan.placement,
        order=order,
        weights=Flush(m),
        updates=UpdateRule((m,) * len(plan.stages)),
        microbatches=m,
        flushes=True,
        kinds=kinds,
        claims=claims,
    )


def unflushed(name: str, plan: Plan, weights: WeightRule, claims: Claims, *, m: int | None = None) -> Schedule:
    """Returns the schedule of `steady_1f1b`; with m None an update averages one minibatch of each replica of the
    stage.
    """
    updates = UpdateRule(plan.replicas, mean_of_rounds=True) if m is None else UpdateRule((m,) * len(plan.stages))
    return Schedule(
        name=name,
        plan=plan,
        placement=plan.placement,
        order=steady_1f1b(plan, m),
        weights=weights,
        updates=updates,
        microbatches=m or 1,
        claims=claims,
    )


def latest_weights(
    plan: Plan,
    per_update: int | None = None,
    *,
    backward_rule: str = "graph",
    forward_prediction: WeightPrediction | None = None,
    backward_prediction: WeightPrediction | None = None,
    shares_prediction: int = 1,
) -> Latest:
    """Returns the rule by which `steady_1f1b` reads the newest weights, or predictions from them."""
    return Latest(
        warmup=warmup_forwards(plan),
        replicas=plan.replicas,
        update_delay=plan.update_delay if per_update is None else (0,) * len(plan.stages),
        per_update=plan.replicas if per_update is None else (per_update,) * len(plan.stages),
        backward_rule=backward_rule,
        forward_prediction=forward_prediction,
        backward_prediction=backward_prediction,
        shares_prediction=shares_prediction,
    )


def evaluation(plan: Plan, placement: Placement | None = None) -> Schedule:
    """Returns a schedule of forwards only, all with the newest weights."""
    placed = replace(placement or plan.placement, turn=1)

    def order(rank: int) -> Iterator[Op]:
        stage_replicas = placed.passes(rank, forward=True)
        if not stage_replicas:
            return
        # A wave: stage s is s microbatches later than stage 0.
        for slot in count():
            for stage, replica in stage_replicas:
                k = slot - stage
                if k >= 0 and placed.rank_of(stage, k, forward=True) == rank:
                    yield forward((stage, replica), k)

    return Schedule(
        name="evaluation",
        plan=plan,
        placement=placed,
        order=order,
        weights=Flush(2**62),
        updates=UpdateRule((1,) * len(plan.stages)),
        kinds=(Kind.FORWARD,),
    )


# -- checks ----------------------------------------------------------------------------------------------


def warmup_forwards(plan: Plan) -> tuple[int, ...]:
    """Returns W_s of each stage."""
    return tuple(count - 1 for count in plan.in_flight)


def max_in_flight(plan: Plan) -> int:
    """Returns the most microbatches that a stage holds, over its replicas."""
    return max(count * replicas for count, replicas in zip(plan.in_flight, plan.replicas, strict=True))


def with_backward_rule(plan: Plan, backward_rule: str, rules: tuple[str, ...] = ("graph", "recompute")) -> Plan:
    """Returns the plan for a backward rule; raises ValueError if the rule is not one of `rules`."""
    if backward_rule not in rules:
        raise ValueError(f"its backward rule is {' or '.join(rules)}, found {backward_rule!r}")
    if backward_rule != "recompute":
        return plan
    return replace(plan, stages=tuple(replace(stage, recompute=True, offload=False) for stage in plan.stages))


def choose_microbatches(name: str, plan: Plan, requested: int | None, default: int) -> int:
    """Returns m for a method that splits minibatches: `requested`, else `default`, raised to the largest replica count.

    Raises ScheduleError if fewer are requested: a replica without a part in every update could not know whether there
    is an update before it waits for the others' gradients.
    """
    replicas = max(plan.replicas)
    if requested is not None and requested < replicas:
        raise ScheduleError(
            f"schedule {name!r} with {requested} microbatches a minibatch: a stage has {replicas} replicas, and each "
            f"takes part in every update; split the minibatch into at least {replicas}"
        )
    return requested or max(default, replicas)


def refuse_microbatches(name: str, microbatches: int | None) -> None:
    """Raises ScheduleError if a minibatch would be split."""
    if microbatches not in (None, 1):
        raise ScheduleError(
            f"schedule {name!r} updates after every minibatch and does not split it, but {microbatches} microbatches "
            "were asked for; leave the number out, or take pipedream_2bw, 1f1b or gpipe"
        )


def refuse_update_delay(name: str, plan: Plan) -> None:
    """Raises ScheduleError if the in-flight counts of a plan need its update delay."""
    if raise_to_legal(plan.in_flight, plan.replicas) != plan.in_flight:
        raise ScheduleError(
            f"schedule {name!r} at in-flight counts {plan.in_flight}: they need the plan's update delay "
            f"{plan.update_delay}, but this method updates once per minibatch, without a delay; plan without an update "
            "delay"
        )


def check_input_replicas(name: str, plan: Plan, m: int) -> None:
    """Raises ScheduleError if the input stage, whose replica 0 reads minibatches for all, would deadlock."""
    replicas, wait = plan.replicas[0], plan.in_flight[0] - 1
    if replicas > 1 and m // replicas < wait:
        raise ScheduleError(
            f"schedule {name!r} with {m} microbatches a minibatch: the input stage has {replicas} replicas and {wait} "
            f"warm-up forwards, so it needs at least {wait * replicas}; split the minibatch further, or take a smaller "
            "depth"
        )

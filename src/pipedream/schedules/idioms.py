"""The few turns of phrase that orders are written in. Each yields ops without end.

Legend: a seat is a (stage, replica); its microbatches are replica, replica + r, replica + 2 r, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.depth import legal
from pipedream.core.plan.placement import Placement, StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.prediction import WeightPrediction
from pipedream.core.schedule.schedule import Claims, Order, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.core.schedule.weights import Flush, Latest

__all__ = [
    "SPLIT",
    "B",
    "F",
    "I",
    "Turns",
    "W",
    "admitted",
    "backward",
    "check_handing",
    "endless",
    "flushed",
    "flushing",
    "forward",
    "input_gradient",
    "latest",
    "minibatch_by_minibatch",
    "one_forward_one_backward",
    "one_forward_one_input_gradient",
    "one_stage_per_rank",
    "recomputing",
    "refuse_split",
    "refuse_update_delay",
    "share_out",
    "unflushed",
    "update",
    "weight_gradient",
    "with_updates",
]

F, B, U = Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE
I, W = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741  # the field's letters
SPLIT = (F, I, W)
"""Kinds of op of a microbatch whose backward is split."""


def forward(stage_replica: tuple[int, int], microbatch: int) -> Op:
    """Returns the forward of a microbatch at a seat."""
    stage, replica = stage_replica
    return Op(F, stage, microbatch, replica)


def backward(stage_replica: tuple[int, int], microbatch: int) -> Op:
    """Returns the backward of a microbatch at a seat."""
    stage, replica = stage_replica
    return Op(B, stage, microbatch, replica)


def input_gradient(stage_replica: tuple[int, int], microbatch: int) -> Op:
    """Returns the half of a backward that the stage before waits for."""
    stage, replica = stage_replica
    return Op(Kind.INPUT_GRADIENT, stage, microbatch, replica)


def weight_gradient(stage_replica: tuple[int, int], microbatch: int) -> Op:
    """Returns the half of a backward that only the update waits for."""
    stage, replica = stage_replica
    return Op(W, stage, microbatch, replica)


def update(stage_replica: tuple[int, int], number: int) -> Op:
    """Returns the update that makes version `number` at a seat."""
    stage, replica = stage_replica
    return Op(U, stage, number, replica)


class Turns:
    """What a worker takes of the microbatches of a minibatch, at several stages in turn: each kind of op in order.

    Args:
        mine: the microbatches.
    """

    def __init__(self, mine: range) -> None:
        self._mine = mine
        self._taken: Counter[tuple[Kind, tuple[int, int]]] = Counter()

    def left(self, kind: Kind, stage_replica: tuple[int, int]) -> int:
        """Returns how many microbatches are still to have this kind of op."""
        return len(self._mine) - self._taken[kind, stage_replica]

    def take(self, *steps: tuple[Kind, tuple[int, int]], times: int = 1) -> Iterator[Op]:
        """Yields the next op of each of these, so many times; leaves out those that have none left, or none as yet: a
        backward needs its forward, a weight gradient its input gradient."""
        for _ in range(times):
            for kind, stage_replica in steps:
                before = {F: None, B: F, I: F, W: I}[kind]
                most = len(self._mine) if before is None else self._taken[before, stage_replica]
                if self._taken[kind, stage_replica] < most:
                    stage, replica = stage_replica
                    yield Op(kind, stage, self._mine[self._taken[kind, stage_replica]], replica)
                    self._taken[kind, stage_replica] += 1


def one_stage_per_rank(placement: Placement, ops: Callable[[StageReplica], Iterator[Op]]) -> Order:
    """Returns the order of a placement with one seat a rank, from what a seat does.

    Raises:
        ScheduleError: a rank has several seats.
    """
    for rank in range(placement.workers):
        if len(stage_replicas := placement.stage_replicas(rank)) > 1:
            raise ScheduleError(
                "a method with one stage a worker was asked for, but in this plan worker "
                f"{rank} has the stages {', '.join(str(stage) for stage, _ in stage_replicas)}; plan for the method that is "
                "wanted, or take one with several stages a worker, as the plan's own"
            )

    def order(rank: int) -> Iterator[Op]:
        (stage_replica,) = placement.stage_replicas(rank)
        return ops(stage_replica)

    return order


def one_forward_one_backward(stage_replica: StageReplica, *, mine: range, warmup: int) -> Iterator[Op]:
    """Yields `warmup` forwards, then one forward and one backward in turn, then the backwards that are left.

    Args:
        stage_replica: the (stage, replica).
        mine: the seat's microbatches.
        warmup: W_s, forwards before the first backward beside the one that belongs to it.
    """
    for i in range(len(mine) + warmup):
        if i < len(mine):
            yield forward(stage_replica, mine[i])
        if i >= warmup:
            yield backward(stage_replica, mine[i - warmup])


def one_forward_one_input_gradient(
    stage_replica: StageReplica, *, mine: range, warmup: int, behind: int
) -> Iterator[Op]:
    """Yields 1F1B with its backwards split: weight gradients come `behind` later than input gradients, then the rest.

    Args:
        stage_replica, mine, warmup: as for `one_forward_one_backward`.
        behind: input gradients between that of a microbatch and its weight gradient.
    """
    for i in range(len(mine) + warmup):
        if i < len(mine):
            yield forward(stage_replica, mine[i])
        if i >= warmup:
            yield input_gradient(stage_replica, mine[i - warmup])
            if i >= warmup + behind:
                yield weight_gradient(stage_replica, mine[i - warmup - behind])
    yield from (weight_gradient(stage_replica, k) for k in mine[max(0, len(mine) - behind) :])


def with_updates(ops: Iterator[Op], *, replicas: int, per_update: int, update_delay: int = 0) -> Iterator[Op]:
    """Yields an order with an update after the seat's last backward of each, or after the forward behind it.

    Args:
        ops: forwards and backwards of one seat, backwards (or the weight gradients of split ones) in order.
        replicas: of the stage; the seat takes every so-manieth microbatch.
        per_update: microbatches in an update, over all replicas; at least `replicas`.
        update_delay: 1 puts the next forward before the update.
    """
    due: Op | None = None
    for op in ops:
        yield op
        if op.kind in (B, W) and (op.index + replicas) // per_update > op.index // per_update:
            due = update((op.stage, op.replica), op.index // per_update + 1)
        if due is not None and (not update_delay or op.kind is F):
            yield due
            due = None


def flushed(
    stage_replica: StageReplica, *, replicas: int, microbatches: int, ops: Callable[[range], Iterator[Op]]
) -> Iterator[Op]:
    """Yields, minibatch after minibatch, the ops on the seat's share of its microbatches and one update."""
    for number in count():
        first = number * microbatches
        yield from ops(range(first + (stage_replica.replica - first) % replicas, first + microbatches, replicas))
        yield update(stage_replica, number + 1)


def minibatch_by_minibatch(m: int, ops: Callable[[int, range], Iterator[Op]]) -> Order:
    """Returns the order of ranks that have several stages without replicas: a stage updates behind its last backward.

    Args:
        m: microbatches of a minibatch.
        ops: (rank, microbatches of a minibatch) -> its forwards and backwards.
    """

    def order(rank: int) -> Iterator[Op]:
        passes = (op for number in count() for op in ops(rank, range(number * m, (number + 1) * m)))
        return with_updates(passes, replicas=1, per_update=m)

    return order


def flushing(
    name: str, plan: Plan, m: int, order: Order, claims: Claims, *, kinds: tuple[Kind, ...] = (F, B)
) -> Schedule:
    """Returns the schedule of an order that flushes: an update a minibatch, of all its microbatches, at every stage.

    Args:
        name: of the method.
        plan: stages, replicas, depth.
        m: microbatches of a minibatch.
        order: rank -> ops, updates among them.
        claims: of the method.
        kinds: of op that each microbatch needs at each stage.
    """
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


def share_out(name: str, plan: Plan, wanted: int | None, usual: int) -> int:
    """Returns m for a flushing method: what is wanted, or the usual number, rounded up to the most replicas.

    Raises:
        ScheduleError: fewer than the replicas of some stage: each must have a part in every update, or it would
            not know, before it waits for the others' gradients, whether there is one.
    """
    most = max(plan.replicas)
    if wanted is not None and wanted < most:
        raise ScheduleError(
            f"schedule {name!r} with {wanted} microbatches a minibatch: a stage has {most} replicas, and each takes "
            f"part in every update; split the minibatch into at least {most}"
        )
    return wanted or max(usual, most)


def unflushed(plan: Plan, per_update: int | None = None) -> Order:
    """Returns 1F1B without a flush at the plan's depth.

    Args:
        plan: one seat a rank; ScheduleError otherwise.
        per_update: microbatches in an update of every stage, over its replicas, without an update delay; None: a round of the
            stage's replicas, with the plan's update delay.
    """

    def ops(stage_replica: StageReplica) -> Iterator[Op]:
        stage = stage_replica.stage
        replicas = plan.replicas[stage]
        steady = one_forward_one_backward(
            stage_replica, mine=endless(stage_replica, replicas), warmup=plan.in_flight[stage] - 1
        )
        update_delay = plan.update_delay[stage] if per_update is None else 0
        return with_updates(steady, replicas=replicas, per_update=per_update or replicas, update_delay=update_delay)

    return one_stage_per_rank(plan.placement, ops)


def latest(
    plan: Plan,
    per_update: int | None = None,
    *,
    backward_rule: str = "graph",
    forward_prediction: WeightPrediction | None = None,
    backward_prediction: WeightPrediction | None = None,
    shares_prediction: int = 1,
) -> Latest:
    """Returns the rule of the newest weights for `unflushed` of the same plan."""
    return Latest(
        warmup=tuple(count - 1 for count in plan.in_flight),
        replicas=plan.replicas,
        update_delay=plan.update_delay if per_update is None else (0,) * len(plan.stages),
        per_update=plan.replicas if per_update is None else (per_update,) * len(plan.stages),
        backward_rule=backward_rule,
        forward_prediction=forward_prediction,
        backward_prediction=backward_prediction,
        shares_prediction=shares_prediction,
    )


def recomputing(plan: Plan, backward_rule: str, rules: tuple[str, ...] = ("graph", "recompute")) -> Plan:
    """Returns the plan, all of whose stages recompute where the backward rule says so.

    Raises:
        ValueError: the rule is none of those that the method has.
    """
    if backward_rule not in rules:
        raise ValueError(f"its backward rule is {' or '.join(rules)}, found {backward_rule!r}")
    if backward_rule != "recompute":
        return plan
    return replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))


def admitted(plan: Plan) -> int:
    """Returns the most microbatches that a stage holds in flight, over its replicas."""
    return max(count * replicas for count, replicas in zip(plan.in_flight, plan.replicas, strict=True))


def refuse_split(name: str, microbatches: int | None) -> None:
    """Refuses to split a minibatch. Raises ScheduleError: the method updates after every minibatch."""
    if microbatches not in (None, 1):
        raise ScheduleError(
            f"schedule {name!r} updates after every minibatch and does not split it, but {microbatches} microbatches "
            "were asked for; leave the number out, or take pipedream_2bw, 1f1b or gpipe"
        )


def refuse_update_delay(name: str, plan: Plan) -> None:
    """Refuses a plan whose depth needs its update delay. Raises ScheduleError: the method updates once a minibatch, without."""
    if legal(plan.in_flight, plan.replicas) != plan.in_flight:
        raise ScheduleError(
            f"schedule {name!r} at in-flight counts {plan.in_flight}: they need the update delay {plan.update_delay} of the plan, "
            "but this method updates once a minibatch and does not update delay; plan without an update delay"
        )


def check_handing(name: str, plan: Plan, m: int) -> None:
    """Checks that the replicas of the input stage, of which one reads minibatches for all, cannot wait in a circle.

    Raises:
        ScheduleError: replica 0 would have to admit a minibatch before its turn.
    """
    replicas, wait = plan.replicas[0], plan.in_flight[0] - 1
    if replicas > 1 and m // replicas < wait:
        raise ScheduleError(
            f"schedule {name!r} with {m} microbatches a minibatch: the input stage has {replicas} replicas and {wait} "
            f"warm-up forwards, so it needs at least {wait * replicas}; split the minibatch further, or take a smaller "
            "depth"
        )


def endless(stage_replica: StageReplica, replicas: int) -> range:
    """Returns all microbatches of a seat (2 to the 62nd: more than any run has)."""
    return range(stage_replica.replica, 2**62, replicas)

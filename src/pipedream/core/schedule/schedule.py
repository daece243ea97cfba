"""The Schedule: four answers and a promise.

A schedule names its answers to the four questions (order, placement, weights, updates) and the paper's
closed forms (claims). It is drawn, verified, lowered, simulated and run from this one object. An order
yields ops lazily and never ends; a run of n microbatches is the same order with the ops of the microbatches
that do not exist left out, which is exactly how a pipeline drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.compensation import check, compensations
from pipedream.core.schedule.op import Kind, Op, ends_backward, requires
from pipedream.core.schedule.update import UpdateRule
from pipedream.core.schedule.weights import WeightRule

__all__ = ["Claims", "Order", "Schedule", "fetched_for", "requires_of", "truncate"]

Order = Callable[[int], Iterator[Op]]
"""From a rank to its ops, in order, without end."""

_PATIENCE = 1_000_000


@dataclass(frozen=True)
class Claims:
    """What the paper promises, as functions; None where it promises nothing.

    Legend: p workers, m microbatches per minibatch (or in the run, for orders without a flush), s worker: each has one
    stage, or several, of which what is held is added up. A split backward holds a microbatch until its weight gradient.

    Attributes:
        assumption: under which the forms hold.
        least: p -> fewest microbatches of a minibatch for which bubble, makespan and counts in flight hold.
        bubble: (p, m) -> share of the time that workers wait, over one minibatch of a flushing order.
        ratio: of a backward's seconds to a forward's for which the bubble holds; None for any.
        in_flight: (p, m, s) -> most microbatches in flight.
        staleness: (p, m, s) -> updates a gradient is late.
        versions: (p, m, s) -> most versions of the weights.
        makespan_s: (p, m, n, f, i, w) -> seconds of n minibatches, one behind the other, where a microbatch's forward,
            input gradient and weight gradient take f, i and w seconds at each stage.
    """

    assumption: str = "straight pipeline, paper's depth, equal stages, messages cost nothing"
    least: Callable[[int], int] = lambda p: 1
    bubble: Callable[[int, int], float] | None = None
    ratio: float | None = None
    in_flight: Callable[[int, int, int], int] | None = None
    staleness: Callable[[int, int, int], int] | None = None
    versions: Callable[[int, int, int], int] | None = None
    makespan_s: Callable[[int, int, int, float, float, float], float] | None = None


@dataclass(frozen=True)
class Schedule:
    """A method, for one plan.

    Attributes:
        name: the method's name.
        plan: stages, replicas, depth.
        placement: where a (stage, replica) lives.
        order: rank -> ops, lazily and without end.
        weights: which version a forward and a backward read.
        updates: which microbatches an update holds.
        microbatches: m, how many a minibatch is split into.
        flushes: an update waits until nothing is in flight.
        kinds: kinds of op that each microbatch needs at each stage.
        couples_updates: updates of all stages wait for each other (clipping by the global norm).
        norm_delay: where they do, for the norm of the update so many before; 0: of the same one.
        claims: the paper's closed forms.

    Raises:
        ScheduleError: the updates compensate delay in a way that makes no sense here (`compensation.check`), the
            backward rule does not go with what the plan's stages recompute, a stage is late although the method
            flushes, or rounds are averaged that updates do not hold.
    """

    name: str
    plan: Plan
    placement: Placement
    order: Order = field(repr=False)
    weights: WeightRule
    updates: UpdateRule
    microbatches: int = 1
    flushes: bool = False
    kinds: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD)
    couples_updates: bool = False
    norm_delay: int = 0
    claims: Claims = field(default_factory=Claims, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.updates.compensation:
            check(self.updates.compensation, self.weights, flushes=self.flushes, reads_one=self._reads_one)
        late = [self.weights.staleness(stage) for stage in range(len(self.plan.stages))] if self.flushes else []
        if any(late):
            raise ScheduleError(
                f"schedule {self.name!r} says that it flushes, but its weight rule {self.weights.name} makes the "
                f"gradients of its stages {late} updates late; leave flushes=True out, or take the rule Flush"
            )
        if self.updates.mean_of_rounds and self.updates.per_update != self.placement.replicas:
            raise ScheduleError(
                f"schedule {self.name!r} averages rounds, a minibatch of each replica, but its updates hold "
                f"{self.updates.per_update} of {self.placement.replicas} replicas; leave mean_of_rounds=True out"
            )
        again = [stage.recompute for stage in self.plan.stages]
        rule = self.weights.backward_rule
        if rule == "graph" and any(again):
            raise ScheduleError(
                f"schedule {self.name!r}: its backward rule 'graph' goes back through the activations of the forward, "
                f"but stage {again.index(True)} of the plan recomputes and does not keep them; plan without "
                "recomputation, or give the method the option backward_rule=recompute"
            )
        if rule == "recompute" and not all(again):
            raise ScheduleError(
                f"schedule {self.name!r}: its backward rule 'recompute' does the forward again, but stage "
                f"{again.index(False)} of its plan does not recompute; mark all stages so"
            )

    def compensated(self, asked: Any) -> Schedule:
        """Returns the schedule with other compensations in the place of its own.

        Args:
            asked: one or several of `core.schedule.compensation`, or their texts, as in ``spike`` or ``t1:500``; ()
            for none.

        Raises:
            ScheduleError: an unknown one, or one that makes no sense here.
        """
        return replace(self, updates=replace(self.updates, compensation=compensations(asked)))

    @property
    def _reads_one(self) -> bool:
        """All microbatches of an update read one version; looked up behind the warm-up, for a whole cycle."""
        for stage, count in enumerate(self.updates.per_update):
            settled = self.weights.staleness(stage) + self.cycle // count
            for update in range(1, settled + self.cycle // count + 1):
                members = self.updates.members(stage, update)
                if len({self.weights.forward_version(stage, k) for k in members}) > 1:
                    return False
        return True

    @property
    def splits_backward(self) -> bool:
        """The schedule has I and W instead of B."""
        return Kind.INPUT_GRADIENT in self.kinds

    @property
    def cycle(self) -> int:
        """Microbatches after which the orders of all ranks repeat themselves."""
        return lcm(self.placement.cycle, self.microbatches, *self.updates.per_update)

    def ops(self, rank: int, total: int) -> Iterator[Op]:
        """Yields the ops of a rank for a run of `total` microbatches from an empty pipeline to an empty one.

        Raises:
            ScheduleError: the order does not yield all of them.
        """
        return truncate(self.order(rank), self, rank, total)

    def coupled(self) -> Schedule:
        """Returns the schedule with the updates of all stages waiting for each other (clipping by the global norm).

        A rank that has several stages makes their updates together, behind the last of their gradients.
        """

        def order(rank: int) -> Iterator[Op]:
            stage_replicas = len(self.placement.stage_replicas(rank))
            due: list[Op] = []
            for op in self.order(rank):
                if op.kind is not Kind.UPDATE:
                    yield op
                    continue
                due.append(op)
                if len(due) == stage_replicas:
                    yield from due
                    due.clear()

        return replace(self, order=order, couples_updates=True)

    def requires(self, op: Op, total: int | None = None) -> tuple[Op, ...]:
        """Returns the ops that must be done before an op: by data, by weights, by updates.

        See `requires_of`, the one rule.
        """
        return requires_of(
            op,
            placement=self.placement,
            weights=self.weights,
            updates=self.updates,
            kinds=self.kinds,
            total=total,
        )


def requires_of(
    op: Op,
    *,
    placement: Placement,
    weights: WeightRule,
    updates: UpdateRule,
    kinds: tuple[Kind, ...],
    total: int | None = None,
) -> tuple[Op, ...]:
    """Returns the ops that must be done before an op: by data, by weights, by updates.

    Adds to `op.requires`: a pass that reads version v needs update v of its own stage, or the fetch that brought it
    to a rank where it does not live; an update needs the gradients of all its members, over all replicas, and the
    update before it.

    Args:
        op: any op.
        placement, weights, updates, kinds: of the schedule or the program.
        total: microbatches in the run, None for a run without end.
    """
    needs = requires(op, placement, kinds)
    kind, stage, index, replica = op
    if kind is Kind.UPDATE:
        last = ends_backward(kinds)
        needs += tuple(Op(last, stage, k, placement.replica(stage, k)) for k in updates.members(stage, index, total))
        if index > 1:
            needs += (Op(Kind.UPDATE, stage, index - 1, replica),)
        return needs
    if kind is Kind.WEIGHT_GRADIENT or (len(kinds) == 1 and not placement.is_fetched(stage)):
        return needs
    version = weights.forward_version(stage, index)
    if kind is Kind.FORWARD and placement.is_fetched(stage):
        return (*needs, Op(Kind.FETCH, stage, fetched_for(stage, index, updates, kinds), replica))
    if kind not in (Kind.FORWARD, Kind.FETCH):
        # Its own forward has already waited for the version that both read.
        newer = weights.backward_version(stage, index)
        version = newer if newer > version else 0
    if version > 0:
        needs += (Op(Kind.UPDATE, stage, version, replica),)
    return needs


def fetched_for(stage: int, microbatch: int, updates: UpdateRule, kinds: tuple[Kind, ...]) -> int:
    """Returns the microbatch from which on a forward's fetched weights are there: the first of its update, or, where
    there are forwards alone, of the run."""
    return 0 if len(kinds) == 1 else updates.members(stage, updates.update_of(stage, microbatch)).start


def truncate(order: Iterator[Op], schedule: Schedule, rank: int, total: int) -> Iterator[Op]:
    """Yields an endless order without the ops of microbatches from `total` on, and ends with the last.

    Raises:
        ScheduleError: the order goes on without yielding what is still missing.
    """
    updates = schedule.updates
    makes_updates = len(schedule.kinds) > 1
    missing = 0
    for kind in schedule.kinds:
        for stage, replica in schedule.placement.passes(rank, forward=kind is Kind.FORWARD):
            missing += len(range(replica, total, schedule.placement.replicas[stage]))
    for stage, _ in schedule.placement.stage_replicas(rank) if makes_updates else ():
        missing += updates.updates(stage, total)
    idle = 0
    while missing:
        op = next(order, None)
        if op is None or idle > _PATIENCE:
            raise ScheduleError(
                f"schedule {schedule.name!r}: the order of rank {rank} lacks {missing} ops of a run of {total} "
                "microbatches; each op of each microbatch must come once"
            )
        first = updates.members(op.stage, op.index).start if op.kind is Kind.UPDATE else op.index
        if first < total:
            missing -= op.kind is not Kind.FETCH
            idle = 0
            yield op
        else:
            idle += 1

"""The Schedule: a method's answers to four questions (order, placement, weights, updates), and its paper's claims.

This one object is drawn, verified, lowered, simulated and run. A run of n microbatches is the endless order without
later ones; that is how a pipeline drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.delay_compensation import check_compensations, compensations
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.rules import Rules

Order = Callable[[int], Iterator[Op]]
"""Rank -> its endless sequence of ops."""

_MAX_IDLE_OPS = 1_000_000


@dataclass(frozen=True)
class Claims:
    """The paper's closed forms, as functions; None where it has none.

    p: workers. m: microbatches per minibatch (in the run, for orders without a flush). s: a worker, with the sum over
    its stages. A split backward holds a microbatch until its weight gradient.

    Attributes:
        assumption: condition under which the forms hold.
        least: p -> fewest microbatches of a minibatch for which bubble, makespan and in-flight counts hold.
        bubble: (p, m) -> share of the time that workers wait, over one minibatch of a flushing order.
        ratio: seconds of a backward over those of a forward for which the bubble holds; None for any.
        in_flight: (p, m, s) -> most microbatches in flight.
        staleness: (p, m, s) -> updates.
        versions: (p, m, s) -> most versions of the weights.
        makespan_s: (p, m, n, f, i, w) -> seconds of n successive minibatches, if a microbatch's forward, input gradient
            and weight gradient take f, i and w seconds at each stage.
    """

    assumption: str = "straight pipeline, paper's depth, equal stages, messages cost nothing"
    least: Callable[[int], int] = lambda p: 1
    bubble: Callable[[int, int], float] | None = None
    ratio: float | None = None
    in_flight: Callable[[int, int, int], int] | None = None
    staleness: Callable[[int, int, int], int] | None = None
    versions: Callable[[int, int, int], int] | None = None
    makespan_s: Callable[[int, int, int, float, float, float], float] | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule(Rules):
    """A method, for one plan: rules and an order."""

    order: Order = field(repr=False)
    claims: Claims = field(default_factory=Claims, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.updates.compensation:
            check_compensations(
                self.updates.compensation, self.weights, flushes=self.flushes, reads_one_version=self._reads_one_version
            )
        staleness = [self.weights.staleness(stage) for stage in range(len(self.plan.stages))] if self.flushes else []
        if any(staleness):
            raise ScheduleError(
                f"schedule {self.name!r} has flushes=True, but its weight rule {self.weights.name} makes gradients "
                f"stale: by {staleness} updates at its stages; leave flushes=True out, or use the rule Flush"
            )
        if self.updates.mean_of_rounds and self.updates.per_update != self.placement.replicas:
            raise ScheduleError(
                f"schedule {self.name!r} averages rounds of one minibatch per replica, but its updates hold "
                f"{self.updates.per_update} microbatches for {self.placement.replicas} replicas; leave "
                "mean_of_rounds=True out"
            )
        recomputes = [stage.recompute for stage in self.plan.stages]
        backward_rule = self.weights.backward_rule
        if backward_rule == "graph" and any(recomputes):
            raise ScheduleError(
                f"schedule {self.name!r}: its backward rule 'graph' goes back through the activations of the forward, "
                f"but stage {recomputes.index(True)} of the plan recomputes and does not keep them; plan without "
                "recomputation, or give the method the option backward_rule=recompute"
            )
        if backward_rule == "recompute" and not all(recomputes):
            raise ScheduleError(
                f"schedule {self.name!r}: its backward rule 'recompute' repeats the forward, but stage "
                f"{recomputes.index(False)} of its plan does not recompute; set recompute=True on all stages"
            )

    def with_compensation(self, chosen: Any) -> Schedule:
        """Returns the schedule with other compensations (see `Phase`)."""
        return replace(self, updates=replace(self.updates, compensation=compensations(chosen)))

    @property
    def _reads_one_version(self) -> bool:
        for stage, per_update in enumerate(self.updates.per_update):
            steady = self.weights.staleness(stage) + self.cycle // per_update
            for update in range(1, steady + self.cycle // per_update + 1):
                members = self.updates.members(stage, update)
                if len({self.weights.forward_version(stage, k) for k in members}) > 1:
                    return False
        return True

    @property
    def cycle(self) -> int:
        return self.shortest_cycle

    def ops(self, rank: int, total: int) -> Iterator[Op]:
        """Yields the ops of a rank for a run of `total` microbatches."""
        missing = self.op_count(rank, total)
        order = self.order(rank)
        idle = 0
        while missing:
            op = next(order, None)
            if op is None or idle > _MAX_IDLE_OPS:
                raise ScheduleError(
                    f"schedule {self.name!r}: the order of rank {rank} lacks {missing} ops of a run of {total} "
                    "microbatches; each op of each microbatch must come once"
                )
            first_microbatch = self.updates.members(op.stage, op.index).start if op.kind is Kind.UPDATE else op.index
            if first_microbatch >= total:
                idle += 1
                continue
            missing -= 1
            idle = 0
            yield op

    def couple_updates(self) -> Schedule:
        """Returns the schedule in which updates wait for those of all stages, and each rank makes its own together."""
        return replace(self.join_updates(), couples_updates=True)

    def join_updates(self) -> Schedule:
        """Returns the schedule in which each rank makes its stages' updates together, after their last gradient."""

        def order(rank: int) -> Iterator[Op]:
            stage_replicas = len(self.placement.stage_replicas(rank))
            updates: list[Op] = []
            for op in self.order(rank):
                if op.kind is not Kind.UPDATE:
                    yield op
                    continue
                updates.append(op)
                if len(updates) == stage_replicas:
                    yield from updates
                    updates.clear()

        return replace(self, order=order)

    @property
    def makes_same_updates(self) -> bool:
        """Whether all stages make the same updates, so that several may hold a weight.

        Update n of each stage holds the same microbatches, and the gradient of each of these is that of the whole model
        at one version.
        """
        stages, weights = range(len(self.plan.stages)), self.weights
        if len(stages) == 1:
            return True
        if weights.backward_rule != "stash" or any(weights.predictions(stage) for stage in stages):
            return False
        return len(set(self.updates.per_update)) == 1 and all(
            len({weights.forward_version(stage, k) for stage in stages}) == 1 for k in range(self._find_steady())
        )

    def with_tied_weights(self) -> Schedule:
        """Returns the schedule, with the updates of each rank together if stages of its plan share weights.

        Raises:
            ScheduleError: its stages do not all make the same updates.
        """
        if not self.plan.tied_weights or not self.trains:
            return self
        if not self.makes_same_updates:
            raise ScheduleError(
                f"{self.describe_split()} by {self.name!r}, whose stages update at different times, from gradients "
                "of different versions. Keep these layers in one stage, untie the weight (a parameter of its own for "
                "each layer), or use a method whose stages all make the same updates: pipedream_2bw, or a flushing one "
                "(1f1b, gpipe)"
            )
        return self.join_updates()

    def describe_split(self) -> str:
        """Returns words for what asks of a method that its stages hold shared weights."""
        shared = "; ".join(map(str, self.plan.tied_weights))
        return f"the plan separates layers that share {shared}, and was asked to train"

    def find_norm_delay(self) -> int:
        """Returns D: the newest norm that every stage can know at update n is that of update n - D.

        Stage s makes update n after the forwards of its microbatches at every earlier stage, and after their backwards
        at every later stage. So an update that each stage makes before its own last forward for update n is made
        everywhere before any stage makes update n.
        """
        updates, placement = self.updates, self.placement
        if len(set(updates.per_update)) > 1:
            raise ScheduleError(
                f"clipping by the delayed global norm was asked for with {self.name!r}: an update holds "
                f"{', '.join(map(str, updates.per_update))} microbatches at its stages, so they have no common norm. "
                "Use clip='local', the same number of replicas at each stage, or a method with one update per "
                "minibatch (2bw)"
            )
        per_update = updates.per_update[0]
        delay = 1
        for rank in range(placement.workers):
            if len(placement.stage_replicas(rank)) > 1:
                raise ScheduleError(
                    f"clipping by the delayed global norm was asked for with {self.name!r}, which puts several stages "
                    "on a worker; use clip='local'"
                )
            ((stage, _),) = placement.stage_replicas(rank)
            replicas = placement.replicas[stage]
            newest_update = 0
            for op in islice(self.order(rank), 4 * self._find_steady() + 8):
                if op.kind is Kind.UPDATE:
                    newest_update = op.index
                elif op.kind is Kind.FORWARD and (op.index + replicas) // per_update > op.index // per_update:
                    delay = max(delay, op.index // per_update + 1 - newest_update)
        return delay

    def _find_steady(self) -> int:
        """Returns a microbatch from which on versions repeat cycle by cycle."""
        max_in_flight = max(self.plan.in_flight) * max(self.placement.replicas)
        return (max_in_flight // self.cycle + 3) * self.cycle

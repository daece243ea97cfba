"""Dispatched stages: forwards on a rank where the weights do not live (RoundPipe). No other method needs this module.

A stage's weights live and its backwards run at its *home*. The rank of its forwards *fetches* them once per update (op
``H``; ``2H8`` is for the forwards of stage 2 from microbatch 8 on). Channels carry 'weights' from home (numbered by the
first microbatch that they are for) and 'stage_input', what a forward has read, to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.placement import Carries, Placement
from pipedream.core.schedule.op import Kind, Op, gives_back
from pipedream.core.schedule.program import MOST_AHEAD, Cargo, Channel, Route
from pipedream.core.schedule.rules import Rules

DISPATCHED = (Carries.WEIGHTS, Carries.STAGE_INPUT)
"""On channels of dispatched stages alone."""

_NEVER = 2**62


def fetches(rules: Rules, rank: int, total: int) -> tuple[Op, ...]:
    """Returns the fetches of a rank."""
    fetched = (
        rules.fetch_before(Op(Kind.FORWARD, stage, k, replica))
        for stage, replica in rules.placement.remote_forwards(rank)
        for k in range(total)
    )
    return tuple(dict.fromkeys(fetched))


def routes(placement: Placement) -> Iterator[Route]:
    """Yields the channels; one set of weights is large, and enough for an update."""
    for stage in filter(placement.is_remote, range(placement.stages)):
        yield Route(Carries.WEIGHTS, stage, stage, 1)
        yield Route(Carries.STAGE_INPUT, stage, stage, MOST_AHEAD)


def arrivals(op: Op, rules: Rules) -> Iterator[Cargo]:
    """Yields what an op reads from another rank."""
    kind, stage, k, _ = op
    if kind is Kind.FETCH:
        yield Cargo(Carries.WEIGHTS, stage, stage, k)
    elif kind is gives_back(rules.kinds) and rules.placement.is_remote(stage):
        yield Cargo(Carries.STAGE_INPUT, stage, stage, k)


def departures(op: Op, rules: Rules) -> Iterator[Cargo]:
    """Yields what an op makes for another rank."""
    kind, stage, k, _ = op
    if kind is Kind.FORWARD and rules.trains and rules.placement.is_remote(stage):
        yield Cargo(Carries.STAGE_INPUT, stage, stage, k)


class Lender:
    """Sends the weights of a rank's stages to their forwards, once for each update that reads them."""

    def __init__(self, rules: Rules, rank: int) -> None:
        placement = rules.placement
        self._rules = rules
        self._next = {stage: 0 for stage, _ in placement.stage_replicas(rank) if placement.is_remote(stage)}

    def due(self, update: Op | None = None) -> Iterator[Cargo]:
        """Yields what can leave after an update; None is the start of the run."""
        stages = self._next if update is None else self._next.keys() & {update.stage}
        version = 0 if update is None else update.index
        for stage in stages:
            while self._rules.weights.forward_version(stage, self._next[stage]) <= version:
                yield Cargo(Carries.WEIGHTS, stage, stage, self._next[stage])
                self._next[stage] += self._rules.updates.per_update[stage] if self._rules.trains else _NEVER


def producer(channel: Channel, k: int, rules: Rules) -> Op | None:
    """Returns the op that makes a message; None for the weights of the start."""
    stage = channel.source
    if channel.carries == Carries.STAGE_INPUT:
        return Op(Kind.FORWARD, stage, k)
    version = rules.weights.forward_version(stage, k)
    return Op(Kind.UPDATE, stage, version) if version else None


def consumer(channel: Channel, k: int, rules: Rules) -> Op:
    """Returns the op that reads a message."""
    return Op(Kind.FETCH if channel.carries == Carries.WEIGHTS else gives_back(rules.kinds), channel.target, k)

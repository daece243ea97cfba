"""Dispatched stages (`core.schedule.dispatch`): their forwards find the right weights."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.op import Kind, Op
from pipedream.verifier.unrolled import Unrolled, check_arrival

_Span = tuple[int, int]


def check_fetches(run: Unrolled) -> None:
    """Checks that forwards read the weights that were fetched for them, and that these were sent in time.

    Fetched weights stay until the next set takes their place; at home an update may write in their place.
    """
    for rank in range(len(run.streams)):
        _check_fetched(run, rank)
    _check_sent(run)


def _check_fetched(run: Unrolled, rank: int) -> None:
    remote = {stage for stage, _ in run.program.placement.remote_forwards(rank)}
    there: dict[int, Op] = {}
    for position, op in enumerate(run.streams[rank]):
        if not isinstance(op, Op) or op.stage not in remote:
            continue
        if op.kind is Kind.FETCH:
            home = run.program.placement.rank_of(op.stage, op.index)
            check_arrival(run, op, op, home, Carries.WEIGHTS)
            there[op.stage] = op
        elif op.kind is Kind.FORWARD:
            expected, fetched = run.program.fetch_before(op), there.get(op.stage)
            if fetched != expected:
                raise run.error(rank, position, f"reads what {expected} fetched; found there is {fetched or 'none'}")


def _check_sent(run: Unrolled) -> None:
    program = run.program
    for (number, k), position in run.sent.items():
        channel = program.channels[number]
        if channel.carries != Carries.WEIGHTS:
            continue
        version = program.weights.forward_version(channel.source, k)
        overwrites = Op(Kind.UPDATE, channel.source, version + program.weights.versions(channel.source))
        if run.ops.get(overwrites, (0, position))[1] < position:
            raise run.error(
                channel.sender, position, f"sends version {version}, in whose place {overwrites} has written"
            )


def remote_spans(run: Unrolled, rank: int) -> Iterator[tuple[list[_Span], _Span]]:
    """Yields, for each fetch, the spans of its forwards' inputs, kept until the next fetch, and of its weights."""
    for stage, replica in run.program.placement.remote_forwards(rank):
        reads: dict[Op, list[int]] = {}
        for k in range(run.total):
            forward = Op(Kind.FORWARD, stage, k, replica)
            reads.setdefault(run.program.fetch_before(forward), []).append(run.ops[forward][1])
        fetched = [run.ops[fetch][1] for fetch in reads]
        until = [*fetched[1:], len(run.streams[rank])]
        for at, end, positions in zip(fetched, until, reads.values(), strict=True):
            yield [(position, end) for position in positions], (at, max(positions))

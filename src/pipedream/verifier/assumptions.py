"""The runtime's assumptions about each stage replica, besides that nothing comes before what it needs.

- Microbatches are forwarded in their order: the first that does not exist is where a stream ends.
- An update takes all gradients since the one before it, so no other update's may lie between.
- Each sum over replicas has its update after it.
- Version numbers never fall, so that older ones can be dropped; under the backward rule 'stash' a backward reads what
  its forward has read.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.core.plan.placement import Carries
from pipedream.core.schedule.op import Kind, Op, ends_backward
from pipedream.verifier.unrolled import Unrolled, check_arrival


def check_assumptions(run: Unrolled) -> None:
    """Checks a run that `unroll` accepted."""
    for rank in range(len(run.streams)):
        _check_order(run, rank)
    for (rank, stage, update), position in run.synced.items():
        replica = dict(run.program.placement.stage_replicas(rank))[stage]
        place = run.ops.get(Op(Kind.UPDATE, stage, update, replica))
        if place is None or place[1] < position:
            raise run.error(rank, position, f"no update {stage}U{update} follows this sum")
    for stage in range(run.program.placement.stages):
        _check_versions(run, stage)


def _check_order(run: Unrolled, rank: int) -> None:
    program = run.program
    gives = ends_backward(program.kinds)
    forwarded: dict[int, int] = {}
    gradients: dict[int, list[int]] = {}
    for position, op in enumerate(run.streams[rank]):
        if not isinstance(op, Op):
            continue
        kind, stage, index, _ = op
        if kind is Kind.FORWARD:
            before = forwarded.get(stage, -1)
            if index < before:
                raise run.error(
                    rank, position, f"comes after {stage}F{before}; microbatches are forwarded in their order"
                )
            forwarded[stage] = index
        elif kind is gives:
            gradients.setdefault(stage, []).append(index)
        elif kind is Kind.UPDATE:
            members = program.updates.members(stage, index, run.total)
            others = [k for k in gradients.pop(stage, []) if k not in members]
            if others:
                raise run.error(
                    rank,
                    position,
                    f"{stage}{gives.value}{others[0]} comes before it, but its gradient is for update "
                    f"{program.updates.update_of(stage, others[0])}",
                )


def _check_versions(run: Unrolled, stage: int) -> None:
    program, rule = run.program, run.program.weights
    newest = [0] * program.placement.replicas[stage]
    for k in range(run.total):
        replica = program.placement.replica(stage, k)
        rank, position = run.ops[Op(Kind.FORWARD, stage, k, replica)]
        version = rule.forward_version(stage, k)
        if version < newest[replica]:
            raise run.error(
                rank,
                position,
                f"weight rule {rule.name!r} reads version {version}, but version {newest[replica]} for an earlier "
                "microbatch; older versions may have been dropped",
            )
        newest[replica] = version
        again = rule.backward_version(stage, k)
        if rule.backward_rule == "stash" and len(program.kinds) > 1 and again != version:
            raise run.error(
                rank,
                position,
                f"weight rule {rule.name!r} reads version {version} here and version {again} in the backward, which "
                "must use the weights of its forward",
            )


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

"""What the runtime takes for granted of each seat, beside that nothing comes before what it needs.

- Microbatches are forwarded in their order: the first that does not exist is where a stream ends.
- An update takes all gradients since the one before it, so no other's may lie between.
- A sum over replicas is begun for an update that follows.
- The versions that a rule names are there: they never fall as the microbatches go on, so that what lies behind the next
  forward can be let go; and a backward that is to give the gradient at its forward's weights reads these.
- Weights that are fetched are those of their version, and stand until the last forward that they are for: the next set
  takes their place.
"""

from __future__ import annotations

from pipedream.core.schedule.op import Kind, Op, ends_backward
from pipedream.core.schedule.schedule import fetched_for
from pipedream.verifier.unrolled import Unrolled

__all__ = ["check_rules"]


def check_rules(run: Unrolled) -> None:
    """Checks these rules of a run that `unroll` accepted.

    Raises:
        ScheduleError: one is broken; names the rank, the instruction and the rule.
    """
    for rank in range(len(run.streams)):
        _check_order(run, rank)
        _check_fetched(run, rank)
    _check_lent(run)
    for (rank, stage, update), position in run.synced.items():
        replica = dict(run.program.placement.stage_replicas(rank))[stage]
        place = run.ops.get(Op(Kind.UPDATE, stage, update, replica))
        if place is None or place[1] < position:
            raise run.error(rank, position, f"no update {stage}U{update} follows this sum")
    for stage in range(run.program.placement.stages):
        _check_versions(run, stage)


def _check_order(run: Unrolled, rank: int) -> None:
    """Checks the order of the forwards of each seat, and which gradients its updates find."""
    program = run.program
    gives = ends_backward(program.kinds)
    forwarded: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for position, op in enumerate(run.streams[rank]):
        if not isinstance(op, Op):
            continue
        kind, stage, index, _ = op
        if kind is Kind.FORWARD:
            before = forwarded.get(stage, -1)
            if index < before:
                raise run.error(
                    rank, position, f"comes behind {stage}F{before}; microbatches are forwarded in their order"
                )
            forwarded[stage] = index
        elif kind is gives:
            found.setdefault(stage, []).append(index)
        elif kind is Kind.UPDATE:
            members = program.updates.members(stage, index, run.total)
            others = [k for k in found.pop(stage, []) if k not in members]
            if others:
                raise run.error(
                    rank,
                    position,
                    f"{stage}{gives.value}{others[0]} comes before it, whose gradient is for update "
                    f"{program.updates.update_of(stage, others[0])}",
                )


def _check_fetched(run: Unrolled, rank: int) -> None:
    """Checks that each forward on fetched weights finds those that were fetched for it."""
    program = run.program
    visits = {stage for stage, _ in program.placement.visits(rank)}
    there: dict[int, int] = {}
    for position, op in enumerate(run.streams[rank]):
        if not isinstance(op, Op) or op.stage not in visits:
            continue
        if op.kind is Kind.FETCH:
            there[op.stage] = op.index
        elif op.kind is Kind.FORWARD:
            wanted = fetched_for(op.stage, op.index, program.updates, program.kinds)
            if there.get(op.stage) != wanted:
                found = f"{op.stage}{Kind.FETCH.value}{there[op.stage]}" if op.stage in there else "none"
                raise run.error(
                    rank, position, f"reads what {op.stage}{Kind.FETCH.value}{wanted} fetched; found there is {found}"
                )


def _check_lent(run: Unrolled) -> None:
    """Checks that weights leave their home before an update writes in their place."""
    program = run.program
    for (number, k), position in run.sent.items():
        ends = program.channels[number]
        if ends.carries != "weights":
            continue
        version = program.weights.forward_version(ends.source, k)
        after = Op(Kind.UPDATE, ends.source, version + program.weights.versions(ends.source))
        if run.ops.get(after, (0, position))[1] < position:
            raise run.error(ends.sender, position, f"sends version {version}, in whose place {after} has written")


def _check_versions(run: Unrolled, stage: int) -> None:
    """Checks what a weight rule says of a stage's microbatches."""
    program, rule = run.program, run.program.weights
    newest = [0] * program.placement.replicas[stage]  # each replica drops versions by itself
    for k in range(run.total):
        replica = program.placement.replica(stage, k)
        rank, position = run.ops[Op(Kind.FORWARD, stage, k, replica)]
        version = rule.forward_version(stage, k)
        if version < newest[replica]:
            raise run.error(
                rank,
                position,
                f"weight rule {rule.name!r} reads version {version}, and version {newest[replica]} for one before; "
                "what is behind may have been dropped",
            )
        newest[replica] = version
        again = rule.backward_version(stage, k)
        if rule.backward_rule == "stash" and len(program.kinds) > 1 and again != version:
            raise run.error(
                rank,
                position,
                f"weight rule {rule.name!r} reads version {version} here and version {again} in its backward, which is "
                "to give the gradient at the weights of its forward",
            )

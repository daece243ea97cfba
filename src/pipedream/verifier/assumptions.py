"""What the runtime assumes of each stage replica, besides that nothing comes before what it needs.

- Microbatches are forwarded in their order: the first that does not exist is where a stream ends.
- An update takes all gradients since the one before it, so no other update's may lie between.
- Each sum over replicas has its update after it.
- Version numbers never fall, so that older ones can be dropped; under the backward rule 'stash' a backward reads what
  its forward has read.
"""

from __future__ import annotations

from pipedream.core.schedule.op import Kind, Op, ends_backward
from pipedream.verifier.unrolled import Unrolled


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

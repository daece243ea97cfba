"""Holds the tags of a run to the static table: which weights each gradient was taken at, and which it updated."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import reference
import zoo

from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import GradientVersions


def check_tags(
    tags: Iterable[GradientVersions],
    program: Program,
    drains: Sequence[int],
    batches: Sequence[zoo.Batch],
    begin: int = 0,
    end: int | None = None,
) -> None:
    """Checks that each gradient has one tag, and that it is the table's.

    The table counts microbatches and versions from the last drain, tags their microbatches since the start of training.

    Args:
        tags: those of all ranks.
        program: that ran.
        drains: minibatches that were done at each drain.
        batches: those of an epoch; a microbatch without a sample has no gradient.
        begin, end: range of minibatches; an `end` of None is the last drain.
    """
    m, stop = program.microbatches, drains[-1] if end is None else end
    bases = sorted({begin, *(drain for drain in drains if begin < drain <= stop)})
    tagged = set()
    for tag in tags:
        stage, number = tag.stage, tag.microbatch
        assert (stage, number) not in tagged, f"two tags of {stage, number}"
        tagged.add((stage, number))
        k = number - bases[bisect_right(bases, number // m) - 1] * m
        table = (
            program.weights.forward_version(stage, k),
            program.weights.backward_version(stage, k),
            program.updates.update_of(stage, k) - 1,
        )
        assert (tag.forward_version, tag.backward_version, tag.applied_to) == table, tag
    filled = [[len(x) > 0 for x, _ in reference.pieces(*batch, m)] for batch in batches]
    numbers = {n * m + i for n in range(begin, stop) for i in range(m) if filled[n % len(batches)][i]}
    assert tagged == {(stage, number) for stage in range(program.placement.stages) for number in numbers}

"""What gradients say of themselves, held to the program's table: the weights they were taken at, and their update."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from pipedream.apps.testing.batches import split_batch
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import GradientVersions


def check_tags(
    tags: Iterable[GradientVersions],
    program: Program,
    drains: Sequence[int],
    batches: Sequence[Any],
    begin: int,
    end: int,
) -> None:
    """Checks that each gradient has one tag, and that it is the table's.

    The table counts microbatches and versions from the last drain, tags their microbatches since the start of training.

    Args:
        tags: those of all ranks.
        drains: minibatches that were done at each drain.
        batches: those of an epoch; a microbatch without a sample has no gradient.
        begin, end: range of minibatches.
    """
    m, tagged = program.microbatches, set()
    bases = sorted({begin, *(drain for drain in drains if begin < drain <= end)})
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
    filled = [[samples > 0 for _, samples in split_batch(batch, m)] for batch in batches]
    numbers = {n * m + i for n in range(begin, end) for i in range(m) if filled[n % len(batches)][i]}
    expected = {(stage, number) for stage in range(program.placement.stages) for number in numbers}
    assert tagged == expected, f"tags that are missing, or too many: {sorted(tagged ^ expected)[:9]}"

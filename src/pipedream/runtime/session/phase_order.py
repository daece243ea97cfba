"""The order of a run's phases, of which each has a program: which one follows, and where."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple


class PhaseEnd(NamedTuple):
    """Where a phase ends, counted from the start of training; the last one has no end.

    Attributes:
        phase: for warnings.
        until: minibatches; rounded up to whole rounds of replicas.
        until_epoch: epochs.
    """

    phase: str
    until: int | None
    until_epoch: int | None

    def is_over(self, minibatches: int, epochs: int) -> bool:
        return (self.until is not None and minibatches >= self.until) or (
            self.until_epoch is not None and epochs >= self.until_epoch
        )


def find_phase(ends: Sequence[PhaseEnd], minibatches: int, epochs: int) -> int:
    """Returns the number of the first phase that is not over."""
    return next(number for number, end in enumerate(ends) if not end.is_over(minibatches, epochs))


def find_next_phase(ends: Sequence[PhaseEnd], number: int, minibatches: int, epochs: int) -> int:
    """Returns the number of the phase that follows phase `number` at this point.

    Warns of phases that are skipped because their end, in the other unit, has passed.
    """
    next_number = find_phase(ends, minibatches, epochs)
    for end in ends[number + 1 : next_number]:
        warnings.warn(
            f"phase {end.phase} is skipped, because the one before it has ended at minibatch {minibatches}, after "
            f"{epochs} whole epochs; let it end later",
            stacklevel=2,
        )
    return next_number


def find_data_end(ends: Sequence[PhaseEnd], epoch: int, until: int) -> int:
    """Returns the first epoch between `epoch` and `until` at which one of the phases ends, or `until`.

    The data is reopened there (docs/exact_rules.md, Phases).
    """
    return min((end.until_epoch for end in ends if end.until_epoch and epoch < end.until_epoch < until), default=until)

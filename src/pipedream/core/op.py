"""The words of a schedule, and THE dependency rule.

PyTorch's letters: F forward, B backward, I input gradient, W weight gradient, U update. An op is written
``2F5``: stage 2, forward, microbatch 5. ``2U3`` is the update that makes version 3 of stage 2's weights. ``2H8``
fetches the weights of stage 2 from their home, for the forwards from microbatch 8 on.

The rule of what must be done before an op stands here once; the verifier, lowering, the simulator and the
drawing all ask `requires`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .placement import Placement

__all__ = ["Kind", "Op", "requires"]


class Kind(StrEnum):
    """What an op does."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    UPDATE = "U"
    FETCH = "H"


class Op(NamedTuple):
    """One item of a schedule.

    Attributes:
        kind: what is done.
        stage: at which stage.
        index: number of the microbatch, from 0; of an update, the version that it makes, from 1; of a fetch, the first
            microbatch that it is for.
        replica: which replica of the stage does it.
    """

    kind: Kind
    stage: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.index}"


def requires(op: Op, placement: Placement, splits_backward: bool = False) -> tuple[Op, ...]:
    """Returns the ops whose results an op reads, by the flow of activations and gradients alone.

    What an op needs of the weights (an update made, an update's gradients complete) depends on the weight
    rule and the update rule; `Schedule.requires` adds it.

    Args:
        op: any op; of an update and of a fetch, whose needs are of weights alone, there is nothing to say.
        placement: tells which replica has a microbatch at the neighbouring stages.
        splits_backward: the schedule has I and W instead of B.
    """
    kind, stage, k, replica = op
    gradient = Kind.INPUT_GRADIENT if splits_backward else Kind.BACKWARD
    if kind is Kind.FORWARD:
        return (Op(kind, stage - 1, k, placement.replica(stage - 1, k)),) if stage else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Op(Kind.INPUT_GRADIENT, stage, k, replica),)
    if kind in (Kind.UPDATE, Kind.FETCH):
        return ()
    own = Op(Kind.FORWARD, stage, k, replica)
    if stage == placement.stages - 1:
        return (own,)
    return (own, Op(gradient, stage + 1, k, placement.replica(stage + 1, k)))

"""The words of a schedule, and THE dependency rule.

PyTorch's letters: F forward, B backward, I input gradient, W weight gradient, U update. An op is written
``2F5``: stage 2, forward, microbatch 5. ``2U3`` is the update that makes version 3 of stage 2's weights. ``2H8``
fetches the weights of stage 2 from their home, for the forwards from microbatch 8 on.

The rule of what must be done before an op stands here once; the verifier, lowering, the simulator and the
drawing all ask `requires`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from pipedream.core.plan.placement import Placement

__all__ = ["Kind", "Op", "ends_backward", "gives_back", "requires"]


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


def ends_backward(kinds: Collection[Kind]) -> Kind:
    """Returns the op with which a microbatch's backward at a stage has ended, of those that it needs there."""
    return Kind.WEIGHT_GRADIENT if Kind.WEIGHT_GRADIENT in kinds else Kind.BACKWARD


def gives_back(kinds: Collection[Kind]) -> Kind:
    """Returns the op that makes the gradient which goes back to the stage before."""
    return Kind.INPUT_GRADIENT if Kind.INPUT_GRADIENT in kinds else Kind.BACKWARD


def requires(op: Op, placement: Placement, kinds: Collection[Kind] = ()) -> tuple[Op, ...]:
    """Returns the ops whose results an op reads, by the flow of activations and gradients alone.

    What an op needs of the weights (an update made, an update's gradients complete) depends on the weight
    rule and the update rule; `Schedule.requires` adds it.

    Args:
        op: any op; of an update and of a fetch, whose needs are of weights alone, there is nothing to say.
        placement: tells which replica has a microbatch at the neighbouring stages.
        kinds: of op that a microbatch needs at a stage; with I and W among them in the place of B.
    """
    kind, stage, k, replica = op
    if kind is Kind.FORWARD:
        return (Op(kind, stage - 1, k, placement.replica(stage - 1, k)),) if stage else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Op(Kind.INPUT_GRADIENT, stage, k, replica),)
    if kind in (Kind.UPDATE, Kind.FETCH):
        return ()
    own = Op(Kind.FORWARD, stage, k, replica)
    if stage == placement.stages - 1:
        return (own,)
    return (own, Op(gives_back(kinds), stage + 1, k, placement.replica(stage + 1, k)))

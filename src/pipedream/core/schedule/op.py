"""The ops of a schedule, and what each needs.

PyTorch's letters: F forward, B backward, I input gradient, W weight gradient, U update. ``2F5`` is stage 2, forward,
microbatch 5; ``2U3`` the update that makes version 3 of stage 2's weights.

Dependencies between ops are defined here and in `Rules.requires`, nowhere else.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from pipedream.core.plan.placement import Placement


class Kind(StrEnum):
    """A kind of op."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    UPDATE = "U"


class Op(NamedTuple):
    """One item of a schedule.

    Attributes:
        index: the microbatch, from 0; for an update, the version that it makes, from 1.
        replica: follows from a microbatch (`Placement.replica`); an update is made by every replica.
    """

    kind: Kind
    stage: int
    index: int  # type: ignore[assignment]  # a field, not the method of tuples
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.index}"


def find_last_kind(kinds: Collection[Kind]) -> Kind:
    """Returns the kind of op that completes a microbatch's backward."""
    return Kind.WEIGHT_GRADIENT if Kind.WEIGHT_GRADIENT in kinds else Kind.BACKWARD


def find_gradient_kind(kinds: Collection[Kind]) -> Kind:
    """Returns the kind of op that makes the gradient for the previous stage."""
    return Kind.INPUT_GRADIENT if Kind.INPUT_GRADIENT in kinds else Kind.BACKWARD


def data_requirements(op: Op, placement: Placement, kinds: Collection[Kind] = ()) -> tuple[Op, ...]:
    """Returns the ops whose results a pass reads, except for weights; for these, and for updates, see `Rules.requires`.

    Args:
        kinds: of the schedule; I and W among them replace B.
    """
    kind, stage, k, replica = op
    if kind is Kind.FORWARD:
        return (Op(kind, stage - 1, k, placement.replica(stage - 1, k)),) if stage else ()
    if kind is Kind.WEIGHT_GRADIENT:
        return (Op(Kind.INPUT_GRADIENT, stage, k, replica),)
    if kind not in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
        return ()
    forward = Op(Kind.FORWARD, stage, k, replica)
    if stage == placement.stages - 1:
        return (forward,)
    return (forward, Op(find_gradient_kind(kinds), stage + 1, k, placement.replica(stage + 1, k)))

"""All that a method's file needs.

In the grids of these files, ``F3`` is the forward of microbatch 3, ``B3`` its backward, and ``B3'`` a backward that the
stage's update follows; a dot is an idle slot.
"""

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.depth import raise_to_legal
from pipedream.core.plan.placement import Placement, StageReplica
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.moves import Move
from pipedream.core.schedule.occupancy import MethodProperties
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.rules import UpdateRule
from pipedream.core.schedule.schedule import Claims, Order, Schedule
from pipedream.core.schedule.weights import (
    AVERAGE,
    BACKWARD_RULES,
    DIFFERENCE,
    VELOCITY,
    DoubleBuffer,
    Flush,
    Latest,
    Stash,
    VerticalSync,
    WeightPrediction,
    WeightRule,
)
from pipedream.schedules.kit import idioms
from pipedream.schedules.kit.idioms import *  # noqa: F403
from pipedream.schedules.kit.method import Method, Picture, StageOrder, looped, mirrored, wave

__all__ = [
    "AVERAGE",
    "BACKWARD_RULES",
    "DIFFERENCE",
    "VELOCITY",
    "Claims",
    "DoubleBuffer",
    "Flush",
    "Kind",
    "Latest",
    "Method",
    "MethodProperties",
    "Move",
    "Op",
    "Order",
    "Picture",
    "Placement",
    "Plan",
    "Schedule",
    "ScheduleError",
    "StageOrder",
    "StageReplica",
    "Stash",
    "UpdateRule",
    "VerticalSync",
    "WeightPrediction",
    "WeightRule",
    "looped",
    "mirrored",
    "raise_to_legal",
    "wave",
]

__all__ += idioms.__all__

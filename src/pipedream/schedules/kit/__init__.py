"""All that a method's file needs.

In the grids of these files, ``F3`` is the forward of microbatch 3, ``B3`` its backward, and ``B3'`` a backward that the
stage's update follows; a dot is an idle slot.
"""

from __future__ import annotations

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.depth import raise_to_legal
from pipedream.core.plan.placement import Placement, StageReplica
from pipedream.core.plan.plan import Plan
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
from pipedream.schedules.kit.idioms import (
    SPLIT,
    B,
    F,
    I,
    MicrobatchProgress,
    W,
    all_microbatches,
    backward,
    check_input_replicas,
    choose_microbatches,
    each_minibatch,
    flushing,
    forward,
    input_gradient,
    latest_weights,
    max_in_flight,
    minibatch_by_minibatch,
    one_forward_one_backward,
    one_forward_one_input_gradient,
    one_stage_per_rank,
    refuse_microbatches,
    refuse_update_delay,
    repeated_wave,
    steady_1f1b,
    unflushed,
    update,
    warmup_forwards,
    weight_gradient,
    with_backward_rule,
    with_updates,
)
from pipedream.schedules.kit.method import Method, Picture, StageOrder, looped, mirrored, wave

__all__ = [
    "AVERAGE",
    "BACKWARD_RULES",
    "DIFFERENCE",
    "SPLIT",
    "VELOCITY",
    "B",
    "Claims",
    "DoubleBuffer",
    "F",
    "Flush",
    "I",
    "Kind",
    "Latest",
    "Method",
    "MethodProperties",
    "MicrobatchProgress",
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
    "W",
    "WeightPrediction",
    "WeightRule",
    "all_microbatches",
    "backward",
    "check_input_replicas",
    "choose_microbatches",
    "each_minibatch",
    "flushing",
    "forward",
    "input_gradient",
    "latest_weights",
    "looped",
    "max_in_flight",
    "minibatch_by_minibatch",
    "mirrored",
    "one_forward_one_backward",
    "one_forward_one_input_gradient",
    "one_stage_per_rank",
    "raise_to_legal",
    "refuse_microbatches",
    "refuse_update_delay",
    "repeated_wave",
    "steady_1f1b",
    "unflushed",
    "update",
    "warmup_forwards",
    "wave",
    "weight_gradient",
    "with_backward_rule",
    "with_updates",
]

"""PipeOptim: PipeDream's order, forwards at predicted weights, backwards at those that there are; one set of weights.

Guan et al., 2023 (arXiv 2312.00839), section 3: w - T lr u, u the direction of the optimizer's own step (SGD's
momentum, Adam's and AdamW's corrected m / (sqrt(v) + eps)), T = p - 1 - s updates, which is what the stage is late.

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4
"""

from __future__ import annotations

from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.prediction import VELOCITY, WeightPrediction
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.update import UpdateRule
from pipedream.schedules.idioms import latest, recomputing, refuse_split, unflushed
from pipedream.schedules.method import Method, Picture

__all__ = ["METHODS", "pipeoptim"]


def pipeoptim(
    plan: Plan, microbatches: int | None = None, *, by: str = VELOCITY, backward_rule: str = "graph"
) -> Schedule:
    """Returns PipeOptim.

    Args:
        plan: of any depth.
        microbatches: None or 1.
        by: 'velocity' (SGD with momentum, Adam, AdamW) or 'difference' (any optimizer).
        backward_rule: 'graph', or 'recompute'.

    Raises:
        ScheduleError: a minibatch is to be split.
        ValueError: an option that is none.
    """
    refuse_split("pipeoptim", microbatches)
    plan = recomputing(plan, backward_rule)
    ahead = WeightPrediction(by, tuple(float(latest(plan).staleness(s)) for s in range(len(plan.stages))))
    return Schedule(
        name="pipeoptim",
        plan=plan,
        placement=plan.placement,
        order=unflushed(plan),
        weights=latest(plan, backward_rule=backward_rule, forward_prediction=ahead),
        updates=UpdateRule(plan.replicas, mean_of_rounds=True),
        claims=Claims(
            in_flight=lambda p, m, s: min(p - s, m),
            staleness=lambda p, m, s: p - 1 - s,
            versions=lambda p, m, s: 1,
        ),
    )


METHODS = (
    Method(
        pipeoptim,
        since=2023,
        properties=MethodProperties(flushes=False, splits_minibatch=False, reads_stored_weights=False, uses_depth=True),
        picture=Picture("PipeOptim: forwards at weights predicted from version v", None, 12),
        choose="With Adam or AdamW where pipedream's sets of weights do not fit: the forward is predicted, one set "
        "of weights, and a copy of it during a forward.",
    ),
)

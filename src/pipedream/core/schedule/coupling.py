"""What couples the stages beside the data: norms over all, gradients that are not finite, weights that they share.

A method that flushes clips each update by its own global norm, for all stages make it while nothing is in flight.
Without a flush no moment has one norm: stage 0 ends the backward of a microbatch long after the last stage. *Delayed
global* clipping takes for update n the norm of update max(b, n - D), the newest that every stage can know without
waiting; b is the update before the last drain, where all norms are known. D is static, so that a run can be repeated,
and a serial loop can say what it gives. Update n's own norm is no less than each stage's part of it, which that stage
knows: it clips by the greater of the two. So a first update is clipped too, and a sudden rise at a stage is caught
there at once.

An update with a gradient that is not finite can be skipped: at all stages alike where they hear of each other, that
is under a flush; without one at the stage that finds it. A scale of the loss that changes needs the first.
docs/couplings.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.schedule import Schedule

__all__ = ["Policy", "coupled", "norm_delay"]

_CLIP = ("global", "local", "delayed_global")
_UPPER_LIMITS = {"clip_grad_norm": inf, "ema": 1.0}
"""The numbers of a policy lie between 0 and these."""
_ON_NAN = ("error", "continue", "skip")


@dataclass(frozen=True)
class Policy:
    """What was chosen of a run's couplings; see `Pipeline`.

    Attributes:
        clip_grad_norm, clip, on_nan, ema: as there.
        scaling: of the loss: 'constant' or 'dynamic', a scale that changes; empty where it is not scaled.
        tied: stages hold weights together.

    Raises:
        ScheduleError: an unknown word, or a number that makes no sense.
    """

    clip_grad_norm: float | None = None
    clip: str = "global"
    on_nan: str = "error"
    scaling: str = ""
    tied: bool = False
    ema: float | None = None

    def __post_init__(self) -> None:
        for name, most in _UPPER_LIMITS.items():
            number = getattr(self, name)
            if number is not None and not (isinstance(number, (int, float)) and 0 < number < most):
                raise ScheduleError(f"{name}={number!r} was asked for; give a number between 0 and {most:g}")
        for name, value, known in (("clip", self.clip, _CLIP), ("on_nan", self.on_nan, _ON_NAN)):
            if value not in known:
                raise ScheduleError(f"{name}={value!r} is not known; choose one of {', '.join(known)}")

    @property
    def skips(self) -> bool:
        """Updates with gradients that are not finite are left out."""
        return bool(self.scaling) or self.on_nan == "skip"


def coupled(schedule: Schedule, policy: Policy) -> Schedule:
    """Returns a schedule whose updates wait for each other where the policy takes it.

    Raises:
        ScheduleError: it cannot be kept with this method; says why and what to take instead.
    """
    plan = schedule.plan
    if policy.tied:
        _check_ties(schedule, policy)
    several = len(plan.stages) > 1
    if policy.scaling == "dynamic" and several and not schedule.flushes:
        raise ScheduleError(
            f"a loss scale that changes was asked of {schedule.name!r}, which does not flush: gradients of the old "
            "scale would still be on their way, and its stages skip updates each by itself. Take a constant one "
            "(grad_scaler=1024.0) or a flushing schedule (1f1b, gpipe)"
        )
    by_norm = policy.clip_grad_norm is not None and policy.clip != "local" and several
    if by_norm and policy.clip == "delayed_global" and not schedule.flushes:
        return replace(schedule.coupled(), norm_delay=norm_delay(schedule))
    if by_norm and not schedule.flushes:
        raise ScheduleError(
            f"clip_grad_norm by the global norm was asked of {schedule.name!r}, which does not flush: its stages "
            "update at different times and no moment has one global norm. Take clip='delayed_global' (the "
            "norm of an earlier update), clip='local' (each stage by its own) or a flushing schedule (1f1b, gpipe)"
        )
    couples = by_norm or policy.tied or (policy.skips and schedule.flushes and several)
    return schedule.coupled() if couples else schedule


def _check_ties(schedule: Schedule, policy: Policy) -> None:
    begin = f"the plan parts layers that share parameters, and was asked to train by {schedule.name!r}"
    if not schedule.flushes:
        raise ScheduleError(
            f"{begin}, which does not flush: the stages would update the shared weight at different times, from "
            "gradients of different versions of it. Keep these layers in one stage, or take a flushing schedule (1f1b, "
            "gpipe)"
        )
    if policy.clip_grad_norm is not None and policy.clip == "local":
        raise ScheduleError(
            f"{begin} with each stage clipped by its own norm: the shared weight would be clipped differently at its "
            "holders. Take clip='global'"
        )


def norm_delay(schedule: Schedule) -> int:
    """Returns D, the updates by which the newest norm that every stage can know is older than an update.

    Stage s makes update n behind the forwards of its microbatches, and so behind the same forwards at every stage in
    front of it, and behind their backwards at every stage behind it. What each stage has updated before its own last
    forward for update n is therefore updated everywhere before anybody makes update n. One forward, one backward: D is
    what the input stage holds in flight, in updates.

    Raises:
        ScheduleError: updates of the stages do not hold the same microbatches, or a worker has several stages.
    """
    updates, placement = schedule.updates, schedule.placement
    if len(set(updates.per_update)) > 1:
        raise ScheduleError(
            f"clipping by the delayed global norm was asked of {schedule.name!r}: an update holds "
            f"{', '.join(map(str, updates.per_update))} microbatches at its stages, so they have no common norm. Take "
            "clip='local', the same number of replicas at each stage, or a method with an update a minibatch (2bw)"
        )
    per_update = updates.per_update[0]
    deepest = max(schedule.plan.in_flight) * max(placement.replicas)
    enough = (deepest // schedule.cycle + 3) * schedule.cycle  # the order repeats itself by then
    delay = 1
    for rank in range(placement.workers):
        if len(placement.stage_replicas(rank)) > 1:
            raise ScheduleError(
                f"clipping by the delayed global norm was asked of {schedule.name!r}, which puts several stages on a "
                "worker; take clip='local'"
            )
        ((stage, _),) = placement.stage_replicas(rank)
        step = placement.replicas[stage]
        made = 0
        for op in islice(schedule.order(rank), 4 * enough + 8):
            if op.kind is Kind.UPDATE:
                made = op.index
            elif op.kind is Kind.FORWARD and (op.index + step) // per_update > op.index // per_update:
                delay = max(delay, op.index // per_update + 1 - made)
    return delay

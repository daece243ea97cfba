"""Couplings between stages other than data: global norms, gradients that are not finite, shared weights.

docs/couplings.md has the table. Weights that several stages hold (`Plan.tied_weights`) require that all stages make the
same updates; a holder then waits for the gradients of the others.

Without a flush there is never one global norm. *Delayed global* clipping uses for update n the norm of update
max(b, n - D), the newest that every stage knows without waiting; b is the update before the last drain. D is static, so
that runs can be repeated, and compared with a serial loop.
"""

from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.schedule import Schedule

_CLIP_MODES = ("global", "local", "delayed_global")
_UPPER_LIMITS = {"clip_grad_norm": inf, "ema": 1.0}
"""Upper limits of a policy's numbers; the lower one is 0."""
_NAN_MODES = ("error", "continue", "skip")


@dataclass(frozen=True)
class Policy:
    """The couplings chosen for a run, as in `Pipeline`.

    Attributes:
        scaling: 'constant' or 'dynamic' loss scaling, or ''.
    """

    clip_grad_norm: float | None = None
    clip: str = "global"
    on_nan: str = "error"
    scaling: str = ""
    ema: float | None = None

    def __post_init__(self) -> None:
        for name, limit in _UPPER_LIMITS.items():
            number = getattr(self, name)
            if number is not None and not (isinstance(number, (int, float)) and 0 < number < limit):
                raise ScheduleError(f"{name}={number!r} was asked for; give a number between 0 and {limit:g}")
        for name, value, choices in (("clip", self.clip, _CLIP_MODES), ("on_nan", self.on_nan, _NAN_MODES)):
            if value not in choices:
                raise ScheduleError(f"{name}={value!r} is not known; choose one of {', '.join(choices)}")

    @property
    def skips(self) -> bool:
        return bool(self.scaling) or self.on_nan == "skip"


def couple_stages(schedule: Schedule, policy: Policy) -> Schedule:
    """Returns the schedule, with coupled updates if the policy needs them."""
    plan = schedule.plan
    clips_by_stage = policy.clip_grad_norm is not None and (policy.clip == "local" or not schedule.flushes)
    if plan.tied_weights and clips_by_stage:
        raise ScheduleError(
            f"{_describe_split(schedule)} by {schedule.name!r} with clip={policy.clip!r}: each holder would clip the "
            "shared weight by another norm. Use clip='global' with a flushing method (1f1b, gpipe)"
        )
    several_stages = len(plan.stages) > 1
    if policy.scaling == "dynamic" and several_stages and not schedule.flushes:
        raise ScheduleError(
            f"a dynamic loss scale was asked for with {schedule.name!r}, which does not flush: gradients of the "
            "old scale would still be in flight, and its stages skip updates independently. Use a constant scale "
            "(grad_scaler=1024.0) or a flushing schedule (1f1b, gpipe)"
        )
    clips_by_norm = policy.clip_grad_norm is not None and policy.clip != "local" and several_stages
    if clips_by_norm and policy.clip == "delayed_global" and not schedule.flushes:
        return replace(schedule.couple_updates(), norm_delay=norm_delay(schedule))
    if clips_by_norm and not schedule.flushes:
        raise ScheduleError(
            f"clip_grad_norm by the global norm was asked for with {schedule.name!r}, which does not flush: its "
            "stages update at different times, so there is never one global norm. Use clip='delayed_global' (the "
            "norm of an earlier update), clip='local' (each stage by its own) or a flushing schedule (1f1b, gpipe)"
        )
    # All holders of a tied weight must skip an update together.
    needs_coupling = clips_by_norm or (policy.skips and several_stages and bool(schedule.flushes or plan.tied_weights))
    return schedule.couple_updates() if needs_coupling else schedule


def makes_same_updates(schedule: Schedule) -> bool:
    """Returns whether all stages make the same updates, so that several may hold a weight.

    Update n of each stage holds the same microbatches, and the gradient of each of these is that of the whole model at
    one version.
    """
    stages, weights = range(len(schedule.plan.stages)), schedule.weights
    if len(stages) == 1:
        return True
    if weights.backward_rule != "stash" or any(weights.predictions(stage) for stage in stages):
        return False
    return len(set(schedule.updates.per_update)) == 1 and all(
        len({weights.forward_version(stage, k) for stage in stages}) == 1 for k in range(_find_steady(schedule))
    )


def with_tied_weights(schedule: Schedule) -> Schedule:
    """Returns the schedule, with the updates of each rank together if stages of its plan share weights.

    Raises:
        ScheduleError: its stages do not all make the same updates.
    """
    tied = schedule.plan.tied_weights
    if not tied or not schedule.trains:
        return schedule
    if not makes_same_updates(schedule):
        raise ScheduleError(
            f"{_describe_split(schedule)} by {schedule.name!r}, whose stages update at different times, from gradients "
            "of different versions. Keep these layers in one stage, untie the weight (a parameter of its own for each "
            "layer), or use a method whose stages all make the same updates: pipedream_2bw, or a flushing one (1f1b, "
            "gpipe)"
        )
    return schedule.join_updates()


def _describe_split(schedule: Schedule) -> str:
    shared = "; ".join(map(str, schedule.plan.tied_weights))
    return f"the plan separates layers that share {shared}, and was asked to train"


def _find_steady(schedule: Schedule) -> int:
    """Returns a microbatch from which on versions repeat cycle by cycle."""
    max_in_flight = max(schedule.plan.in_flight) * max(schedule.placement.replicas)
    return (max_in_flight // schedule.cycle + 3) * schedule.cycle


def norm_delay(schedule: Schedule) -> int:
    """Returns D: the newest norm that every stage can know at update n is that of update n - D.

    Stage s makes update n after the forwards of its microbatches at every earlier stage, and after their backwards at
    every later stage. So an update that each stage makes before its own last forward for update n is made
    everywhere before any stage makes update n.
    """
    updates, placement = schedule.updates, schedule.placement
    if len(set(updates.per_update)) > 1:
        raise ScheduleError(
            f"clipping by the delayed global norm was asked for with {schedule.name!r}: an update holds "
            f"{', '.join(map(str, updates.per_update))} microbatches at its stages, so they have no common norm. Use "
            "clip='local', the same number of replicas at each stage, or a method with one update per minibatch (2bw)"
        )
    per_update = updates.per_update[0]
    steady = _find_steady(schedule)
    delay = 1
    for rank in range(placement.workers):
        if len(placement.stage_replicas(rank)) > 1:
            raise ScheduleError(
                f"clipping by the delayed global norm was asked for with {schedule.name!r}, which puts several stages "
                "on a worker; use clip='local'"
            )
        ((stage, _),) = placement.stage_replicas(rank)
        replicas = placement.replicas[stage]
        newest_update = 0
        for op in islice(schedule.order(rank), 4 * steady + 8):
            if op.kind is Kind.UPDATE:
                newest_update = op.index
            elif op.kind is Kind.FORWARD and (op.index + replicas) // per_update > op.index // per_update:
                delay = max(delay, op.index // per_update + 1 - newest_update)
    return delay

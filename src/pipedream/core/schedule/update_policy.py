"""Couplings between stages other than data: global norms, gradients that are not finite, shared weights.

docs/couplings.md has the table. Weights that several stages hold (`Plan.tied_weights`) require that all stages make the
same updates (`Schedule.makes_same_updates`); a holder then waits for the gradients of the others.

Without a flush there is never one global norm. *Delayed global* clipping uses for update n the norm of update
max(b, n - D), the newest that every stage knows without waiting; b is the update before the last drain. D is static, so
that runs can be repeated, and compared with a serial loop.
"""

from dataclasses import dataclass, replace
from math import inf

from pipedream.core.errors import ScheduleError
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

    @property
    def needs_norms(self) -> bool:
        """Whether each update needs the norm of its gradients."""
        return self.skips or self.clip_grad_norm is not None

    def couple(self, schedule: Schedule) -> Schedule:
        """Returns the schedule, with coupled updates if the policy needs them.

        Raises:
            ScheduleError: the method's stages cannot decide together, as the policy asks.
        """
        plan = schedule.plan
        clips_by_stage = self.clip_grad_norm is not None and (self.clip == "local" or not schedule.flushes)
        if plan.tied_weights and clips_by_stage:
            raise ScheduleError(
                f"{schedule.describe_split()} by {schedule.name!r} with clip={self.clip!r}: each holder would clip the "
                "shared weight by another norm. Use clip='global' with a flushing method (1f1b, gpipe)"
            )
        several_stages = len(plan.stages) > 1
        if self.scaling == "dynamic" and several_stages and not schedule.flushes:
            raise ScheduleError(
                f"a dynamic loss scale was asked for with {schedule.name!r}, which does not flush: gradients of the "
                "old scale would still be in flight, and its stages skip updates independently. Use a constant scale "
                "(grad_scaler=1024.0) or a flushing schedule (1f1b, gpipe)"
            )
        clips_by_norm = self.clip_grad_norm is not None and self.clip != "local" and several_stages
        if clips_by_norm and self.clip == "delayed_global" and not schedule.flushes:
            return replace(schedule.couple_updates(), norm_delay=schedule.find_norm_delay())
        if clips_by_norm and not schedule.flushes:
            raise ScheduleError(
                f"clip_grad_norm by the global norm was asked for with {schedule.name!r}, which does not flush: its "
                "stages update at different times, so there is never one global norm. Use clip='delayed_global' (the "
                "norm of an earlier update), clip='local' (each stage by its own) or a flushing schedule (1f1b, gpipe)"
            )
        # All holders of a tied weight must skip an update together.
        needs_coupling = clips_by_norm or (
            self.skips and several_stages and bool(schedule.flushes or plan.tied_weights)
        )
        return schedule.couple_updates() if needs_coupling else schedule

"""From a name to a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.artifact import Artifact
from ..core.compensation import Compensation
from ..core.errors import ScheduleError
from ..core.plan import Plan
from ..core.schedule import Schedule
from .breadth_first import breadth_first
from .chimera import chimera
from .chimera_doubled import chimera_doubled
from .compensated import ftpipe_ga, ftpipe_msnag, nesterov_async, one_step_ef, pb_lwp_sc, pipedream_lr
from .dualpipev import dualpipev
from .gpipe import gpipe
from .interleaved import interleaved_1f1b
from .layouts import Layout, dispatched, looped, mirrored, wave
from .naive import naive
from .one_f_one_b import one_f_one_b
from .paci import paci
from .pb_lwp import pb_lwp
from .pipedream import pipedream, pipedream_vertical_sync
from .pipelined_backprop import pipelined_backprop
from .pipemare import pipemare
from .pipeoptim import pipeoptim
from .roundpipe import roundpipe
from .spectrain import spectrain, spectrain_v2
from .timeprest import v_timeprest
from .torch_csv import is_torch_csv, load_torch_csv
from .two_bw import pipedream_2bw
from .xpipe import xpipe
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zbv import zbv

__all__ = ["ALIASES", "COMPENSATED", "LAYOUTS", "SCHEDULES", "Choice", "build", "claims_at", "layout_of", "uniform"]

SCHEDULES: dict[str, Callable[[Plan, int | None], Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_1f1b": interleaved_1f1b,
    "breadth_first": breadth_first,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "chimera": chimera,
    "chimera_doubled": chimera_doubled,
    "roundpipe": roundpipe,
    "pipedream": pipedream,
    "pipedream_vertical_sync": pipedream_vertical_sync,
    "pipedream_2bw": pipedream_2bw,
    "pipelined_backprop": pipelined_backprop,
    "pb_lwp": pb_lwp,
    "pipemare": pipemare,
    "spectrain": spectrain,
    "spectrain_v2": spectrain_v2,
    "pipeoptim": pipeoptim,
    "xpipe": xpipe,
    "paci": paci,
    "v_timeprest": v_timeprest,
}
"""The methods, each by its name."""

LAYOUTS: dict[str, Layout] = {
    "interleaved_1f1b": looped,
    "breadth_first": looped,
    "zbv": wave,
    "dualpipev": wave,
    "chimera": mirrored,
    "chimera_doubled": mirrored,
    "roundpipe": dispatched,
}
"""Of those whose workers have several stages: where each goes. Any other takes a plan of one stage a worker."""

COMPENSATED: dict[str, Callable[[Plan, int | None], Schedule]] = {
    "nesterov_async": nesterov_async,
    "ftpipe_msnag": ftpipe_msnag,
    "ftpipe_ga": ftpipe_ga,
    "pipedream_lr": pipedream_lr,
    "one_step_ef": one_step_ef,
    "pb_lwp_sc": pb_lwp_sc,
}
"""Methods that are one of those above with a compensation of delay: in time and memory they are that one."""

ALIASES = {
    "pipedream_flush": "1f1b",
    "2bw": "pipedream_2bw",
    "vertical_sync": "pipedream_vertical_sync",
    "interleaved": "interleaved_1f1b",
    "looped_bfs": "breadth_first",
    "zb1p": "zb_h1",
    "zb2p": "zb_h2",
    "chimera_forward_doubling": "chimera_doubled",
    "chimera_backward_halving": "chimera_doubled",
    "pb": "pipelined_backprop",
}
"""Other names that papers use."""

_USUAL_WORKERS = 4


def build(name: str, plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns a method's schedule for a plan.

    Args:
        name: of the method; case and the difference of ``-`` and ``_`` do not matter. Or the path of a file in
            PyTorch's notation, which ends in ``.csv`` (`torch_csv`).
        plan: stages, replicas, depth.
        microbatches: m, how many a minibatch is split into; None takes the method's own choice.

    Raises:
        ScheduleError: no such method, or it cannot work with this plan or number.
    """
    if microbatches is not None and microbatches < 1:
        raise ScheduleError(f"a minibatch is split into at least 1 microbatch, found {microbatches}")
    if is_torch_csv(name):
        read = load_torch_csv(name, plan)
        if microbatches not in (None, read.microbatches):
            raise ScheduleError(
                f"schedule {name!r} with {microbatches} microbatches a minibatch: the file has {read.microbatches}; "
                "leave the number out, or write the file for as many"
            )
        return read
    return (SCHEDULES | COMPENSATED)[_key(name)](plan, microbatches)


def uniform(
    name: str,
    workers: int | None,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    transfer_s: float = 0.0,
    *,
    chunks: int | None = None,
) -> Plan:
    """Returns a plan of equal stages that a method can work with, for studies and pictures (`Plan.uniform`).

    Args:
        name: of a method, or of a file in PyTorch's notation.
        workers: None takes those of the file; 4 for a method.
        forward_s, backward_s: of one microbatch at one stage.
        chunks: stages of each worker, where the method has several and leaves the choice; its usual number unless said;
            a file says that itself.

    Raises:
        ScheduleError: no such method, or a file for another number of workers.
    """
    if is_torch_csv(name):
        read = load_torch_csv(name).plan
        if workers not in (None, read.workers):
            raise ScheduleError(f"schedule {name!r} is for {read.workers} workers, and {workers} were asked for")
        return Plan.uniform(len(read.stages), forward_s, backward_s, transfer_s, order=read.order)
    workers, layout = workers or _USUAL_WORKERS, layout_of(name)
    if layout is None:
        return Plan.uniform(workers, forward_s, backward_s, transfer_s)
    order, stages = layout.order(workers, chunks or layout.chunks or 1), layout.stages(workers, chunks)
    replicas = (layout.replicas,) * stages
    return Plan.uniform(stages, forward_s, backward_s, transfer_s, replicas=replicas, order=order)


def layout_of(name: str) -> Layout | None:
    """Returns how a method lays out its stages where workers have several; None where each has one.

    Raises:
        ScheduleError: no such method.
    """
    if is_torch_csv(name):
        return None  # the file names the workers itself
    return LAYOUTS.get(_key(name))


def _key(name: str) -> str:
    """Returns the name of a method in the registry. Raises ScheduleError: there is none."""
    key = name.lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key not in SCHEDULES and key not in COMPENSATED:
        known = ", ".join(sorted([*SCHEDULES, *COMPENSATED]))
        raise ScheduleError(f"schedule {name!r} is not known; choose one of {known}")
    return key


@dataclass(frozen=True)
class Choice(Artifact):
    """A Schedule as a file: the method's name, the plan, the split, the compensation; `build` makes the rest again."""

    FORMAT = 1

    name: str
    plan: Plan
    microbatches: int
    compensation: tuple[Compensation, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule) -> Choice:
        """Returns what is needed to build a schedule again."""
        return cls(schedule.name, schedule.plan, schedule.microbatches, schedule.updates.compensation)

    def build(self) -> Schedule:
        """Returns the schedule."""
        return build(self.name, self.plan, self.microbatches).compensated(self.compensation)


def claims_at(schedule: Schedule, stages: int, microbatches: int) -> dict[str, object]:
    """Returns what a method's paper promises for p workers and m microbatches, as JSON values."""
    claims = schedule.claims
    lists = {
        name: None if form is None else [form(stages, microbatches, s) for s in range(stages)]
        for name, form in (
            ("in_flight", claims.in_flight),
            ("staleness", claims.staleness),
            ("versions", claims.versions),
        )
    }
    holds = microbatches >= claims.least(stages)
    bubble = claims.bubble(stages, microbatches) if claims.bubble is not None and holds else None
    return {"flushes": schedule.flushes, "assumption": claims.assumption, "bubble": bubble, **lists}

"""From a name to a schedule: the methods that the files of this folder declare, and those of files of the user's.

And how long it runs where it is drawn or simulated, in how many microbatches a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.method_text import name_and_options
from pipedream.core.schedule.schedule import Schedule
from pipedream.schedules.idioms import admitted
from pipedream.schedules.layouts import Layout
from pipedream.schedules.method import Method
from pipedream.schedules.options import options_text, read_options
from pipedream.schedules.pytorch_csv import is_torch_csv, load_torch_csv
from pipedream.schedules.user_file import built_by, is_method_file, load_method

__all__ = [
    "ALIASES",
    "COMPENSATED",
    "LAYOUTS",
    "METHODS",
    "SCHEDULES",
    "Run",
    "build",
    "canonical",
    "check_chunks",
    "claims_at",
    "layout_of",
    "method_of",
    "run_of",
    "smallest",
    "uniform",
]


_FOLDERS = ("pipedream.schedules.synchronous", "pipedream.schedules.asynchronous", "pipedream.experimental")


def _declared() -> dict[str, Method]:
    """Returns what the files of this folder declare, by name; older papers first."""
    folders = [import_module(name) for name in _FOLDERS]
    files = (found.name for folder in folders for found in iter_modules(folder.__path__, f"{folder.__name__}."))
    methods = [method for file in files for method in getattr(import_module(file), "METHODS", ())]
    return {method.name: method for method in sorted(methods, key=lambda method: (method.since, method.name))}


METHODS = _declared()
"""The methods, each by its name."""

Build = Callable[[Plan, int | None], Schedule]

SCHEDULES: dict[str, Build] = {name: method.build for name, method in METHODS.items() if not method.compensates}
"""Those with an order of their own."""

COMPENSATED: dict[str, Build] = {name: method.build for name, method in METHODS.items() if method.compensates}
"""Those that are one of the others with a compensation of delay."""

LAYOUTS = {name: method.layout for name, method in METHODS.items() if method.layout is not None}
"""Of those whose workers have several stages: where each goes."""

ALIASES = {alias: name for name, method in METHODS.items() for alias in method.aliases}
"""Other names that papers use."""

_USUAL_WORKERS = 4


def build(name: str, plan: Plan, microbatches: int | None = None) -> Schedule:
    """Returns a method's schedule for a plan.

    Args:
        name: of the method; case and the difference of ``-`` and ``_`` do not matter. Or the path of a file: in
            PyTorch's notation, which ends in ``.csv`` (`torch_csv`), or of Python with a method in it (`method_file`).
            Options of the method stand behind it (`options`): ``pb_lwp[by=difference,scale=2]``.
        plan: stages, replicas, depth.
        microbatches: m, how many a minibatch is split into; None takes the method's own choice.

    Raises:
        ScheduleError: no such method or option, or it cannot work with this plan or number.

    The schedule's name is `canonical`, by which it can be built again.
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
    bare, method, options = _asked(name)
    full = bare + options_text(options)
    if is_method_file(bare):
        return replace(built_by(method, full, plan, microbatches, options), name=full)
    make: Callable[..., Schedule] = method.build
    try:
        built = make(plan, microbatches, **options)
    except ScheduleError as error:
        if not options:
            raise
        # It has not got its whole name yet, and what is advised shall keep the options.
        told = str(error).replace(f"{bare}[", f"{full[:-1]},").replace(repr(bare), repr(full))
        raise ScheduleError(told) from None
    except ValueError as error:  # of a noun that it is made of: a view, a rule
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    return replace(built, name=full) if options else built


def canonical(name: str) -> str:
    """Returns the one name of what a name asks for: the method's own, not an alias, with the options that differ from
    what it takes anyway, in its own order.

    Raises:
        ScheduleError: no such method, or no such option of it.
    """
    if is_torch_csv(name):
        return name
    bare, _, options = _asked(name)
    return bare + options_text(options)


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
        name: of a method, or of a file.
        workers: None takes those of the file; 4 for a method.
        forward_s, backward_s: of one microbatch at one stage.
        chunks: stages of each worker, where the method has several and leaves the choice; its usual number unless said.

    Raises:
        ScheduleError: no such method, a file for another number of workers, or `chunks` where there is no choice.
    """
    check_chunks(name, chunks)
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


def smallest(name: str) -> Schedule:
    """Returns a method's schedule on as few equal stages as it works with: for what it says of itself on any.

    Raises:
        ScheduleError: no such method, or it does not work on equal stages of 1 to 8 workers.
    """
    if is_torch_csv(name):
        return build(name, uniform(name, None))
    for workers in range(1, 8):
        with suppress(ScheduleError):
            return build(name, uniform(name, workers))
    return build(name, uniform(name, 8))


def check_chunks(name: str, chunks: int | None) -> None:
    """Checks that a method leaves the choice how many stages a worker has, if a number is asked for.

    Raises:
        ScheduleError: it does not, or there is no such method.
    """
    layout = layout_of(name)
    if chunks is None or (layout is not None and layout.chunks is not None):
        return
    if chunks == 1 and layout is None and not is_torch_csv(name):
        return
    found = "its workers have one stage each" if layout is None else f"it lays out {layout.words}"
    found = "the file says the stages of each worker itself" if is_torch_csv(name) else found
    raise ScheduleError(f"{chunks} chunks a worker were asked of schedule {name!r}: {found}; leave the number out")


def layout_of(name: str) -> Layout | None:
    """Returns how a method lays out its stages where workers have several; None where each has one.

    Raises:
        ScheduleError: no such method.
    """
    if is_torch_csv(name):
        return None  # the file names the workers itself
    return method_of(name).layout


def method_of(name: str) -> Method:
    """Returns the method of a name, or of a file of Python, whatever options stand behind it.

    Raises:
        ScheduleError: there is none.
    """
    bare, given = name_and_options(name)
    if given and is_torch_csv(bare):
        raise ScheduleError(f"schedule {name!r}: a file in PyTorch's notation has no options; leave the brackets out")
    if is_method_file(bare):
        return load_method(bare)
    key = bare.lower().replace("-", "_")
    found = METHODS.get(ALIASES.get(key, key))
    if found is None:
        raise ScheduleError(
            f"schedule {name!r} is not known; choose one of {', '.join(sorted(METHODS))}, or give a file: FILE.csv in "
            "PyTorch's notation, or FILE.py that declares METHODS"
        )
    return found


def _asked(name: str) -> tuple[str, Method, dict[str, Any]]:
    """Returns the method's own name, or the file's, the method, and the options that are said."""
    method, (bare, given) = method_of(name), name_and_options(name)
    return bare if is_method_file(bare) else method.name, method, read_options(name, method, given)


def claims_at(schedule: Schedule, stages: int, run: int) -> dict[str, object]:
    """Returns what a method's paper promises for p workers, as JSON values.

    Args:
        schedule: of the method, for its m.
        stages: p.
        run: microbatches of a run without a flush; where the schedule flushes, the claims are for a minibatch.
    """
    claims, m = schedule.claims, schedule.microbatches
    counted = m if schedule.flushes else run
    lists = {
        name: None if form is None else [form(stages, counted, s) for s in range(stages)]
        for name, form in (
            ("in_flight", claims.in_flight),
            ("staleness", claims.staleness),
            ("versions", claims.versions),
        )
    }
    holds = m >= claims.least(stages)
    bubble = claims.bubble(stages, m) if claims.bubble is not None and holds else None
    return {
        "flushes": schedule.flushes,
        "microbatches": m,
        "assumption": claims.assumption,
        "bubble": bubble,
        **lists,
    }


@dataclass(frozen=True)
class Run:
    """A schedule, and how long it runs from an empty pipeline to an empty one.

    Attributes:
        schedule: built for its m.
        minibatches: of the run.
    """

    schedule: Schedule
    minibatches: int

    @property
    def microbatches(self) -> int:
        """Microbatches of the whole run."""
        return self.minibatches * self.schedule.microbatches

    def __str__(self) -> str:
        count, m = self.minibatches, self.schedule.microbatches
        words = f"a run of {count} minibatch{'es' if count > 1 else ''}"
        return words if _is_whole(self.schedule) else f"{words} of m = {m} microbatch{'es' if m > 1 else ''}"


def run_of(
    schedule: str | Schedule,
    plan: Plan,
    microbatches: int | None = None,
    minibatches: int | None = None,
    *,
    split: int | None = None,
    usual: int = 16,
) -> Run:
    """Returns a method's schedule for a plan, and the length of its run.

    Args:
        schedule: a method's name, a file (`build`), or a schedule that is built already.
        plan: to build it for.
        microbatches: m, parts of a minibatch, where the method splits one; minibatches of the run where it does not.
        minibatches: of the run; unless said one where the method flushes, else at least two, as many as show the steady
            state, and `usual` microbatches at least.
        split: m unless `microbatches` is said.
        usual: m unless said, where the method flushes and takes so many; its own number if not. And see `minibatches`.

    Raises:
        ScheduleError: the method does not work with the plan or with m, or two lengths are said.
    """
    built = _built(schedule, plan, microbatches, split, usual) if isinstance(schedule, str) else schedule
    if _is_whole(built):
        if microbatches is not None and minibatches is not None:
            raise ScheduleError(
                f"schedule {built.name!r} does not split a minibatch, so that {microbatches} microbatches and "
                f"{minibatches} minibatches are two lengths of one run; give one of them"
            )
        length = microbatches or minibatches
    else:
        if microbatches not in (None, built.microbatches):
            raise ScheduleError(
                f"schedule {built.name!r} with {microbatches} microbatches a minibatch: it is built for "
                f"{built.microbatches}; leave the number out, and say how many minibatches the run has"
            )
        length = minibatches
    if length is not None and length < 1:
        raise ScheduleError(f"a run has at least 1 minibatch, found {length}")
    return Run(built, length or _usual(built, usual))


def _built(name: str, plan: Plan, microbatches: int | None, split: int | None, usual: int) -> Schedule:
    """Returns a schedule by name: built for m where the method splits a minibatch."""
    if is_torch_csv(name):
        return build(name, plan, microbatches or split)
    if microbatches is not None:
        try:
            return build(name, plan, microbatches)
        except ScheduleError:
            if not _is_whole(own := build(name, plan)):
                raise
            return own
    own = build(name, plan, split)
    if split is None and own.flushes:
        with suppress(ScheduleError):  # it does not work with this number
            return build(name, plan, usual)
    return own


def _is_whole(schedule: Schedule) -> bool:
    """Whether it updates after every minibatch, or round of them: its microbatches are whole minibatches."""
    return schedule.updates.mean_of_rounds


def _usual(schedule: Schedule, usual: int) -> int:
    if schedule.flushes:
        return 1
    m, held = schedule.microbatches, admitted(schedule.plan)
    return max(-(-usual // m), -(-held // m) + 1)

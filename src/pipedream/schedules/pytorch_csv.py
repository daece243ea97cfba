"""PyTorch's own notation of schedules, a CSV file, read and written.

``torch.distributed.pipelining`` writes a schedule so, and runs one that was written so (`torch_actions` has the words):

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1

A file is one flushed minibatch, once. Read, it is a `Schedule` that does the same minibatch again and again, with an
update of each stage behind its last backward; which stages a rank runs and the number of microbatches are read off it.
What it says of messages is checked and then left to our own lowering; an empty cell, which stands for a wait, to the
clock; that it neither deadlocks nor runs a pass before what it needs, to the proof (`verify`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from pipedream.core.errors import ScheduleError
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.op import Kind, Op
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.schedule import Claims, Schedule
from pipedream.core.schedule.weights import Flush
from pipedream.schedules.idioms import SPLIT, B, F, flushing
from pipedream.schedules.pytorch_actions import Action, check_messages, check_sums, read_rows

__all__ = ["from_torch_csv", "is_torch_csv", "load_torch_csv", "to_torch_csv"]

_KINDS = {
    "F": (Kind.FORWARD,),
    "B": (Kind.BACKWARD,),
    "I": (Kind.INPUT_GRADIENT,),
    "W": (Kind.WEIGHT_GRADIENT,),
}
_HALVES = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class _Repeated:
    """The order that does the same minibatch again and again; equal where the minibatch is.

    Attributes:
        rows: of each rank, the ops of the first minibatch, updates included.
        microbatches: m.
    """

    rows: tuple[tuple[Op, ...], ...]
    microbatches: int

    def __call__(self, rank: int) -> Iterator[Op]:
        for number in count():
            for op in self.rows[rank]:
                by = number if op.kind is Kind.UPDATE else number * self.microbatches
                yield op._replace(index=op.index + by)


def is_torch_csv(name: str) -> bool:
    """Tells whether what was given in place of a method's name is such a file's."""
    return name.lower().endswith(".csv")


def load_torch_csv(path: str | Path, plan: Plan | None = None) -> Schedule:
    """Reads a file; the schedule bears its name. See `from_torch_csv`.

    Raises:
        ScheduleError: it cannot be read, or what it says cannot be run.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"the schedule {path} cannot be read ({error}); give a CSV file of PyTorch's") from None
    return from_torch_csv(text, name=str(path), plan=plan)


def from_torch_csv(text: str, *, name: str = "torch_csv", plan: Plan | None = None) -> Schedule:
    """Reads a schedule in PyTorch's notation, of passes alone or lowered.

    Where any backward is split into I and W, all are: a B is an I with its W right behind it, which is what it does.
    The two of an OVERLAP_F_B come one after the other, in its order. Messages must be consistent; UNSHARD and RESHARD
    are passed over, a REDUCE_GRAD is the sum that an update begins with.

    Args:
        text: of the file.
        name: of the schedule, with which errors begin.
        plan: its stages, on the same ranks; None: equal stages (`Plan.uniform`).

    Raises:
        ScheduleError: names row, column, cell, and what was expected.
    """
    try:
        rows = read_rows(text)
        ranks = _ranks(rows)
        m = _check_passes(rows, len(ranks))
        check_sums(rows, ranks)
        check_messages(rows, ranks)
        plan = _plan(ranks, plan)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name!r}: {error}") from None
    splits = any(action.word == "I" for row in rows for action in row)
    order = _Repeated(tuple(tuple(_ops(row, splits)) for row in rows), m)
    found = flushing(name, plan, m, order, Claims(), kinds=SPLIT if splits else (F, B))
    return replace(found, claims=Claims(assumption="none: it was read from a file"))


def to_torch_csv(schedule: Schedule | Program) -> str:
    """Writes one minibatch of a flushing schedule in PyTorch's notation, passes alone: PyTorch adds the messages.

    A column is a step in which each rank does one pass, or waits, so that every pass stands behind what it needs.

    Raises:
        ScheduleError: it has what the notation has no word for (updates without a flush, replicas), or stands still.
    """
    name = repr(schedule.name)
    if not schedule.flushes or not isinstance(schedule.weights, Flush):
        raise ScheduleError(
            f"schedule {name} updates without a flush, and PyTorch's notation knows neither updates nor versions of "
            "weights: a file is one minibatch from an empty pipeline to an empty one; write a method that flushes"
        )
    replicas = schedule.placement.replicas
    if max(replicas) > 1:
        raise ScheduleError(
            f"schedule {name} has {'-'.join(map(str, replicas))} replicas of its stages, and PyTorch's notation one "
            "rank for each stage: it puts data parallelism around the whole pipeline; write a straight plan"
        )
    placement = schedule.placement
    for stage in filter(placement.is_remote, range(placement.stages)):
        raise ScheduleError(
            f"schedule {name} has the forwards of stage {stage} on rank {placement.forward_rank(stage, 0)} and its "
            f"backwards on rank {placement.rank_of(stage, 0)}, and PyTorch's notation one rank for each stage; write a "
            "method whose stages stay where they are"
        )
    m = schedule.microbatches
    rows = [list(_passes(schedule, rank, m)) for rank in range(schedule.placement.workers)]
    steps = _steps(schedule, rows, m, name)
    lines = []
    for row in rows:
        cells = [""] * (1 + max(steps[op] for op in row))
        for op in row:
            cells[steps[op]] = str(op)
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


# -- reading --------------------------------------------------------------------------------------------


def _ranks(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Returns the rank of each stage, by the passes that are run there."""
    owner: dict[int, Action] = {}
    for action in (action for row in rows for action in row if action.computes):
        first = owner.setdefault(action.stage, action)
        if first.rank != action.rank:
            raise ScheduleError(
                f"{action.where} runs stage {action.stage}, which rank {first.rank} runs too ({first} in its column "
                f"{first.column}); a stage lives on one rank"
            )
    for stage in range(max(owner)):
        if stage not in owner:
            raise ScheduleError(f"no row runs stage {stage}, but there is a stage {max(owner)}; none may be left out")
    return tuple(owner[stage].rank for stage in range(len(owner)))


def _check_passes(rows: Sequence[Sequence[Action]], stages: int) -> int:
    """Checks that each pass of each microbatch stands once at each stage; returns the number of microbatches."""
    found: dict[tuple[int, str, int], Action] = {}
    for action in (action for row in rows for action in row if action.computes):
        again = found.setdefault(action[:3], action)
        if again is not action:
            raise ScheduleError(f"{action.where} stands in column {again.column} too; each pass is done once")
    m = 1 + max(microbatch for _, _, microbatch in found)
    for stage in range(stages):
        rank = next(action.rank for key, action in found.items() if key[0] == stage)
        for k in range(m):
            words = "".join(word for word in "FBIW" if (stage, word, k) in found)
            if words in ("FB", "FIW"):
                continue
            if "B" in words and ("I" in words or "W" in words):
                raise ScheduleError(
                    f"row {rank + 1} (rank {rank}) has {stage}B{k} and a half of it; give B, or I and W"
                )
            lacking = next(w for w in ("F", "W" if "I" in words else "I" if "W" in words else "B") if w not in words)
            known = next((action for action in found.values() if action.microbatch == k), None)
            named = f"{known.where} names microbatch {k}" if known else f"the last microbatch is {m - 1}"
            raise ScheduleError(
                f"row {rank + 1} (rank {rank}) lacks {stage}{lacking}{k}: {named}, and each stage runs F and B, or F, "
                "I and W, of each"
            )
    return m


def _plan(ranks: tuple[int, ...], plan: Plan | None) -> Plan:
    """Returns the plan, which must have these ranks; one of equal stages where there is none."""
    if plan is None:
        straight = ranks == tuple(range(len(ranks)))
        return Plan.uniform(len(ranks), order=() if straight else ranks)
    wanted = tuple((rank,) for rank in ranks)
    if plan.placement.ranks != wanted:
        raise ScheduleError(
            f"it has {len(ranks)} stages on ranks {', '.join(map(str, ranks))}, the plan {plan.config} on "
            f"{_listed(plan.placement)}; give a plan with these stages and this order of workers"
        )
    return plan


def _listed(placement: Placement) -> str:
    return ", ".join("+".join(map(str, row)) for row in placement.ranks)


def _ops(row: Sequence[Action], splits: bool) -> Iterator[Op]:
    """Yields the passes of a row, and each stage's update behind its last."""
    last = {action.stage: action for action in row if action.computes}
    for action in row:
        if not action.computes:
            continue
        kinds = _HALVES if splits and action.word == "B" else _KINDS[action.word]
        yield from (Op(kind, action.stage, action.microbatch) for kind in kinds)
        if last[action.stage] is action:
            yield Op(Kind.UPDATE, action.stage, 1)


# -- writing --------------------------------------------------------------------------------------------


def _passes(schedule: Schedule | Program, rank: int, total: int) -> Iterator[Op]:
    items = schedule.ops(rank, total) if isinstance(schedule, Schedule) else schedule.instructions(rank, total)
    return (op for op in items if isinstance(op, Op) and op.kind is not Kind.UPDATE)


def _steps(schedule: Schedule | Program, rows: Sequence[Sequence[Op]], total: int, name: str) -> dict[Op, int]:
    """Returns the step of each pass: behind all that it needs, and behind the pass before it on its rank."""
    steps: dict[Op, int] = {}
    at = [0] * len(rows)
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                op = row[at[rank]]
                needs = [need for need in schedule.requires(op, total) if need.kind is not Kind.UPDATE]
                if any(need not in steps for need in needs):
                    break
                before = row[at[rank] - 1 : at[rank]]
                steps[op] = 1 + max((steps[need] for need in (*needs, *before)), default=-1)
                at[rank] += 1
                moving = True
    stuck = [f"rank {rank} at {row[at[rank]]}" for rank, row in enumerate(rows) if at[rank] < len(row)]
    if stuck:
        raise ScheduleError(f"schedule {name} stands still: {', '.join(stuck)} need what comes behind them")
    return steps

"""Text for the terminal: tables, and timelines with one row for each rank and one column for each slot of time.

    time   | 0 s             4 s             8 s
    rank 0 | F0  F1  .   .   B0  ==' F2  B1  ==' .   B2  =='
    rank 1 | .   F0  B0  ==' F1  B1  ==' F2  B2  =='

A letter and a number are an op and its microbatch, ``==`` continues the op before it, ``.`` is waiting, and ``'`` after
an op is an update shorter than a column. The docstrings of the schedules use the same notation.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from math import ceil
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from pipedream.apps.report.style import TERMINAL, colour_class, time_unit
from pipedream.core.plan.memory import ELSEWHERE
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.core.tabular import align
from pipedream.core.units import format_bytes, format_number

_TICK_SLOTS = 4
_NOTHING = 1e-9
"""Fractions of a slot that count as rounding errors."""


def grid(timeline: Timeline, *, slot_s: float | None = None, width: int | None = None) -> str:
    """Returns the picture of a timeline.

    Args:
        slot_s: seconds of a column, by default those of the shortest op. A column shows the op at its middle, or else
            one whose middle is in it.
        width: the most characters in a row; longer rows end in ``...``.
    """
    lines = grid_rich(timeline, slot_s=slot_s, width=width).plain.split("\n")
    return "\n".join(line.rstrip() for line in lines)


def grid_rich(timeline: Timeline, *, slot_s: float | None = None, width: int | None = None) -> Text:
    """Returns a `grid` in colour."""
    picture = Text(no_wrap=True)
    for number, (head, pieces) in enumerate(_fill_rows(timeline, slot_s or choose_slot(timeline), width)):
        picture.append("\n" if number else "").append(head, "dim" if not number else "bold")
        for text, colour in pieces:
            picture.append(text, TERMINAL.get(colour, "dim"))
    return picture


def print_grid(timeline: Timeline) -> None:
    """Draws a timeline, at most as wide as the terminal."""
    width = Console().width if sys.stdout.isatty() else None
    console = Console(highlight=False, width=10_000 if width is None else None)
    console.print(grid_rich(timeline, width=width), soft_wrap=True)


def choose_slot(timeline: Timeline) -> float:
    """Returns the seconds of the shortest kind of op: the least median over each stage's forwards, backwards, ...

    A median, because one disturbed measurement must not stretch the picture. Updates count only if nothing else exists.
    """
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in timeline.work():
        if span.end_s > span.start_s:
            seconds[span.kind, span.stage].append(span.end_s - span.start_s)
    passes = [median(durations) for (kind, _), durations in seconds.items() if kind != "U"]
    return min(passes or [median(durations) for durations in seconds.values()] or [1.0])


def _fill_rows(timeline: Timeline, slot_s: float, width: int | None) -> list[tuple[str, list[tuple[str, str]]]]:
    names = ["time", *(f"rank {rank}" for rank in range(timeline.workers))]
    heads = [f"{name:<{max(map(len, names))}} | " for name in names]
    work = timeline.work()
    begin = min((span.start_s for span in timeline.spans), default=0.0)
    slots = ceil((max((span.end_s for span in work), default=begin) - begin) / slot_s - _NOTHING)
    shown = slots if width is None else min(slots, max(1, (width - len(heads[0])) // 3 + 1))
    ops: list[list[Span]] = [[] for _ in range(timeline.workers)]
    ends = [begin] * timeline.workers
    for span in work:
        ends[span.rank] = max(ends[span.rank], span.end_s)
        if span.start_s < begin + (shown + _NOTHING) * slot_s:
            ops[span.rank].append(span)
    cells = [
        _fill_cells(sorted(rank_ops, key=lambda span: (span.start_s, span.end_s)), begin, slot_s, shown)
        for rank_ops in ops
    ]
    column = 1 + max((len(text) for row in cells for text, _ in row), default=1)
    longest = max(((len(row) - 1) * column + len(row[-1][0]) for row in cells if row), default=0)
    is_cropped = width is not None and (shown < slots or len(heads[0]) + longest > width)
    if width is not None and is_cropped:
        shown = max(1, (width - len(heads[0]) - len("...")) // column)
    rows = [(heads[0], [(_write_scale(shown, column, slot_s), "")])]
    for head, row, end_s in zip(heads[1:], cells, ends, strict=True):
        pieces = [(text.ljust(column), colour) for text, colour in row[:shown]]
        if is_cropped and end_s > begin + (shown + _NOTHING) * slot_s:
            pieces += [(".".ljust(column), "wait")] * (shown - len(pieces)) + [("...", "wait")]
        rows.append((head, pieces))
    return rows


def _fill_cells(ops: list[Span], begin: float, slot_s: float, slots: int) -> list[tuple[str, str]]:
    """Returns text and colour of each slot."""
    stages = len({span.stage for span in ops})
    filled: dict[int, Span] = {}
    short: dict[int, Span] = {}
    instant: set[int] = set()
    for span in ops:
        start, end = (span.start_s - begin) / slot_s, (span.end_s - begin) / slot_s
        if span.kind == "U" and end - start < 1 - 1e-6:
            instant.add(max(0, ceil(start - 0.5 - 1e-6) - 1))
            continue
        first, last = (ceil(time - 0.5 - 1e-6) for time in (start, end))
        filled |= dict.fromkeys(range(first, min(last, slots)), span)
        if first == last:
            short[int((start + end) / 2)] = span
    filled = short | filled
    row: list[tuple[str, str]] = []
    before: Span | None = None
    for i in range(min(slots, max(filled, default=-1) + 1)):
        now = filled.get(i)
        if now is None:
            text, colour = ".", "wait"
        else:
            name = f"{now.kind}{now.index}" if stages == 1 else f"{now.stage}{now.kind}{now.index}"
            text, colour = ("==" if now is before else name), colour_class(now.kind, now.index)
        row.append((text + "'" * (i in instant), colour))
        before = now
    return row


def _write_scale(slots: int, column: int, slot_s: float) -> str:
    every = _TICK_SLOTS
    while every * column < 10:
        every *= 2
    room = slots * column - 1
    unit, size = time_unit(slots * slot_s)
    text = ""
    for i in range(0, slots, every):
        label = f"{format_number(float(f'{i * slot_s / size:.3g}'))} {unit}"
        if i * column + len(label) <= room:
            text = text.ljust(i * column) + label
    return text


def schedule_table(claimed: Mapping[str, Mapping[str, Any]], *, stages: int) -> str:
    """Returns a row for each method, of the claims of its paper (`schedules.claims_at`) for this many stages.

    The last two columns are those of the fullest worker.
    """
    rows = [("method", "flush", "m", "bubble", "in flight", "staleness", "versions", "activations", "weights")]
    for name, claims in claimed.items():
        in_flight, staleness, versions = (
            "-" if claims[key] is None else " ".join(map(str, claims[key]))
            for key in ("in_flight", "staleness", "versions")
        )
        bubble = "-" if claims["bubble"] is None else f"{claims['bubble']:.3f}"
        activations, weights = (
            "-" if claims[key] is None else f"{max(claims[key]):.4g}" for key in ("activations", "weights")
        )
        flush, m = "yes" if claims["flushes"] else "no", str(claims["microbatches"])
        rows.append((name, flush, m, bubble, in_flight, staleness, versions, activations, weights))
    return (
        f"claims at p = {stages} stages; without a flush, of a long run; memory of the fullest worker, in units of "
        f"1F1B's first stage\n{align(rows, 'llrrlllr')}"
    )


def stage_memory_table(plan: Plan) -> str:
    """Returns the parts of one worker's predicted peak memory, a row for each stage (`core.schedule.stage_memory`)."""
    names = [field.name for field in fields(plan.stages[0].memory) if field.name not in ELSEWHERE]
    elsewhere = [name for name in ELSEWHERE if any(getattr(stage.memory, name) for stage in plan.stages)]
    heads = [name.removesuffix("_bytes") for name in (*names, "peak", *elsewhere)]
    rows = [["stage", *heads]]
    for s, stage in enumerate(plan.stages):
        sizes = [*(getattr(stage.memory, name) for name in names), stage.peak_bytes]
        sizes += [getattr(stage.memory, name) for name in elsewhere]
        rows.append([str(s), *(format_bytes(size) if size else "-" for size in sizes)])
    return align(rows, "r")

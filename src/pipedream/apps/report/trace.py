"""Timelines as trace files, in Chrome's trace event format (ui.perfetto.dev, chrome://tracing).

A run is a process, a rank a thread; messages have threads next to their sender's. Arrows (flows) follow microbatches.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipedream.apps.report.lanes import assign_rows
from pipedream.apps.report.svg import SPAN_NAMES
from pipedream.core.artifact import write_text
from pipedream.core.schedule.timeline import WORK, Span, Timeline


def trace(*timelines: Timeline) -> dict[str, Any]:
    """Returns the trace of one or more runs as JSON values; times are microseconds."""
    events: list[dict[str, Any]] = []
    for run, timeline in enumerate(timelines):
        placed = _place_spans(timeline)
        events += _name_threads(run, timeline, {thread for _, thread in placed})
        of_run = _write_spans(run, timeline, placed) + _write_flows(run, timeline)
        # A flow that ends when the slice begins that it points into must come after the slice.
        events += sorted(of_run, key=lambda event: (event["tid"], event["ts"], event["ph"] != "X"))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def save_trace(timeline: Timeline | Sequence[Timeline], path: str | os.PathLike[str]) -> Path:
    """Writes the trace of one or several timelines to a file, atomically. Returns the path."""
    timelines = [timeline] if isinstance(timeline, Timeline) else timeline
    return write_text(path, json.dumps(trace(*timelines)) + "\n")


_BESIDE = ("send", "step")
"""Kinds of spans that have rows of their own."""

_ROOM = 1000
"""Thread numbers reserved for each rank: its own, and those of its messages."""


def _place_spans(timeline: Timeline) -> list[tuple[Span, int]]:
    placed = [(span, span.rank * _ROOM) for span in timeline.spans if span.kind not in _BESIDE]
    for rank in range(timeline.workers):
        beside = [span for span in timeline.spans if span.rank == rank and span.kind in _BESIDE]
        beside.sort(key=lambda span: span.start_s)
        rows = assign_rows(beside)
        placed += [(span, rank * _ROOM + 1 + row) for span, row in zip(beside, rows, strict=True)]
    return placed


def _name_threads(run: int, timeline: Timeline, threads: set[int]) -> list[dict[str, Any]]:
    notes: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": f"{timeline.source} {timeline.name}"})]
    for thread in sorted(threads.union(rank * _ROOM for rank in range(timeline.workers))):
        rank, row = divmod(thread, _ROOM)
        notes.append(("thread_name", thread, {"name": f"rank {rank} sends" if row else f"rank {rank}"}))
        notes.append(("thread_sort_index", thread, {"sort_index": thread}))
    return [{"ph": "M", "name": name, "pid": run, "tid": thread, "args": args} for name, thread, args in notes]


def _write_spans(run: int, timeline: Timeline, placed: list[tuple[Span, int]]) -> list[dict[str, Any]]:
    versions_read = {(versions.stage, versions.microbatch): versions for versions in timeline.gradient_versions}
    events: list[dict[str, Any]] = []
    for span, thread in placed:
        number = "update" if span.kind in ("U", "step") else "microbatch"
        args: dict[str, Any] = {"stage": span.stage, number: span.index}
        letter = span.kind if span.kind in WORK else {"step": "U"}.get(span.kind, ">")
        versions = versions_read.get((span.stage, span.index))
        if versions is not None and span.kind in ("F", "B", "I", "W"):
            args["version"] = versions.forward_version if span.kind == "F" else versions.backward_version
            if span.kind != "F":
                args |= {"applied_to": versions.applied_to, "staleness": versions.staleness}
        events.append(
            {
                "ph": "X",
                "name": span.kind if span.kind == "wait" else f"{span.stage}{letter}{span.index}",
                "cat": SPAN_NAMES[span.kind] if span.kind in WORK else span.kind,
                "pid": run,
                "tid": thread,
                "ts": _round_us(span.start_s),
                "dur": max(0.0, round(_round_us(span.end_s) - _round_us(span.start_s), 3)),
                "args": args,
            }
        )
    return events


def _write_flows(run: int, timeline: Timeline) -> list[dict[str, Any]]:
    """Pairs of events with the same id, each inside the slice that it belongs to."""
    spans = {(span.kind, span.stage, span.index): span for span in timeline.work()}
    events: list[dict[str, Any]] = []
    number = 0
    for (kind, stage, index), span in spans.items():
        step = {"F": 1, "B": -1, "I": -1}.get(kind)
        after = spans.get((kind, stage + step, index)) if step else None
        if after is None:
            continue
        number += 1
        common = {"name": f"{SPAN_NAMES[kind]} {index}", "cat": "microbatch", "id": run << 32 | number, "pid": run}
        # A backward that recomputes may begin before the one that it waits for.
        end_s = max(span.start_s, after.start_s)
        events.append(common | {"ph": "s", "tid": span.rank * _ROOM, "ts": _round_us(span.start_s)})
        events.append(common | {"ph": "f", "bp": "e", "tid": after.rank * _ROOM, "ts": _round_us(end_s)})
    return events


def _round_us(seconds: float) -> float:
    return round(seconds * 1e6, 3)

"""The gallery of schedules: each with its picture, the paper's claims and the simulation, and when to choose it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.metrics import run_metrics, steady_metrics
from pipedream.report.axis import figure
from pipedream.report.html_tables import NOTHING
from pipedream.report.text import grid

_GRID_WIDTH = 150


@dataclass(frozen=True)
class GalleryEntry:
    """One method of the gallery, with Markdown texts.

    Attributes:
        shown: the timeline to draw.
        run: for the metrics: one minibatch of a flushing schedule, a long run of any other.
        picture: link to the SVG file.
    """

    schedule: Schedule
    shown: Timeline
    run: Timeline
    picture: str
    about: str = ""
    choose: str = ""


def gallery(entries: Iterable[GalleryEntry], compensated: Iterable[tuple[Schedule, str, str]] = ()) -> str:
    """Returns the Markdown page.

    Args:
        compensated: (schedule, what it is, when to choose it) of methods that add a delay compensation to an entry.
    """
    entries = list(entries)
    head = [
        "# Schedules",
        "",
        "Every picture and every number on this page comes from the objects that the library runs: the order of the",
        "schedule, lowered to a program and simulated. `make docs` writes the page again, and a test compares them.",
        "",
        "Each row is a rank. `F3` and `B3` are the forward and the backward of microbatch 3, a backward takes two",
        "columns (one where a method's claims ask for it), `.` is waiting, and `'` after an op is an update. A split",
        "backward is `I3`, the gradients of what arrived, and `W3`, those of the weights. In the pictures `v` is the",
        "version of the weights that an op reads.",
        "",
        "| schedule | m | bubble | staleness | weight sets | microbatches in flight |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_overview(entry) for entry in entries),
        "",
        "Several numbers are those of the workers, from first to last; a worker that has several stages is named with",
        "their totals, and the letters of its ops with the stage, as in `2F3`. A minibatch is split into",
        "m microbatches. The bubble is that of one minibatch if the schedule flushes, and that of the steady state",
        "otherwise.",
    ]
    return "\n".join([*head, *(_section(entry) for entry in entries), *_compensated(compensated)]).rstrip() + "\n"


def prose(docstring: str | None) -> str:
    """Returns the paragraphs of a docstring before its first picture.

    >>> prose("Naive.\\n\\nThe baseline.\\n\\n    rank 0 | F0\\n\\nMore.")
    'Naive.\\n\\nThe baseline.'
    """
    kept = []
    for paragraph in (docstring or "").split("\n\n"):
        if paragraph.startswith("    "):
            break
        kept.append(paragraph.strip())
    return "\n\n".join(kept)


def _bubble(entry: GalleryEntry) -> float:
    return (run_metrics if entry.schedule.flushes else steady_metrics)(entry.run).bubble


def _overview(entry: GalleryEntry) -> str:
    ranks = run_metrics(entry.run).per_rank
    name = entry.schedule.name
    cells = (
        f"[{name}](#{name})",
        str(entry.schedule.microbatches),
        f"{100 * _bubble(entry):.0f}%",
        _together(rank.staleness for rank in ranks),
        _together(rank.peak_versions for rank in ranks),
        _together(rank.peak_in_flight for rank in ranks),
    )
    return f"| {' | '.join(cells)} |"


def _section(entry: GalleryEntry) -> str:
    schedule = entry.schedule
    workers = schedule.placement.workers
    lines = ["", f"## {schedule.name}", ""]
    if entry.about:
        lines += [entry.about, ""]
    if entry.choose:
        lines += [f"**When to choose it.** {entry.choose}", ""]
    lines += [f"![{schedule.name}, {workers} workers]({entry.picture})", ""]
    lines += ["```", grid(entry.shown, width=_GRID_WIDTH), "```", ""]
    lines += _claims(entry)
    return "\n".join(lines)


def _compensated(methods: Iterable[tuple[Schedule, str, str]]) -> list[str]:
    methods = list(methods)
    if not methods:
        return []
    lines = [
        "",
        "## With a compensation of delay",
        "",
        "In time, memory and staleness these equal the method that they build on, except for one more tensor for each",
        "weight where noted; an update uses its late gradients differently. Others are made with",
        "`Pipeline(schedule=..., compensation=...)` and `pipedream train --compensation NAME[:NUMBER]`.",
        "",
        "| schedule | compensation | m | staleness | weight sets |",
        "| --- | --- | --- | --- | --- |",
    ]
    for schedule, _, _ in methods:
        stages = range(len(schedule.plan.stages))
        cells = (
            f"[{schedule.name}](#{schedule.name})",
            ", ".join(f"`{one}`" for one in schedule.updates.compensation),
            str(schedule.microbatches),
            _together(schedule.weights.staleness(s) for s in stages),
            _together(schedule.weights.versions(s) for s in stages),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for schedule, about, choose in methods:
        lines += ["", f"### {schedule.name}", "", about, "", f"**When to choose it.** {choose}"]
    return lines


def _claims(entry: GalleryEntry) -> list[str]:
    schedule, claims = entry.schedule, entry.schedule.claims
    p, m = schedule.placement.workers, schedule.microbatches
    ranks = run_metrics(entry.run).per_rank
    where = "over one minibatch" if schedule.flushes else "in steady state"

    def promised(form: Callable[[int, int, int], int] | None) -> str:
        counted = m if schedule.flushes else entry.run.microbatches
        return NOTHING if form is None else _together(form(p, counted, s) for s in range(p))

    rows = [
        (
            f"bubble, {where}",
            NOTHING if claims.bubble is None or m < claims.least(p) else figure(claims.bubble(p, m)),
            figure(_tidy(_bubble(entry))),
        ),
        ("microbatches in flight", promised(claims.in_flight), _together(rank.peak_in_flight for rank in ranks)),
        ("staleness in updates", promised(claims.staleness), _together(rank.staleness for rank in ranks)),
        ("weight sets", promised(claims.versions), _together(rank.peak_versions for rank in ranks)),
    ]
    held, _, sets = (row[2] for row in rows[1:])
    buffers = [schedule.weights.buffers(s) for s in range(len(schedule.plan.stages))]
    more = f", {_together(buffers)} more for views" if any(buffers) else ""
    return [
        f"| p = {p}, m = {m}, workers from first to last | claimed | simulated |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"Memory of a worker: a stage's weights times {sets}{more}, and its activations of a microbatch times {held}. "
        f"Claims: {claims.assumption}.",
    ]


def _tidy(value: float) -> float:
    return 0.0 if abs(value) < 1e-9 else value


def _together(values: Iterable[int | None]) -> str:
    """One number where all workers are alike, else all of them.

    >>> _together([3, 2, 1]), _together([1, 1])
    ('3, 2, 1', '1')
    """
    found = [NOTHING if value is None else str(value) for value in values]
    return found[0] if len(set(found)) == 1 else ", ".join(found)

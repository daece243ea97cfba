"""Writes docs/gallery.md and its pictures from the schedules themselves, and docs/tour.md from examples/tour.ipynb.

With --check it writes nothing and lists what is out of date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipedream.apps.report.html_tables import NOTHING
from pipedream.apps.report.svg import timeline_svg
from pipedream.apps.report.text import grid
from pipedream.core.artifact import write_text
from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.units import format_number
from pipedream.metrics import run_metrics, steady_metrics
from pipedream.schedules import COMPENSATED, METHODS, SCHEDULES, Picture, build, first_stage_units, uniform
from pipedream.simulator import costs, simulate

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOK = DOCS.parent / "examples" / "tour.ipynb"
STAGES, MICROBATCHES, LONG = 4, 8, 64
GRID_WIDTH = 150


def count_microbatches(name: str) -> int | None:
    """Returns the microbatches of a minibatch in the gallery; None for methods that do not split it."""
    try:
        return SCHEDULES[name](uniform(name, STAGES), MICROBATCHES).microbatches
    except ScheduleError:
        return None


def simulate_schedule(schedule: Schedule, total: int) -> Timeline:
    """Returns the timeline of a schedule whose plan has the seconds of a microbatch."""
    return simulate(lower(schedule), costs(schedule.plan), total)


def describe(name: str) -> str:
    """Returns a method's description: the docstring of its module, and the first sentence of its function."""
    factory = SCHEDULES[name]
    sentence = (inspect.getdoc(factory) or "").split("\n\n")[0].removeprefix("Returns ")
    return f"{read_prose(inspect.getdoc(inspect.getmodule(factory)))}\n\nHere: {sentence}"


def list_compensated() -> list[tuple[Schedule, str, str]]:
    """Returns the methods that are another one plus a compensation, what they are, and when to choose them."""
    rows = []
    for name, factory in COMPENSATED.items():
        text = (inspect.getdoc(factory) or "").removeprefix("Returns ")
        plan = uniform(name, STAGES)
        splits = not build(name, plan).updates.mean_of_rounds
        rows.append((build(name, plan, MICROBATCHES if splits else None), text, METHODS[name].choose))
    return rows


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


def write_gallery(entries: Iterable[GalleryEntry], compensated: Iterable[tuple[Schedule, str, str]] = ()) -> str:
    """Returns the Markdown page.

    Args:
        compensated: (schedule, what it is, when to choose it) of methods that add a delay compensation to an entry.
    """
    entries = list(entries)
    head = [
        "# Schedules",
        "",
        "Every picture and every number on this page comes from the program that the library runs: a schedule's",
        "order, lowered and simulated. `make docs` regenerates the page, and a test compares them.",
        "",
        "Each row is a rank. `F3` and `B3` are the forward and the backward of microbatch 3, a backward takes two",
        "columns (one where a method's claims assume it), `.` is idle, and `'` after an op is an update. A split",
        "backward is `I3`, the input gradient, and `W3`, the weight gradient. In the pictures `v` is the weight",
        "version that an op reads.",
        "",
        "| schedule | m | bubble | staleness | weight sets | microbatches in flight | activations | weights |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(write_overview(entry) for entry in entries),
        "",
        "Several numbers are the workers', from first to last; a worker with several stages shows their totals, and",
        "its ops begin with the stage, as in `2F3`. A minibatch is split into m microbatches. The bubble is that of",
        "one minibatch if the schedule flushes, otherwise that of the steady state. Activations and weights are those",
        "of the fullest worker, relative to the first stage's under 1F1B, which makes methods with one and with",
        "several stages per worker comparable (`pipedream simulate --uniform 4` compares those that you name).",
    ]
    return (
        "\n".join([*head, *(write_section(entry) for entry in entries), *write_compensated(compensated)]).rstrip()
        + "\n"
    )


def read_prose(docstring: str | None) -> str:
    """Returns the paragraphs of a docstring before its first picture."""
    paragraphs = []
    for paragraph in (docstring or "").split("\n\n"):
        if paragraph.startswith("    "):
            break
        paragraphs.append(paragraph.strip())
    return "\n\n".join(paragraphs)


def measure_bubble(entry: GalleryEntry) -> float:
    return (run_metrics if entry.schedule.flushes else steady_metrics)(entry.run).bubble


def write_overview(entry: GalleryEntry) -> str:
    ranks = run_metrics(entry.run).per_rank
    name = entry.schedule.name
    cells = (
        f"[{name}](#{name})",
        str(entry.schedule.microbatches),
        f"{100 * measure_bubble(entry):.0f}%",
        join_alike(rank.staleness for rank in ranks),
        join_alike(rank.peak_versions for rank in ranks),
        join_alike(rank.peak_in_flight for rank in ranks),
        *(format_number(max(memory)) for memory in measure_memory(entry)),
    )
    return f"| {' | '.join(cells)} |"


def measure_memory(entry: GalleryEntry) -> tuple[tuple[float, ...], ...]:
    """Returns the activations, and the weights, of each worker, in units of 1F1B's first stage."""
    ranks = run_metrics(entry.run).per_rank
    units = (first_stage_units(entry.schedule.plan, rank.peak_in_flight, rank.peak_versions or 0) for rank in ranks)
    return tuple(zip(*units, strict=True))


def write_section(entry: GalleryEntry) -> str:
    schedule = entry.schedule
    workers = schedule.placement.workers
    lines = ["", f"## {schedule.name}", ""]
    if entry.about:
        lines += [entry.about, ""]
    if entry.choose:
        lines += [f"**When to choose it.** {entry.choose}", ""]
    lines += [f"![{schedule.name}, {workers} workers]({entry.picture})", ""]
    lines += ["```", grid(entry.shown, width=GRID_WIDTH), "```", ""]
    lines += write_claims(entry)
    return "\n".join(lines)


def write_compensated(methods: Iterable[tuple[Schedule, str, str]]) -> list[str]:
    methods = list(methods)
    if not methods:
        return []
    lines = [
        "",
        "## With a compensation of delay",
        "",
        "These have the time, memory and staleness of the method that they build on, except for one more tensor per",
        "weight where noted; an update uses its stale gradients differently. Combine others with",
        "`Pipeline(schedule=..., compensation=...)` and `pipedream train --compensation NAME[:NUMBER]`.",
        "",
        "| schedule | compensation | m | staleness | weight sets |",
        "| --- | --- | --- | --- | --- |",
    ]
    for schedule, _, _ in methods:
        stages = range(len(schedule.plan.stages))
        cells = (
            f"[{schedule.name}](#{schedule.name})",
            ", ".join(f"`{rule}`" for rule in schedule.updates.compensation),
            str(schedule.microbatches),
            join_alike(schedule.weights.staleness(s) for s in stages),
            join_alike(schedule.weights.versions(s) for s in stages),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for schedule, about, choose in methods:
        lines += ["", f"### {schedule.name}", "", about, "", f"**When to choose it.** {choose}"]
    return lines


def write_claims(entry: GalleryEntry) -> list[str]:
    schedule, claims = entry.schedule, entry.schedule.claims
    p, m = schedule.placement.workers, schedule.microbatches
    ranks = run_metrics(entry.run).per_rank
    where = "over one minibatch" if schedule.flushes else "in steady state"

    def promised(form: Callable[[int, int, int], int] | None) -> str:
        counted = m if schedule.flushes else entry.run.microbatches
        return NOTHING if form is None else join_alike(form(p, counted, s) for s in range(p))

    rows = [
        (
            f"bubble, {where}",
            NOTHING if claims.bubble is None or m < claims.least(p) else format_number(claims.bubble(p, m)),
            format_number(clear_rounding(measure_bubble(entry))),
        ),
        ("microbatches in flight", promised(claims.in_flight), join_alike(rank.peak_in_flight for rank in ranks)),
        ("staleness in updates", promised(claims.staleness), join_alike(rank.staleness for rank in ranks)),
        ("weight sets", promised(claims.versions), join_alike(rank.peak_versions for rank in ranks)),
    ]
    activations, _, sets = (row[2] for row in rows[1:])
    buffers = [schedule.weights.buffers(s) for s in range(len(schedule.plan.stages))]
    more = f", {join_alike(buffers)} more for predictions" if any(buffers) else ""
    return [
        f"| p = {p}, m = {m}, workers from first to last | claimed | simulated |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"Memory of a worker: {sets} times a stage's weights{more}, and {activations} times its activations of a "
        f"microbatch. Claims assume: {claims.assumption}.",
    ]


def clear_rounding(value: float) -> float:
    return 0.0 if abs(value) < 1e-9 else value


def join_alike(values: Iterable[int | None]) -> str:
    """Returns one number where all workers are alike, else all of them."""
    texts = [NOTHING if value is None else str(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def make_pages() -> dict[Path, str]:
    """Returns all files that this program writes: path -> text."""
    entries, files = [], {}
    for name, factory in SCHEDULES.items():
        plan = uniform(name, STAGES)
        ratio = factory(plan, count_microbatches(name)).claims.ratio
        plan = plan if ratio is None else uniform(name, STAGES, 1.0, ratio)
        schedule = factory(plan, count_microbatches(name))
        shown = simulate_schedule(schedule, MICROBATCHES)
        run = shown if schedule.flushes else simulate_schedule(schedule, LONG)
        picture = METHODS[name].picture or Picture(name, count_microbatches(name), MICROBATCHES)
        drawn = simulate_schedule(factory(plan, picture.microbatches), picture.total)
        files[DOCS / "img" / f"{name}.svg"] = timeline_svg(drawn, title=picture.title, versions=True, width_px=1000)
        entries.append(GalleryEntry(schedule, shown, run, f"img/{name}.svg", describe(name), METHODS[name].choose))
    entries.sort(key=lambda entry: not entry.schedule.flushes)
    files[DOCS / "gallery.md"] = write_gallery(entries, list_compensated())
    return files | make_tour()


def make_tour() -> dict[Path, str]:
    """Returns the page of the notebook, with the outputs that are stored in it, and its pictures."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    parts, files = [], {}

    def as_file(picture: str) -> str:
        number = len(files) + 1
        files[DOCS / "img" / f"tour_{number}.svg"] = picture.strip() + "\n"
        return f"![output {number}](img/tour_{number}.svg)"

    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
            shown = data.get("text/html", "")
            if "image/svg+xml" in data:
                parts.append(as_file(data["image/svg+xml"]))
                continue
            printed = "".join(output.get("text", "")) or data.get("text/plain", "")
            parts.append(f"```text\n{printed.rstrip()}\n```")
            pictures = re.findall(r"<svg .*?</svg>", shown, re.S)
            # A picture shows what its table lists; of pandas the text is a table.
            parts += [as_file(picture) for picture in pictures] or re.findall(r"<table>.*?</table>", shown, re.S)
    head = "<!-- written by `make docs` from examples/tour.ipynb -->"
    files[DOCS / "tour.md"] = "\n\n".join([head, *parts]) + "\n"
    return files


def main() -> int:
    """Writes the files, or compares them. Returns the exit status."""
    stale = 0
    for path, text in make_pages().items():
        if "--check" not in sys.argv:
            write_text(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date; run make docs", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/gallery.md and its pictures from the schedules themselves, and docs/tour.md from examples/tour.ipynb.

With --check it writes nothing and lists what is out of date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

from pipedream.core.artifact import write_text
from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import Timeline
from pipedream.report.gallery import GalleryEntry, gallery, prose
from pipedream.report.svg import timeline_svg
from pipedream.schedules import COMPENSATED, METHODS, SCHEDULES, Picture, build, uniform
from pipedream.simulator import costs, simulate

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOK = DOCS.parent / "examples" / "tour.ipynb"
STAGES, MICROBATCHES, LONG = 4, 8, 64


def split(name: str) -> int | None:
    """Returns the microbatches of a minibatch in the gallery; None for methods that do not split it."""
    try:
        return SCHEDULES[name](uniform(name, STAGES), MICROBATCHES).microbatches
    except ScheduleError:
        return None


def simulated(schedule: Schedule, total: int) -> Timeline:
    """Returns the timeline of a schedule whose plan has the seconds of a microbatch."""
    return simulate(lower(schedule), costs(schedule.plan), total)


def about(name: str) -> str:
    """Returns a method's description: the docstring of its module, and the first sentence of its function."""
    factory = SCHEDULES[name]
    sentence = (inspect.getdoc(factory) or "").split("\n\n")[0].removeprefix("Returns ")
    return f"{prose(inspect.getdoc(inspect.getmodule(factory)))}\n\nHere: {sentence}"


def compensated() -> list[tuple[Schedule, str, str]]:
    """Returns the methods that are another one plus a compensation, what they are, and when to choose them."""
    rows = []
    for name, factory in COMPENSATED.items():
        text = (inspect.getdoc(factory) or "").removeprefix("Returns ")
        plan = uniform(name, STAGES)
        splits = not build(name, plan).updates.mean_of_rounds
        rows.append((build(name, plan, MICROBATCHES if splits else None), text, METHODS[name].choose))
    return rows


def pages() -> dict[Path, str]:
    """Returns all files that this program writes: path -> text."""
    entries, files = [], {}
    for name, factory in SCHEDULES.items():
        plan = uniform(name, STAGES)
        ratio = factory(plan, split(name)).claims.ratio
        plan = plan if ratio is None else uniform(name, STAGES, 1.0, ratio)
        schedule = factory(plan, split(name))
        shown = simulated(schedule, MICROBATCHES)
        run = shown if schedule.flushes else simulated(schedule, LONG)
        picture = METHODS[name].picture or Picture(name, split(name), MICROBATCHES)
        drawn = simulated(factory(plan, picture.microbatches), picture.total)
        files[DOCS / "img" / f"{name}.svg"] = timeline_svg(drawn, title=picture.title, versions=True, width_px=1000)
        entries.append(GalleryEntry(schedule, shown, run, f"img/{name}.svg", about(name), METHODS[name].choose))
    entries.sort(key=lambda entry: not entry.schedule.flushes)
    files[DOCS / "gallery.md"] = gallery(entries, compensated())
    return files | tour()


def tour() -> dict[Path, str]:
    """Returns the page of the notebook, with the outputs that are stored in it, and its pictures."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    parts, files = [], {}

    def as_file(picture: re.Match[str] | str) -> str:
        number = len(files) + 1
        files[DOCS / "img" / f"tour_{number}.svg"] = (
            picture if isinstance(picture, str) else picture[0]
        ).strip() + "\n"
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
            parts += [as_file(match) for match in re.finditer(r"<svg .*?</svg>", shown, re.S)]
            parts += re.findall(r"<table>.*?</table>", shown, re.S)  # not those of pandas, whose text is a table
    head = "<!-- written by `make docs` from examples/tour.ipynb -->"
    files[DOCS / "tour.md"] = "\n\n".join([head, *parts]) + "\n"
    return files


def main() -> int:
    """Writes the files, or compares them. Returns the exit status."""
    stale = 0
    for path, text in pages().items():
        if "--check" not in sys.argv:
            write_text(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date; run make docs", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())

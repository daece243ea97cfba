"""The pages of a run folder: its report, the timeline of its start, and the trace."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipedream.apps.report.html import save_page
from pipedream.apps.report.lanes import start_window
from pipedream.apps.report.trace import save_trace
from pipedream.apps.training.run_folder import RunFiles
from pipedream.core.artifact import read_text
from pipedream.core.errors import ArtifactError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.timeline import Timeline

_SHOWN_MICROBATCHES = 40  # in the picture of a run's start


def write(folder: Path, files: RunFiles) -> None:
    """Writes ``start.json``, ``trace.json`` and ``report.html`` into a run folder.

    Raises:
        ArtifactError: a file cannot be written.
    """
    if (start := _cut_start(files.measured[0])) is not None:
        start.save(folder / "start.json")
    save_trace(files.measured, folder / "trace.json")
    write_report(folder)


def _cut_start(measured: Timeline) -> Timeline | None:
    """Returns the start of a run, for its picture; None if nothing ran."""
    window = start_window(measured, _SHOWN_MICROBATCHES)
    if window is None:
        return None
    versions = tuple(tag for tag in measured.gradient_versions if tag.microbatch < window.last)
    return replace(measured.between(window.start_s, window.end_s), gradient_versions=versions)


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` into a run folder, from its other files; returns its path.

    Raises:
        ArtifactError: the folder is not a run folder.
    """
    try:
        summary = json.loads(read_text(folder / "summary.json"))
        losses = json.loads(read_text(folder / "losses.json"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder} is not a run folder: {error}; give the folder of a training run") from None
    profile = folder / "profile.json"
    files: dict[str, Any] = {
        "plan": Plan.load(folder / "plan.json"),
        "profile": Profile.load(profile) if profile.exists() else None,
        "predicted": Timeline.load(folder / "predicted.json"),
        "measured": Timeline.load(folder / "measured.json"),
        "start": Timeline.load(start) if (start := folder / "start.json").exists() else None,
    }
    try:
        title = f"{summary.get('recipe', 'run')}, {summary.get('schedule', '')}"
        return save_page(folder / "report.html", summary, **files, losses=losses, title=title)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"summary.json or losses.json in {folder} is not as a run writes it ({type(error).__name__}: {error}); "
            "give the unchanged folder of a training run"
        ) from None

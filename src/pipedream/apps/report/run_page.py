"""The pages of a run folder: its report and the trace."""

from dataclasses import replace
from pathlib import Path

from pipedream.apps.report.html import save_page
from pipedream.apps.report.lanes import start_window
from pipedream.apps.report.trace import save_trace
from pipedream.apps.training.run_folder import RunFiles

_SHOWN_MICROBATCHES = 40  # in the picture of a run's start; a whole run may have millions of spans


def write(folder: Path, files: RunFiles) -> None:
    """Writes ``trace.json`` and ``report.html`` into a run folder.

    Raises:
        ArtifactError: a file cannot be written.
    """
    save_trace(files.measured, folder / "trace.json")
    first, phases = files.measured[0], files.summary.get("phases") or [{"begin": 0}]
    window = start_window(first, _SHOWN_MICROBATCHES, phases[0]["begin"] * first.minibatch_microbatches)
    save_page(
        folder / "report.html",
        files.summary,
        plan=files.plan,
        profile=files.profile,
        predicted=files.predicted,
        measured=files.steady,
        start=replace(first, spans=()) if window is None else first.between(window.start_s, window.end_s),
        losses=files.losses,
        title=f"{files.summary['recipe']}, {files.summary['schedule']}",
    )

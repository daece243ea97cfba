"""The pages of a run folder: its report and the trace."""

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
    window = start_window(files.measured[0], _SHOWN_MICROBATCHES)
    save_page(
        folder / "report.html",
        files.summary,
        plan=files.plan,
        profile=files.profile,
        predicted=files.predicted,
        measured=files.steady,
        start=None if window is None else files.measured[0].between(window.start_s, window.end_s),
        losses=files.losses,
        title=f"{files.summary['recipe']}, {files.summary['schedule']}",
    )

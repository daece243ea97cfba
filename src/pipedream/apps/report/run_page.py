"""The pages of a run folder: its report and the trace."""

from pathlib import Path

from pipedream.apps.report.html import save_page
from pipedream.apps.report.trace import save_trace
from pipedream.apps.training.run_folder import RunFiles


def write(folder: Path, files: RunFiles) -> None:
    """Writes ``trace.json`` and ``report.html`` into a run folder.

    Raises:
        ArtifactError: a file cannot be written.
    """
    save_trace(files.measured, folder / "trace.json")
    save_page(
        folder / "report.html",
        files.summary,
        plan=files.plan,
        profile=files.profile,
        predicted=files.predicted,
        measured=files.steady,
        start=files.measured[0],
        losses=files.losses,
        title=f"{files.summary['recipe']}, {files.summary['schedule']}",
    )

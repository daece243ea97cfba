"""The run folder of a training run, and the figures in its summary.

summary.json    configuration, plan and results, predicted and measured
report.html     the same to read, with the timelines
weights.pt      the whole model's state dict (and weights_ema.pt)
trace.json      the measured timeline for Perfetto or chrome://tracing
checkpoints/    to resume from (`--resume`); named by `training.resume.CHECKPOINTS`
plan.json, profile.json, predicted.json, measured.json, start.json, losses.json
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from pipedream import metrics
from pipedream._version import __version__
from pipedream.core.artifact import write_text
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.core.model.collective import StageCollectives
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.timeline import Timeline
from pipedream.report.html import save_page
from pipedream.report.lanes import start_window
from pipedream.report.trace import save_trace
from pipedream.runtime.checkpoint.files import save_weights
from pipedream.runtime.checkpoint.folders import newest_checkpoint
from pipedream.runtime.checkpoint.remote import AnyPath, RemotePath
from pipedream.training.resume import CHECKPOINTS

_SHOWN_MICROBATCHES = 40  # of the begin of a run


def last_segment(measured: Timeline, drains: list[int]) -> Timeline:
    """Returns the timeline between the last two drains, which nothing interrupts."""
    m = measured.minibatch_microbatches
    stop = measured.microbatches
    start = max((drain * m for drain in drains if drain * m < stop), default=0)
    inside = [span for span in measured.spans if span.kind in "FB" and start <= span.index < stop]
    if not inside:
        return measured
    part = measured.between(min(span.start_s for span in inside), max(span.end_s for span in inside))
    return replace(part, microbatches=stop - start)


def summarise(
    *,
    plan: Plan,
    predicted: Timeline,
    measured: Timeline,
    sent_bytes: Mapping[int, int],
    learning_rates: Sequence[float],
    samples_per_s: Sequence[float],
    collectives: Sequence[StageCollectives | None] = (),
) -> dict[str, Any]:
    """Returns what follows from timelines in a summary: stages, throughput, bubble, memory.

    Args:
        predicted, measured: the same part of the run.
        sent_bytes: by rank, over the whole run.
        learning_rates: those of the stages.
        samples_per_s: rates of the epochs; their median is the throughput, or the timeline's if there are none.
        collectives: those of the stages (`Pipeline.collectives`).
    """
    exchanges = dict(enumerate(collectives))
    before, after = _measure_steady(predicted), _measure_steady(measured)
    stages = []
    placement = plan.placement
    for index, stage in enumerate(plan.stages):
        for rank, worker in zip(placement.ranks[index], plan.workers_of(index), strict=True):
            now, then = after.per_rank[rank], before.per_rank[rank]
            stages.append(
                {
                    "stage": index,
                    "rank": rank,
                    "layers": list(stage.names),
                    "mesh": stage.mesh,
                    "layout": stage.layout,
                    "collectives": None if (exchange := exchanges.get(index)) is None else exchange.to_json(),
                    "learning_rate": learning_rates[index],
                    "busy_share": now.busy_s / after.makespan_s if after.makespan_s else None,
                    "wait_share": now.wait_s / after.makespan_s if after.makespan_s else None,
                    "send_share": now.send_s / after.makespan_s if after.makespan_s else None,
                    "predicted_busy_share": then.busy_s / before.makespan_s if before.makespan_s else None,
                    "predicted_wait_share": then.wait_s / before.makespan_s if before.makespan_s else None,
                    "predicted_send_share": then.send_s / before.makespan_s if before.makespan_s else None,
                    "bytes_sent": sent_bytes.get(rank, 0),
                    "peak_bytes": now.peak_bytes,
                    "reserved_bytes": measured.reserved_bytes[rank] if measured.reserved_bytes else None,
                    "predicted_peak_bytes": plan.worker_bytes[worker],  # of all its stages, as it is measured
                    "versions": measured.peak_versions[rank] if measured.peak_versions else None,
                    "staleness": now.staleness,
                }
            )
    return {
        "format": 1,
        "schedule": measured.name,
        "workers": plan.workers,
        "ranks": plan.ranks,
        "plan": json.loads(plan.to_json()),
        "stages": stages,
        "memory": _compare_memory(plan, measured),
        "throughput": {
            "predicted_per_s": before.samples_per_s,
            "measured_per_s": median(samples_per_s) if samples_per_s else after.samples_per_s,
        },
        "bubble": {"predicted": before.bubble, "measured": after.bubble},
    }


def _compare_memory(plan: Plan, measured: Timeline) -> dict[str, Any]:
    """Peak bytes of tensors, measured and predicted: of the fullest worker, or of all workers of a single process."""
    needs = plan.worker_bytes.values()
    together = measured.shares_memory
    return {
        "of": "all workers" if together else "the fullest worker",
        "measured_bytes": max(measured.peak_bytes, default=None),
        "predicted_bytes": (sum(needs) if together else max(needs)) or None,
        "reserved_bytes": max(measured.reserved_bytes, default=None),
    }


def phase_figures(
    timelines: Mapping[int, Timeline], trained: Mapping[int, tuple[int, int]], drains: list[int]
) -> list[dict[str, Any]]:
    """Returns each phase's method, microbatches, begin and end, throughput, bubble."""
    rows = []
    for number, timeline in timelines.items():
        figures = _measure_steady(last_segment(timeline, drains)) if timeline.spans else None
        rows.append(
            {
                "schedule": timeline.name,
                "microbatches": timeline.minibatch_microbatches,
                "begin": trained[number][0],
                "end": trained[number][1],
                "samples_per_s": None if figures is None else figures.samples_per_s,
                "bubble": None if figures is None else figures.bubble,
            }
        )
    return rows


def _measure_steady(timeline: Timeline) -> metrics.Metrics:
    try:
        return metrics.steady_metrics(timeline)
    except ValueError:  # too short for a steady part
        return metrics.run_metrics(timeline)


def software_versions() -> dict[str, str]:
    """Returns the versions of Python, platform and libraries."""
    installed = {name: version(name) for name in ("torch", "numpy")}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "pipedream": __version__,
        **installed,
    }


def keep_plan(folder: Path, plan: Plan, profile: Profile | None) -> None:
    """Writes plan and profile into the run folder."""
    plan.save(folder / "plan.json")
    if profile is not None:
        profile.save(folder / "profile.json")


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    Attributes:
        measured: each phase's, for the trace.
        steady: for the report.
        losses: (number, loss) of each minibatch.
        weights, average: state dicts, or None.
    """

    summary: dict[str, Any]
    plan: Plan
    predicted: Timeline
    measured: Sequence[Timeline]
    steady: Timeline
    losses: list[tuple[int, float]]
    profile: Profile | None = None
    weights: dict[str, Any] | None = None
    average: dict[str, Any] | None = None


def copy_run(folder: Path, place: AnyPath) -> None:
    """Copies the files of a run folder to its URL; does nothing if it has none. Raises an OSError if it cannot."""
    if isinstance(place, RemotePath):
        for file in sorted(folder.rglob("[!.]*")):
            if file.is_file():
                (place / file.relative_to(folder)).write_bytes(file.read_bytes())


def write_run(folder: Path, files: RunFiles, place: AnyPath | None = None) -> None:
    """Writes a run folder, the weights first; creates it if needed.

    Args:
        place: with its checkpoints; if it is a URL, the files are then copied there.

    Raises:
        WorkerError: a file cannot be written.
    """
    place = place or folder
    try:
        if files.weights is not None:
            save_weights(folder / "weights.pt", files.weights)
        if files.average is not None:
            save_weights(folder / "weights_ema.pt", files.average)
        keep_plan(folder, files.plan, files.profile)
        files.predicted.save(folder / "predicted.json")
        files.steady.save(folder / "measured.json")
        if (start := _start(files.measured[0])) is not None:
            start.save(folder / "start.json")
        write_text(folder / "losses.json", json.dumps(files.losses))
        write_text(folder / "summary.json", json.dumps(files.summary, indent=1) + "\n")
        save_trace(files.measured, folder / "trace.json")
        write_report(folder)
        copy_run(folder, place)
    except (ArtifactError, OSError) as error:
        saved = newest_checkpoint(place / CHECKPOINTS)
        advice = "" if saved is None else f"{saved} is complete: with --resume {place} only what is missing is done"
        if place != folder:
            advice = f"the files are in {folder}; {advice}"
        raise WorkerError(0, "writing the run folder", str(error), advice) from None


def _start(measured: Timeline) -> Timeline | None:
    """Returns the begin of a run, for its picture, if anything ran."""
    window = start_window(measured, _SHOWN_MICROBATCHES)
    if window is None:
        return None
    kept = tuple(tag for tag in measured.gradient_versions if tag.microbatch < window.last)
    return replace(measured.between(window.start_s, window.end_s), gradient_versions=kept)


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` into a run folder, from its other files; returns its path.

    Raises:
        ArtifactError: the folder is not a run folder.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        losses = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
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
            "give the folder of a training run as it was"
        ) from None

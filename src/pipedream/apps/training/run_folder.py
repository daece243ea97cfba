"""The run folder of a training run, the figures in its summary, and the checkpoint that a run resumes from.

summary.json    command line, configuration, plan and results, predicted and measured
report.html     the same to read, with the timelines
weights.pt      the whole model's state dict (and weights_ema.pt)
trace.json      the measured timeline for Perfetto or chrome://tracing
checkpoints/    to resume from (`--resume`); named by `CHECKPOINTS`
losses/         those before the newest checkpoint, to resume (`write_losses`)
plan.json, profile.json, predicted.json, measured.json, losses.json
"""

import json
import os
import platform
import shlex
import sys
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from pipedream import metrics
from pipedream._version import __version__
from pipedream.core.artifact import encode, encode_attributes, write_text
from pipedream.core.checkpoint import Checkpoint
from pipedream.core.errors import ArtifactError, WorkerError
from pipedream.core.extensions import list_offers
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.timeline import Timeline
from pipedream.pipeline import Pipeline
from pipedream.runtime.comm import process_group
from pipedream.services.checkpoint.folders import (
    find_newest_checkpoint,
    find_newest_of_all,
    list_checkpoints,
    read_shared_manifest,
    warn_of_unfinished,
)
from pipedream.services.checkpoint.stores import Folder, open_store
from pipedream.services.checkpoint.stores.local_folder import LocalFolder
from pipedream.services.checkpoint.stores.store import CheckpointStore, Lock
from pipedream.services.failure.restarts import count_restarts
from pipedream.services.joining import joining
from pipedream.services.probe.core_times import CoreTimes
from pipedream.services.weights.files import save_weights

CHECKPOINTS = "checkpoints"
"""Name of the folder in a run folder that holds its checkpoints."""

_FILE_LOSSES = 5000  # in each file of losses/: 10 ms to write


def cut_last_segment(measured: Timeline, drains: list[int]) -> Timeline:
    """Returns the timeline between the last two drains."""
    parts = measured.minibatch_microbatches
    stop = measured.microbatches
    start = max((drain * parts for drain in drains if drain * parts < stop), default=0)
    spans = [span for span in measured.spans if span.kind in "FB" and start <= span.index < stop]
    if not spans:
        return measured
    part = measured.between(min(span.start_s for span in spans), max(span.end_s for span in spans))
    return replace(part, microbatches=stop - start)


def summarise(
    pipeline: Pipeline,
    plan: Plan,
    predicted: Timeline,
    measured: Timeline,
    samples_per_s: Sequence[float] = (),
    predicted_slowed: Timeline | None = None,
) -> dict[str, Any]:
    """Returns what timelines contribute to a summary: stages, throughput, bubble, memory. Every rank calls it.

    Args:
        predicted, measured: the same part of the run.
        samples_per_s: rates of the epochs; their median is the throughput, or the timeline's if there are none.
        predicted_slowed: on the cores that other work left.
    """
    sent_bytes, learning_rates, exchanges = pipeline.sent_bytes(), pipeline.learning_rates(), pipeline.collectives()
    expected, actual = measure_steady(predicted), measure_steady(measured)
    stages = []
    placement, predicted_bytes = plan.placement, plan.worker_bytes
    for index, stage in enumerate(plan.stages):
        for rank, worker in zip(placement.ranks[index], plan.workers_of(index), strict=True):
            stages.append(
                {
                    "stage": index,
                    "rank": rank,
                    "layers": list(stage.names),
                    **encode_attributes(stage, "mesh", "layout"),
                    "collectives": encode(exchanges[index]),
                    "learning_rate": learning_rates[index],
                    **_list_shares(actual, rank, ""),
                    **_list_shares(expected, rank, "predicted_"),
                    "bytes_sent": sent_bytes.get(rank, 0),
                    **encode_attributes(actual.per_rank[rank], "peak_bytes", "staleness"),
                    "reserved_bytes": measured.reserved_bytes[rank] if measured.reserved_bytes else None,
                    "predicted_peak_bytes": predicted_bytes[worker],  # of all its stages, as it is measured
                    "versions": measured.peak_versions[rank] if measured.peak_versions else None,
                }
            )
    return {
        "format": 1,
        "command": _format_command(),
        "schedule": measured.name,
        **encode_attributes(plan, "workers", "ranks"),
        "plan": json.loads(plan.to_json()),
        "stages": stages,
        "memory": _compare_memory(plan, measured),
        "throughput": {
            "predicted_per_s": expected.samples_per_s,
            "predicted_slowed_per_s": measure_steady(predicted_slowed).samples_per_s if predicted_slowed else None,
            "measured_per_s": median(samples_per_s) if samples_per_s else actual.samples_per_s,
        },
        "bubble": {"predicted": expected.bubble, "measured": actual.bubble},
    }


def _list_shares(figures: metrics.Metrics, rank: int, prefix: str) -> dict[str, float | None]:
    row, makespan_s = figures.per_rank[rank], figures.makespan_s
    parts_s = {"busy": row.busy_s, "wait": row.wait_s, "send": row.send_s}
    return {f"{prefix}{name}_share": part_s / makespan_s if makespan_s else None for name, part_s in parts_s.items()}


def _compare_memory(plan: Plan, measured: Timeline) -> dict[str, Any]:
    """Returns measured and predicted peak bytes of tensors, of the fullest worker or of a single process."""
    needs = plan.worker_bytes.values()
    is_shared = measured.shares_memory
    return {
        "of": "all workers" if is_shared else "the fullest worker",
        "measured_bytes": max(measured.peak_bytes, default=None),
        "predicted_bytes": (sum(needs) if is_shared else max(needs)) or None,
        "reserved_bytes": max(measured.reserved_bytes, default=None),
    }


def list_phase_figures(
    timelines: Mapping[int, Timeline], trained: Mapping[int, tuple[int, int]], drains: list[int]
) -> list[dict[str, Any]]:
    """Returns each phase's method, microbatches, begin and end, throughput, bubble."""
    rows = []
    for number, timeline in timelines.items():
        figures = measure_steady(cut_last_segment(timeline, drains)) if timeline.spans else None
        rows.append(
            {
                "schedule": timeline.name,
                "microbatches": timeline.minibatch_microbatches,
                "begin": trained[number][0],
                "end": trained[number][1],
                **{name: getattr(figures, name, None) for name in ("samples_per_s", "bubble")},
            }
        )
    return rows


def measure_steady(timeline: Timeline) -> metrics.Metrics:
    """Returns the metrics of the steady part of a run, or of all of it."""
    try:
        return metrics.steady_metrics(timeline)
    except ValueError:  # too short for a steady part
        return metrics.run_metrics(timeline)


def _format_command() -> str:
    """Returns the shell command that started this process; in a worker, the user's command."""
    program, *arguments = sys.argv or ("",)
    is_ours = Path(program).name == "pipedream" or Path(program).parts[-2:] == ("pipedream", "__main__.py")
    return shlex.join(["pipedream", *arguments] if is_ours else ["python", program, *arguments])


def list_versions() -> dict[str, str]:
    """Returns the versions of Python, platform and libraries."""
    libraries = {name: version(name) for name in ("torch", "numpy")}
    return {"python": platform.python_version(), "platform": platform.platform(), "pipedream": __version__, **libraries}


def gather_slowness(begin_times: CoreTimes) -> list[float]:
    """Returns each process's slowness since `begin_times`, 1 on free cores; every rank calls it."""
    now, group = CoreTimes.now(), process_group.world_group()
    rows = process_group.gather_json((platform.node(), now.run_s - begin_times.run_s), group)
    run_s = sum(run_s for node, run_s in rows if node == platform.node())
    return process_group.gather_json(begin_times.slowness_until(now, run_s), group)


def keep_plan(folder: Path, plan: Plan, profile: Profile | None) -> None:
    """Writes plan and profile into the run folder."""
    plan.save(folder / "plan.json")
    if profile is not None:
        profile.save(folder / "profile.json")


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder, of which applications make pages.

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


def write_run(folder: Path, files: RunFiles, run_folder: CheckpointStore | None = None) -> None:
    """Writes a run folder, the weights first; creates it if needed.

    Args:
        run_folder: where its checkpoints are; the files are copied there if that is not on disk.

    Raises:
        WorkerError: a file cannot be written.
    """
    run_folder = run_folder or LocalFolder(folder)
    try:
        if files.weights is not None:
            save_weights(folder / "weights.pt", files.weights)
        if files.average is not None:
            save_weights(folder / "weights_ema.pt", files.average)
        keep_plan(folder, files.plan, files.profile)
        files.predicted.save(folder / "predicted.json")
        files.steady.save(folder / "measured.json")
        write_text(folder / "losses.json", json.dumps(files.losses))
        write_text(folder / "summary.json", json.dumps(files.summary, indent=1) + "\n")
        for page in list_offers("run_page", "pipedream.apps"):  # here: the first minibatch need not wait for them
            page.write(folder, files)
        run_folder.write_files(folder)
    except (ArtifactError, OSError) as error:
        saved = find_newest_checkpoint(run_folder.within(CHECKPOINTS))
        advice = (
            "" if saved is None else f"{saved} is complete: with --resume {run_folder} only what is missing is done"
        )
        if not run_folder.on_disk:
            advice = f"the files are in {folder}; {advice}"
        raise WorkerError(0, "writing the run folder", str(error), advice) from None


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from, and its run folder, if any."""

    checkpoint: CheckpointStore
    manifest: Checkpoint
    folder: CheckpointStore | None

    def __str__(self) -> str:
        return str(self.checkpoint)

    @property
    def profile(self) -> Profile | None:
        if self.folder is None or not self.folder.has_file("profile.json"):
            return None
        path = self.folder.locate("profile.json")
        try:
            return Profile.from_json(self.folder.read_text("profile.json"), str(path))
        except (ArtifactError, OSError, ValueError) as error:
            text = f"going on without the profile {path} ({error}); the plan and the weights are not affected"
            if os.environ.get("RANK", "0") == "0":
                warnings.warn(text, stacklevel=2)
            return None

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(number, loss) of minibatches before the checkpoint, from the files that `write_losses` has written."""
        if self.folder is None:
            return []
        rows: list[tuple[int, float]] = []
        problems = []
        stop = self.manifest.minibatches
        for begin in range(0, stop, _FILE_LOSSES):
            name, numbers = _name_losses(begin), range(begin, min(begin + _FILE_LOSSES, stop))
            try:
                saved = json.loads(self.folder.read_text(name))
                pairs = [(int(number), float(loss)) for number, loss in saved if int(number) in numbers]
                # An earlier run in another folder may have the first ones.
                first = 0 if rows else len(numbers) - len(pairs)
                if not isinstance(saved, list) or [number for number, _ in pairs] != [*numbers[first:]]:
                    raise ValueError("some are missing")
            except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
                problems.append(f"{self.folder.locate(name)}: {error}")
                continue
            rows += pairs
        if problems:
            text = f"losses of the {stop} minibatches before the checkpoint are lacking"
            warnings.warn(f"{text} ({'; '.join(problems)}); the weights are not affected", stacklevel=2)
        return rows


def write_losses(folder: CheckpointStore, losses: Sequence[tuple[int, float]], begin: int, stop: int) -> None:
    """Writes the losses of minibatches begin <= number < stop into a run folder.

    Each file of losses/ has those of `_FILE_LOSSES` minibatches and is named by the first one, so that a save writes
    at most that many again, and a run that goes back replaces what it trains again.
    """
    for first in range(begin - begin % _FILE_LOSSES, stop, _FILE_LOSSES):
        rows = losses[bisect_left(losses, (first,)) : bisect_left(losses, (first + _FILE_LOSSES,))]
        folder.write_text(_name_losses(first), json.dumps(rows))


def _name_losses(first: int) -> str:
    return f"losses/{first:08d}.json"


def find_checkpoints(folder: Folder) -> list[CheckpointStore]:
    """Returns the complete checkpoints of a run folder or a folder of checkpoints, oldest first; or the given one.

    Raises:
        ArtifactError: there are none.
    """
    store = open_store(folder)
    for checkpoints in (list_checkpoints(store.within(CHECKPOINTS)), list_checkpoints(store)):
        if checkpoints:
            return checkpoints
    if (checkpoint := find_newest_checkpoint(store)) is not None:
        return [checkpoint]
    raise ArtifactError(f"there is no complete checkpoint in {folder}; give the run folder of a run that has saved one")


def find_resume_point(resume: str | os.PathLike[str] | None, out: str | os.PathLike[str] | None) -> ResumePoint | None:
    """Returns the requested checkpoint, or after a restart by a launcher the run's newest.

    Every rank calls it.

    Args:
        resume: a run folder, a folder of checkpoints, or a checkpoint, on disk or a URL; or None. The folder `out` may
            still be empty.

    Raises:
        ArtifactError: there is no complete checkpoint, or it is damaged.
    """
    group = process_group.world_group()
    # A machine that replaces another one counts no restart itself.
    is_restart = any(map(int, process_group.gather_texts(str(count_restarts()), group)))
    checkpoint = None
    if resume is not None:
        run = open_store(resume)
        here = find_newest_checkpoint(run.within(CHECKPOINTS)) or find_newest_checkpoint(run)
        checkpoint = find_newest_of_all(here, group)
    if out is not None and (is_restart or checkpoint is not None):
        continued = find_newest_of_all(find_newest_checkpoint(open_store(out).within(CHECKPOINTS)), group)
        if _continues(continued, checkpoint, group):
            checkpoint = continued
    if checkpoint is None:
        # The same command may start a run and continue it.
        if resume is None or (out is not None and open_store(out) == open_store(resume)):
            return None
        raise ArtifactError(
            f"there is no complete checkpoint in {resume} to resume from; give the run folder of a run that has saved "
            "one, or start without --resume"
        )
    if resume is not None:
        warn_of_unfinished(checkpoint, open_store(resume), int(os.environ.get("RANK", "0")))
    is_in_run = checkpoint.resolve().above().name == CHECKPOINTS
    manifest, _ = read_shared_manifest(checkpoint, group)
    return ResumePoint(checkpoint, manifest, checkpoint.above().above() if is_in_run else None)


def _continues(newest: CheckpointStore | None, first: CheckpointStore | None, group: Any) -> bool:
    """Returns whether a run folder's newest checkpoint continues `first`.

    Raises:
        ArtifactError: it is of another run.
    """
    if newest is None or first is None or newest.resolve().above() == first.resolve().above():
        return newest is not None and first is None
    drains, earlier = (read_shared_manifest(checkpoint, group)[0].drains for checkpoint in (newest, first))
    if drains[: len(earlier)] != earlier:
        raise ArtifactError(
            f"{first} was to be resumed, but the run folder holds {newest} of another run; give another folder (--out)"
        )
    return True


@contextmanager
def locked(folder: Path, rank: int) -> Iterator[None]:
    """Locks a run folder so that no other run writes into it. Every rank enters it.

    Raises:
        ArtifactError: another run does, or it cannot be written (on other ranks than 0 a `PlanError`).
    """
    locks: list[Lock] = []

    def lock() -> str:
        locks.append(LocalFolder(folder).lock())
        return ""

    joining.make_on_rank_0(lock, rank)
    try:
        yield
    finally:
        for folder_lock in locks:
            folder_lock.release()


def check_unused(folder: Folder) -> None:
    """Raises an `ArtifactError` if a run would overwrite the folder's checkpoints or results."""
    store = open_store(folder)
    if list_checkpoints(store.within(CHECKPOINTS)):
        raise ArtifactError(
            f"the run folder {folder} holds checkpoints of an earlier run; continue it (--resume {folder}), or "
            "give another folder (--out)"
        )
    for name in ("weights.pt", "summary.json"):
        if store.has_file(name):
            raise ArtifactError(f"the run folder {folder} holds {name} of an earlier run; give another folder (--out)")

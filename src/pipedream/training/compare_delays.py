"""Compares methods by their losses: trains a recipe by each, with its stale gradients, in turns in this one process.

In a plain process a `Pipeline` runs all stages, and gradients are exactly as stale as on several machines. Each method
is a run of ``pipedream train`` with its own run folder. A turn ends where the run drains anyway, so turns do not change
the losses.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipedream.callbacks import Callback
from pipedream.core.artifact import read_text, write_text
from pipedream.core.delay import DelayComparison, DelayedRun
from pipedream.core.errors import PlanError, WorkerError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.progress import format_time_left, progress as show_progress
from pipedream.core.schedule.phase import Phase, phases_text, read_phases
from pipedream.core.units import format_seconds
from pipedream.options import TrainingOptions, plain
from pipedream.plan_request import PlanRequest
from pipedream.recipe import Recipe, blaming, load_recipe
from pipedream.report.delay import delay_page
from pipedream.runtime.checkpoint.folders import list_checkpoints
from pipedream.runtime.update.compensation import check_optimizer
from pipedream.schedules import properties_of
from pipedream.training.compare_runs import make_folder_name
from pipedream.training.compare_variants import predict_samples_per_s
from pipedream.training.job import profile_recipe
from pipedream.training.loop import count_left
from pipedream.training.run_folder import CHECKPOINTS
from pipedream.training.train import train_recipe
from pipedream.workflows.plan import make_plan
from pipedream.workflows.prepare import build_phase

TURN_S = 20.0
"""A turn ends at the method's first drain after this many seconds."""

_CHECKPOINT_EVERY = 100  # minibatches, if the loader has no length
_STATE, _PAGE, _PROFILE = "compare.json", "compare.html", "profile.json"


def compare_delays(
    recipe: str,
    schedules: Sequence[str],
    options: TrainingOptions,
    cluster: Cluster,
    folder: Path,
    *,
    link: str = "",
    profile: Profile | None = None,
    turn_s: float = TURN_S,
    progress: Callable[[str], None] = lambda line: None,
) -> DelayComparison:
    """Trains a recipe by each method, and writes the comparison into a folder; continues one that it already holds.

    Args:
        recipe: a recipe's file. Its loggers are left out.
        schedules: methods, each perhaps with a compensation, as phases are written: 'pipedream+spike'. By default
            1F1B, 2BW and PipeDream, the latter two also with a compensation that fits the optimizer. If no method
            flushes, 1F1B is added as the first.
        options: microbatches, epochs, minibatches, seed, device and checkpoint_every are used. With a test loader a
            turn ends at an evaluation, otherwise at a checkpoint, by default of each epoch.
        cluster: a worker for each stage.
        link: the cluster's links in words.
        profile: for plans and predicted seconds; by default measured here.
        progress: called with a line after each turn.

    Raises:
        PlanError: no method has stale gradients, there are too few layers, or the folder has another comparison.
        ScheduleError: a compensation does not fit its method or the optimizer.
    """
    loaded = load_recipe(recipe, seed=options.seed or 0)
    phases = read_methods(schedules or _choose_methods(loaded))
    settings = {
        "recipe_sha256": sha256(loaded.source.encode()).hexdigest()[:12],
        "methods": [phases_text([phase]) for phase in phases],
        "link": f"{link}, {cluster.workers} stages",
        **{name: getattr(options, name) for name in ("microbatches", "epochs", "minibatches", "seed", "device")},
        "checkpoint_every": options.checkpoint_every,
    }
    rows = _read_state(folder, settings)
    file = folder / _PROFILE
    if not file.exists():
        with blaming("while its model was profiled on its first batch"):
            new = profile or profile_recipe(loaded, device=options.device, microbatches=options.microbatches)
        new.save(file)
    measured = Profile.load(file)
    plans = []
    for phase in phases:
        parts = options.microbatches if properties_of(phase.name).splits_minibatch else None
        request = PlanRequest(cluster, schedule=phase.name, microbatches=phase.microbatches or parts, shape="straight")
        plans.append(make_plan(measured, request))
    optimizer = loaded.optimizer(list(loaded.model.named_parameters()))
    for phase, plan in zip(phases, plans, strict=True):  # before any of them trains
        check_optimizer(build_phase(plan, phase).updates.compensation, optimizer)
    total = count_left(loaded.train, (0, 0), options.epochs or loaded.epochs, options.minibatches)
    if not rows and profile is None:
        compute_s = len(phases) * total * (measured.forward_s + measured.backward_s + measured.update_s)
        progress(f"{len(phases)} methods of {total or 'all'} minibatches each, {format_seconds(compute_s)} of compute")
    runs = [_start_run(phase, plan, rows, folder) for phase, plan in zip(phases, plans, strict=True)]
    comparison = DelayComparison(loaded.name, cluster.workers, measured.batch, link, tuple(runs))
    turns = _Turns(recipe, loaded, options, folder, turn_s, total)
    began_s, earlier_count = time.monotonic(), sum(len(run.losses) for run in runs)
    while unfinished := [number for number, run in enumerate(runs) if not run.is_finished]:
        number = min(unfinished, key=lambda number: len(runs[number].losses))
        runs[number] = run = turns.take(runs[number], phases[number], plans[number])
        comparison = replace(comparison, runs=tuple(runs))
        _write(folder, settings, comparison)
        done = sum(total if run.is_finished else len(run.losses) for run in runs) - earlier_count
        time_left = format_time_left(done, total * len(runs) - earlier_count, time.monotonic() - began_s)
        loss = f", loss {run.losses[-1]:.4f}" if run.losses else ""
        progress(f"{run.method}: {run.why or f'minibatch {len(run.losses)}{loss}{time_left}'}")
    _write(folder, settings, comparison)
    progress(str(folder / _PAGE))
    return comparison


def read_methods(schedules: Sequence[str]) -> tuple[Phase, ...]:
    """Reads methods with their compensation; one that flushes comes first. Raises a PlanError if all flush."""
    phases = [read_phases(text)[-1] for text in dict.fromkeys(schedules)]
    flushing = [phase for phase in phases if properties_of(phase.name).flushes]
    delayed = [phase for phase in phases if phase not in flushing]
    if not delayed:
        raise PlanError(
            f"--emulate-delay was asked for with {', '.join(schedules)}, which flush: no gradient is stale, and the "
            "losses are those of one process; name a method with stale gradients, such as pipedream"
        )
    return (*(flushing or [Phase("1f1b")]), *delayed)


def _choose_methods(recipe: Recipe) -> tuple[str, ...]:
    optimizer = str(plain({"optimizer": recipe.optimizer}))
    compensation = "nesterov" if "momentum" in optimizer else "error_feedback"
    if "adam" in optimizer.lower():
        compensation = "basis_rotation"
    delayed = ("pipedream_2bw", "pipedream")
    return ("1f1b", *delayed, *(f"{name}+{compensation}" for name in delayed))


def _read_state(folder: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the rows of the folder's comparison by method; empty without a comparison."""
    try:
        state = json.loads(read_text(folder / _STATE))
        saved, rows = state["settings"], {row["method"]: row for row in state["methods"]}
    except FileNotFoundError:
        if folder.exists() and any(path.name != _PROFILE for path in folder.iterdir()):
            raise PlanError(f"{folder} is not empty, and has no comparison to continue; name a new folder") from None
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PlanError(f"{folder / _STATE} holds no comparison of methods ({error}); name a new folder") from None
    for name, value in settings.items():
        if saved.get(name) != value:
            raise PlanError(
                f"{folder} has a comparison with {name} {saved.get(name)}, and {value} was asked for; give the same "
                "options to continue it, or a new folder"
            )
    return rows


def _start_run(phase: Phase, plan: Plan, rows: Mapping[str, Mapping[str, Any]], folder: Path) -> DelayedRun:
    """Returns a method's run after its earlier turns."""
    method = phases_text([phase])
    run = DelayedRun(method, properties_of(phase.name).flushes, predict_samples_per_s(plan))
    if (row := rows.get(method)) is None:
        return run
    losses = _read_losses(folder / make_folder_name(method), row["updates"])
    return replace(run, losses=losses, metrics=row["metrics"], is_finished=row["is_finished"], why=row["why"])


def _read_losses(folder: Path, max_count: int | None) -> tuple[float, ...]:
    try:
        return tuple(loss for _, loss in sorted(json.loads(read_text(folder / "losses.json")))[:max_count])
    except FileNotFoundError:
        return ()


def _write(folder: Path, settings: Mapping[str, Any], comparison: DelayComparison) -> None:
    state = {"settings": settings, "verdict": comparison.verdict, "methods": comparison.rows()}
    write_text(folder / _STATE, json.dumps(state, indent=1) + "\n")
    write_text(folder / _PAGE, delay_page(comparison))


class _Turn(Callback):
    """Stops a run at its first drain after the turn's seconds.

    Attributes:
        has_stopped: False if the run ended first.
    """

    def __init__(self, seconds: float, at_evaluations: bool, advance: Callable[[], None]) -> None:
        self.has_stopped = False
        self._end_s, self._at_evaluations, self._advance = time.monotonic() + seconds, at_evaluations, advance

    def on_minibatch(self, pipeline: Any, done: Any) -> None:
        self._advance()

    def on_evaluation(self, pipeline: Any, metrics: Mapping[str, float]) -> None:
        self._stop(pipeline, is_turn_end=self._at_evaluations)

    def on_checkpoint(self, pipeline: Any, folder: Path) -> None:
        self._stop(pipeline, is_turn_end=not self._at_evaluations)

    def _stop(self, pipeline: Any, *, is_turn_end: bool) -> None:
        if is_turn_end and time.monotonic() >= self._end_s:
            self.has_stopped = pipeline.should_stop = True


@dataclass(frozen=True)
class _Turns:
    """Runs the turns of a comparison.

    Attributes:
        loaded: the recipe; its own model is not trained.
        minibatches: all that a method trains; 0 if unknown.
    """

    recipe: str
    loaded: Recipe
    options: TrainingOptions
    folder: Path
    turn_s: float
    minibatches: int

    def take(self, run: DelayedRun, phase: Phase, plan: Plan) -> DelayedRun:
        """Trains a method for a turn; a failure ends its run.

        Raises:
            KeyboardInterrupt: Ctrl-C; the run will continue from its last regular checkpoint.
        """
        options, run_folder, begin_count = self.options, self.folder / make_folder_name(run.method), len(run.losses)
        earlier, has_test = list_checkpoints(run_folder / CHECKPOINTS), self.loaded.test is not None
        every = options.checkpoint_every
        if every is None and not has_test:
            every = count_left(self.loaded.train, (0, 0), 1, None) or _CHECKPOINT_EVERY
        remaining = self.minibatches - begin_count if self.minibatches else None
        with show_progress(f"{run.method} from minibatch {begin_count}", remaining) as advance:
            turn = _Turn(self.turn_s, has_test, advance)

            def make(seed: int) -> Recipe:
                loaded = load_recipe(self.recipe, seed=seed)
                return replace(loaded, callbacks=[*loaded.callbacks, turn], loggers=())

            try:
                summary = train_recipe(
                    make,
                    plan=plan,
                    schedule=phase.name,
                    compensation=phase.compensation,
                    epochs=options.epochs,
                    minibatches=options.minibatches,
                    checkpoint_every=every,
                    seed=options.seed or 0,
                    device=options.device,
                    out=run_folder,
                    resume=run_folder,
                    quiet=True,
                )
            except WorkerError as error:
                return replace(run, is_finished=True, why=str(error))
            except KeyboardInterrupt:
                # Ctrl-C has saved where an uninterrupted run does not drain.
                for checkpoint in list_checkpoints(run_folder / CHECKPOINTS)[-1:]:
                    if checkpoint not in earlier:
                        shutil.rmtree(str(checkpoint))
                raise
        losses = _read_losses(run_folder, options.minibatches)
        is_over = not turn.has_stopped or summary["epochs"] >= (options.epochs or self.loaded.epochs)
        is_over = is_over or (options.minibatches is not None and len(losses) >= options.minibatches)
        return replace(run, losses=losses, metrics=summary["metrics"], is_finished=is_over)

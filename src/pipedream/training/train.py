"""The main job: profile, plan, predict, train, measure, report; a recipe in, a run folder out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from pipedream.core.errors import PlanError, RecipeError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.phase import Phase, phases_text
from pipedream.pipeline import Pipeline
from pipedream.planner import SHAPES, counts_of
from pipedream.recipe import Recipe, blaming, make_recipe
from pipedream.runtime.checkpoint.files import load_weights
from pipedream.runtime.comm import process_group as process_group
from pipedream.runtime.data.batch_adapter import BatchAdapter
from pipedream.runtime.failure.launch import set_threads
from pipedream.runtime.failure.verdict import STUCK_AFTER_S
from pipedream.runtime.results.loggers import loggers_of
from pipedream.runtime.results.losses import Loss, is_torch_loss
from pipedream.schedules import canonical
from pipedream.training import resume as resuming
from pipedream.training.loop import Loop, Saving
from pipedream.training.run_folder import (
    keep_plan,
    last_segment,
    phase_figures,
    software_versions,
    summarise,
    write_run,
)
from pipedream.workflows import api
from pipedream.workflows.prepare import (
    all_flush,
    check_phases_fit,
    compensated,
    phases_of,
    planned_for,
)

__all__ = ["profile_recipe", "run", "train_recipe"]


def run(recipe: Callable[..., Recipe], **options: Any) -> dict[str, Any]:
    """Trains a recipe from its own file: ``if __name__ == "__main__": pipedream.run(recipe)``.

    In a plain process all workers run in this one (two, unless `workers` says otherwise); under torchrun
    this process is one of them. Takes the options of `train_recipe`. Returns the run's summary.
    """
    return train_recipe(lambda seed: make_recipe(recipe, seed=seed), **options)


def train_recipe(
    make: Callable[[int], Recipe],
    *,
    workers: int | None = None,
    schedule: str | None = None,
    phases: str | Sequence[Phase] | None = None,
    compensation: Any = None,
    plan: Plan | None = None,
    shape: str | tuple[int, ...] = "pipeline",
    update_delay: int = 0,
    recompute: bool = False,
    in_flight: str | tuple[int, ...] = "noam",
    chunks: int | None = None,
    microbatches: int | None = None,
    allow_asynchronous: bool = False,
    epochs: int | None = None,
    minibatches: int | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int | None = None,
    keep: int = 2,
    resume: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    device: str = "cpu",
    cluster: Cluster | None = None,
    weights: str | None = None,
    out: str | os.PathLike[str] | None = None,
    logs: tuple[str, ...] = (),
    quiet: bool = False,
    stuck_after_s: float = STUCK_AFTER_S,
) -> dict[str, Any]:
    """Profiles, plans, trains and reports a recipe.

    Args:
        make: from a seed to the recipe.
        workers: of the run; under torchrun the number of processes.
        schedule: a method's name; that of `plan`, or PipeDream's own, unless said. 'auto' takes the fastest by
            simulation, see `pipedream.plan`.
        phases: as of `Pipeline`, in place of schedule and microbatches; the recipe's unless said. The plan is made for
            the first of them that does not flush.
        compensation: as of `Pipeline`; the recipe's unless said, where a method does not flush.
        plan: made before; None profiles the model here and plans.
        shape: what to plan, see `pipedream.plan`; 'pipeline' and 'any' use all workers.
        update_delay: 1 puts the updates of replicated stages behind their next forward.
        recompute: every stage does its forward again in its backward; False leaves it to the plan.
        in_flight: depth: 'noam', 'full', 'auto' or counts.
        chunks: stages of each worker, for methods that put several on one.
        microbatches: parts of a minibatch, for methods that split it; those of `plan` unless said.
        allow_asynchronous: 'auto' may take a method whose gradients are late.
        epochs, minibatches: how long; the recipe's epochs, all their minibatches, unless said.
        evaluate_every: epochs between evaluations (each drains the pipeline); 0 evaluates at the end only.
        checkpoint_every: minibatches between checkpoints (each drains the pipeline); None saves where it is drained for
            an evaluation, 0 never. They lie in the run folder, under ``checkpoints``.
        keep: how many of them are left.
        resume: run folder or checkpoint to go on from. What is not said here (schedule and its compensation, phases,
            plan, microbatches, seed) is the checkpoint's; for another number of workers a new plan is made. A
            launcher's restart goes on from the newest checkpoint of its run folder by itself.
        seed: of the recipe and of everything random inside the layers; 0 unless said.
        device: 'cpu' or 'cuda'.
        cluster: workers and links; None takes this machine.
        weights: file of a state dict to start from.
        out: run folder; None makes one under ``runs/``, or goes on in the folder of `resume`.
        logs: loggers to write into it: 'csv', 'tensorboard'.
        quiet: print nothing.
        stuck_after_s: as of `Pipeline`.

    Raises:
        PipelineError: see the errors of each part; KeyboardInterrupt: Ctrl-C, after what was admitted has been
            finished and the run folder written.
    """
    began = time.perf_counter()
    place = process_group.device_of(device)
    rank, processes = process_group.join(place)
    set_threads(processes)
    console = Console(quiet=quiet or rank != 0, highlight=False, markup=False, soft_wrap=True)
    start = resuming.find(resume, out, rank)
    if schedule and schedule != "auto":
        schedule = canonical(schedule)
    asked = schedule, microbatches
    if start is not None and weights is not None:
        raise RecipeError("weights and a checkpoint to resume were both given; a checkpoint has its own weights")
    if start is None and plan is not None:
        schedule, microbatches = plan.method(schedule, microbatches)
    schedule, microbatches, seed = resuming.settings(start, schedule, microbatches, seed)
    if workers is None and plan is None and shape in SHAPES and start is not None and processes == 1:
        workers = start.page.plan.workers
    count = _workers(workers, plan, shape, processes)
    recipe = make(seed)
    chosen = _phases(phases, asked, start, recipe)
    if chosen:
        schedule, microbatches = planned_for(chosen).name, planned_for(chosen).microbatches
        if compensation is None and start is not None and phases is None:
            compensation = start.page.phases_compensation
    elif compensation is None and start is not None and schedule == start.page.schedule:
        compensation = start.page.compensation
    if recipe.target is not None and recipe.target[0] not in {"loss", *recipe.metrics}:
        raise RecipeError(
            f"the recipe's target is on {recipe.target[0]!r}, its metrics are {sorted(recipe.metrics)}; name one "
            "of them, or 'loss'"
        )
    folder = Path(
        process_group.from_rank_0(lambda: str(out or (start and start.folder) or _new_folder(recipe.name)), rank)
    )
    if start is None:
        resuming.check_unused(folder)
    profile = None
    if start is not None:
        profile = start.profile
        same = start.page.plan.workers == count and shape == "pipeline" and not update_delay
        plan = plan or (start.page.plan if same else None)
    if plan is None:
        with blaming("while its model was profiled on its first batch"):
            profile = profile or profile_recipe(recipe, device=str(place), seed=seed)
        plan = api.plan(
            profile,
            cluster or Cluster.here(count),
            schedule=schedule,
            microbatches=microbatches,
            in_flight=in_flight,
            shape=shape,
            update_delay=update_delay,
            all_workers=True,
            chunks=chunks,
            allow_asynchronous=allow_asynchronous,
        )
        console.print(f"\n{profile}")
    elif in_flight != "noam":
        plan = plan.with_depth(in_flight)
    if recompute:
        plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    if schedule == "auto":
        schedule, microbatches = plan.method(None, microbatches)
    turns = chosen or (Phase(schedule, microbatches=microbatches),)
    if compensation is None and not all_flush(plan, turns):
        # Asked for here it is refused by a method that flushes; in a recipe it is for the methods that do not.
        compensation = recipe.compensation
    check_phases_fit(plan, compensated(plan, turns, compensation), profile)
    if rank == 0:
        keep_plan(folder, plan, profile)  # a run that goes on with fewer workers plans again
    loggers = loggers_of(logs, folder) if rank == 0 else []
    with blaming("while the pipeline was put together"):
        made = _pipeline(recipe, plan, turns, compensation, seed, str(place), loggers, stuck_after_s)
    with made as pipeline:
        proofs = "\n\n".join(str(found.proof) for found in pipeline.prepared)
        console.print(f"\n{plan}\n\n{proofs}\n")
        if weights is not None:
            pipeline.load_state_dict(load_weights(weights))
        if checkpoint_every != 0 and not resuming.is_shared(folder, rank):
            if checkpoint_every is not None:
                raise PlanError(
                    f"checkpoints every {checkpoint_every} minibatches were asked for, but not all machines see "
                    f"the folder {folder}; choose one that they share (--out), or none (--checkpoint-every 0)"
                )
            console.print(f"no checkpoints are made, for not all machines see the folder {folder}\n")
            checkpoint_every = 0
        saving = Saving(folder / resuming.CHECKPOINTS, checkpoint_every, keep)
        work = Loop(pipeline, recipe, console, evaluate_every, saving)
        if start is not None:
            pipeline.load(start.path)
            work.losses = start.losses
            console.print(f"going on from {start.path}: minibatch {start.page.minibatches}, epoch {start.page.epoch}\n")
        interrupted = work.train(epochs or recipe.epochs, minibatches)
        spans = pipeline.trained or {len(pipeline.phases) - 1: (pipeline.drain(),) * 2}  # nothing may have been left
        timelines = {number: pipeline.timeline(number) for number in sorted(spans)}
        sent = pipeline.sent_bytes()
        state = pipeline.state_dict()
        average = pipeline.state_dict(ema=True) if recipe.ema is not None else None
        rates, skipped = pipeline.learning_rates(), pipeline.skipped_updates()
        # The report tells of the phase that most minibatches were trained in, of those whose spans are still known.
        longest = max(spans, key=lambda number: (bool(timelines[number].spans), spans[number][1] - spans[number][0]))
        program, steady = pipeline.prepared[longest].program, last_segment(timelines[longest], pipeline.drains)
        predicted = api.simulate_program(program, max(steady.microbatches, 4 * program.cycle * max(plan.in_flight)))
    summary = summarise(
        plan=plan,
        predicted=predicted,
        measured=steady,
        sent_bytes=sent,
        learning_rates=rates,
        samples_per_s=work.samples_per_s,
    )
    summary |= work.figures() | {
        "seconds": time.perf_counter() - began,
        "interrupted": interrupted,
        "skipped_updates": list(skipped),
        "schedule": phases_text(pipeline.phases) if chosen else program.schedule,
        "phases": phase_figures(timelines, spans, pipeline.drains),
        "resumed_from": None if start is None else start.page.minibatches,
        "configuration": {
            "workers": plan.workers,
            "processes": processes,
            "schedule": program.schedule,
            "compensation": [str(one) for one in program.updates.compensation],
            "phases": phases_text(pipeline.phases) if chosen else None,
            "microbatches": program.microbatches,
            "in_flight": list(plan.in_flight),
            "depth": plan.depth,
            "recompute": [stage.recompute for stage in plan.stages],
            "epochs": epochs or recipe.epochs,
            "minibatches": minibatches,
            "evaluate_every": evaluate_every,
            "checkpoint_every": checkpoint_every,
            "seed": seed,
            "device": str(place),
            "weights": weights,
            "clip_grad_norm": recipe.clip_grad_norm,
            "clip": recipe.clip,
            "ema": recipe.ema,
            "autocast": None if recipe.autocast is None else str(recipe.autocast),
        },
        "recipe": recipe.name,
        "seed": seed,
        "versions": software_versions(),
    }
    if rank == 0:
        for logger in loggers:
            logger.close()
        write_run(
            folder, summary, plan, profile, predicted, list(timelines.values()), steady, work.losses, state, average
        )
        _say(console, summary, folder)
    if interrupted:
        raise KeyboardInterrupt
    return summary


def profile_recipe(
    recipe: Recipe,
    *,
    device: str = "cpu",
    as_device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    runs: int = 10,
) -> Profile:
    """Profiles a recipe's model on its first training batch, with its loss and its optimizer."""
    batch = recipe.first_batch()
    loss = Loss(recipe.loss, recipe.weight)
    _, targets = BatchAdapter(recipe.inputs, recipe.targets, is_torch_loss(recipe.loss))(batch)
    return api.profile(
        recipe.model,
        _model_input(recipe, batch),
        loss=lambda output: loss.value(output, targets),
        optimizer=recipe.optimizer,
        device=device,
        as_device=as_device,
        dtype=dtype,
        autocast=recipe.autocast,
        seed=seed,
        runs=runs,
    )


def _workers(workers: int | None, plan: Plan | None, shape: str | tuple[int, ...], processes: int) -> int:
    config, wanted = "", 0
    if plan is not None:
        config, wanted = plan.config, plan.workers
    elif shape not in SHAPES:
        counts = counts_of(shape)
        config, wanted = "-".join(map(str, counts)), sum(counts)
    count = workers or wanted or (processes if processes > 1 else 2)
    if processes > 1 and count != processes:
        raise PlanError(f"{count} workers were asked for, {processes} processes were started; make the numbers equal")
    if wanted not in (0, count):
        raise PlanError(f"the plan {config} is for {wanted} workers, {count} were asked for; plan again for {count}")
    return count


def _phases(
    phases: str | Sequence[Phase] | None,
    asked: tuple[str | None, int | None],
    start: resuming.Start | None,
    recipe: Recipe,
) -> tuple[Phase, ...]:
    """Returns the phases of the run: what is said, else the checkpoint's, else the recipe's; none for one method."""
    if phases is None and asked[0] is None:
        phases = recipe.phases
        # Text does not say all: a Schedule object is the recipe's. Of a run of one method the checkpoint has none.
        if start is not None and not (phases and phases_text(phases_of(None, None, phases)) == start.page.phases):
            phases = start.page.phases
    return phases_of(*asked, phases) if phases else ()


def _pipeline(
    recipe: Recipe,
    plan: Plan,
    phases: tuple[Phase, ...],
    compensation: Any,
    seed: int,
    device: str,
    loggers: Iterable[Any],
    stuck_after_s: float,
) -> Pipeline:
    return Pipeline(
        recipe.model,
        plan,
        phases=phases,
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        compensation=compensation,
        metrics=recipe.metrics,
        inputs=recipe.inputs,
        targets=recipe.targets,
        weight=recipe.weight,
        scheduler=recipe.scheduler,
        clip_grad_norm=recipe.clip_grad_norm,
        clip=recipe.clip,
        ema=recipe.ema,
        autocast=recipe.autocast,
        on_nan=recipe.on_nan,
        grad_scaler=recipe.grad_scaler,
        seed=seed,
        device=device,
        sample=None if _names_layers(plan) else _sample(recipe),
        loggers=loggers,
        stuck_after_s=stuck_after_s,
    )


def _names_layers(plan: Plan) -> bool:
    return sum(len(stage.names) for stage in plan.stages) == plan.stages[-1].last


def _sample(recipe: Recipe) -> Any:
    return _model_input(recipe, recipe.first_batch())


def _model_input(recipe: Recipe, batch: Any) -> Any:
    if recipe.sample is not None:
        return recipe.sample
    return BatchAdapter(recipe.inputs).input_of(batch)


def _new_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _say(console: Console, summary: dict[str, Any], folder: Path) -> None:
    results = ", ".join(f"{name} {value:.4g}" for name, value in summary["metrics"].items())
    rate = summary["throughput"]
    console.print(
        f"\ntest: {results or 'not evaluated'}"
        f"\nthroughput: {rate['measured_per_s']:.4g} samples/s measured, {rate['predicted_per_s']:.4g} predicted"
        f"\nbubble: {summary['bubble']['measured']:.1%} measured, {summary['bubble']['predicted']:.1%} predicted"
        f"\nseconds: {summary['seconds']:.1f}"
        + (
            f", to the target {summary['seconds_to_target']:.1f}"
            if summary["seconds_to_target"] is not None
            else ", target not reached"
            if summary.get("target")
            else ""
        )
        + f"\nrun folder: {folder} (open report.html in a browser, trace.json in Perfetto)"
    )
    sys.stdout.flush()

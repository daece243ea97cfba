"""The main job: a recipe in, a run folder out. Resolve, plan, run, report."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from hashlib import sha256
from operator import mul
from typing import Any

from pipedream.apps.training import run_folder
from pipedream.apps.training.job import Job, PlannedJob, Process, make_model_input, plan_job, resolve
from pipedream.apps.training.loop import CheckpointPolicy, TrainingLoop
from pipedream.apps.training.options import TrainingOptions
from pipedream.apps.training.recipe import Recipe, blaming, make_recipe
from pipedream.apps.training.slow_ranks import SlowRanks
from pipedream.apps.training.summary_text import collectives_text, failures_text, slowness_text
from pipedream.core.errors import RecipeError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import Timeline
from pipedream.core.units import MUCH_SLOWER, format_bytes, format_number
from pipedream.metrics import run_metrics
from pipedream.options import ChoiceOptions, keywords, model_options, plain
from pipedream.pipeline import Pipeline
from pipedream.runtime.comm import process_group
from pipedream.services.checkpoint.folders import find_ranks_that_see
from pipedream.services.failure.guard import guard_job
from pipedream.services.failure.restarts import check_code_stays, count_restarts, keep_plan_of_attempt
from pipedream.services.failure.same_settings import check_same_settings, describe_data
from pipedream.services.failure.simulated_fault import FaultInjector, SimulatedFault
from pipedream.services.joining import joining
from pipedream.services.loggers.loggers import make_loggers
from pipedream.services.phases.phases import phases_text
from pipedream.services.probe.core_times import CoreTimes
from pipedream.simulator import Stragglers
from pipedream.workflows.simulate import simulate_program

_LONGEST = 8192
"""Most microbatches of a run that are simulated; a steady state of thousands is that of all."""


@keywords(TrainingOptions)
def run(recipe: Callable[..., Recipe], options: TrainingOptions) -> dict[str, Any]:
    """Trains a recipe from its own file: ``if __name__ == "__main__": pipedream.run(recipe)``.

    In a plain process all workers run in this one (two by default); under torchrun this process is one of them.

    Args:
        recipe: returns the recipe; called with ``seed=`` if it takes one.
        options: keyword arguments, see `TrainingOptions`.

    Returns the run's summary. Raises as `train_recipe`.
    """
    return train_recipe(lambda seed: make_recipe(recipe, seed=seed), **vars(options))


@keywords(TrainingOptions)
def train_recipe(make: Callable[[int], Recipe], options: TrainingOptions) -> dict[str, Any]:
    """Profiles, plans, trains and reports a recipe. Returns the run's summary.

    Args:
        make: seed -> recipe.
        options: keyword arguments, see `TrainingOptions`.

    Raises:
        PipelineError: see the errors of each part.
        KeyboardInterrupt: Ctrl-C or SIGTERM, once the minibatches in flight are done and the run folder is written.
    """
    process = Process.join(options)
    with guard_job(process.rank, process.count) as activity:
        joining.check_same_software()
        activity.doing = "preparing the run"
        job = resolve(make, options, process)
        check_same_settings(_collect_shared_settings(job), process_group.world_group())
        check_code_stays(job.recipe.source, process.rank)
        with run_folder.locked(job.folder, process.rank):
            if not count_restarts() and not job.is_resumed_in_place:
                run_folder.check_unused(job.run_folder)
            policy = _choose_checkpoint_policy(job, process)
            planned = plan_job(job, process)
            files, interrupt = run_job(planned, process, policy)
            activity.doing = "writing the run folder"
            if process.rank == 0:
                run_folder.write_run(job.folder, files, job.run_folder)
                _print_result(process, files.summary, job)
        process_group.wait_for_all()  # the others watch rank 0 until its last file is written
    if interrupt is not None:
        raise interrupt
    return files.summary


@keywords(TrainingOptions)
def check_trains(recipe: Recipe, options: TrainingOptions) -> None:
    """Builds a recipe's pipeline in this process, which trains nothing.

    Raises:
        PipelineError: what keeps the recipe from training with these options.
    """
    process = Process.join(options)
    planned = plan_job(resolve(lambda seed: replace(recipe, loggers=()), options, process), process)
    with _build_pipeline(planned, str(process.device)) as pipeline:
        _check_evaluations(pipeline, recipe, options)


def _collect_shared_settings(job: Job) -> dict[str, str]:
    """Returns settings of the run that must be equal on all ranks; the pipeline compares its own."""
    options, recipe = job.options, job.recipe
    return {
        "the recipe's file": recipe.source,
        "seed": str(job.seed),
        "epochs": str(job.epochs),
        "minibatches": str(options.minibatches),
        "evaluate_every": str(options.evaluate_every),
        "checkpoint_every": str(options.checkpoint_every),
        "the training data": describe_data(recipe.train),
        "the test data": describe_data(recipe.test),
        "target": str(recipe.target),
    }


def run_job(
    planned: PlannedJob, process: Process, policy: CheckpointPolicy
) -> tuple[run_folder.RunFiles, KeyboardInterrupt | None]:
    """Trains a planned job, from its checkpoint if resumed; returns its run folder's files, and what interrupted it."""
    job, plan = planned.job, planned.plan
    options, recipe, console = job.options, job.recipe, process.console
    if process.rank == 0:
        run_folder.keep_plan(job.folder, plan, planned.profile)  # a restart with fewer workers may need them
        job.run_folder.write_files(job.folder)
    with _build_pipeline(planned, str(process.device)) as pipeline:
        proofs = "\n".join(str(phase.proof).partition("\n")[0] for phase in pipeline.prepared)
        console.print(f"\n{plan}\n\n{proofs}\n")
        for phase in pipeline.prepared:
            if phase.proof.staleness_note:
                console.print(f"{phase.proof.staleness_note}\n")
        _check_evaluations(pipeline, recipe, options)
        if policy.every != 0:
            pipeline.check_savable()
        simulated = _simulate_run(pipeline.program, plan, in_turns=not pipeline.distributed)
        watches = _make_watches(pipeline, simulated, options, process)
        loop = TrainingLoop(pipeline, recipe, console, options.evaluate_every, policy, process.began_s, watches)
        if job.resumed is not None:
            pipeline.load(str(job.resumed))
            losses = job.resumed.losses if process.rank == 0 else []
            loop.resume(losses, in_place=job.is_resumed_in_place)
            manifest = job.resumed.manifest
            console.print(f"resuming from {job.resumed}: minibatch {manifest.minibatches}, epoch {manifest.epoch}\n")
        for callback in recipe.callbacks if planned.lost else ():
            callback.on_worker_lost(pipeline, planned.lost)
        if process.rank == 0:
            keep_plan_of_attempt(plan)  # the workers lost before it are not counted again
        predicted = run_metrics(simulated).samples_per_s
        begin_times = CoreTimes.now()
        interrupt = loop.train(job.epochs, options.minibatches, plan.batch / predicted if predicted else 0.0)
        slowness = run_folder.gather_slowness(begin_times)
        files = _collect_files(planned, process, loop, slowness if process.device.type == "cpu" else [1.0])
    files.summary.update(interrupted=interrupt is not None, seconds=time.perf_counter() - loop.began_s)
    return files, interrupt


def _build_pipeline(planned: PlannedJob, device: str) -> Pipeline:
    job, plan, options, recipe = planned.job, planned.plan, planned.job.options, planned.job.recipe
    names_layers = sum(len(stage.names) for stage in plan.stages) == plan.stages[-1].last
    with blaming("the recipe failed while the pipeline was built"):
        return Pipeline(
            recipe.model,
            plan,
            loss=recipe.loss,
            optimizer=recipe.optimizer,
            seed=job.seed,
            device=device,
            stuck_after_s=options.stuck_after_s,
            check=options.check,
            weights=options.weights,
            **model_options(recipe)
            | {
                "phases": planned.phases,
                "compensation": planned.compensation,
                "compile": job.compile,
                **dict.fromkeys(field.name for field in fields(ChoiceOptions)),  # the plan has these
                "loggers": [*recipe.loggers, *make_loggers(options.logs, job.folder)],
                "sample": None if names_layers else make_model_input(recipe, recipe.first_batch()),
            },
        )


def _make_watches(
    pipeline: Pipeline, simulated: Timeline, options: TrainingOptions, process: Process
) -> list[Callable[[int], None]]:
    """Returns what looks at each minibatch of a run: for a simulated fault, and for ranks that are slow."""
    watches = list[Callable[[int], None]]()
    if options.simulate_fault is not None:
        fault = SimulatedFault.parse(options.simulate_fault)
        watches.append(FaultInjector(fault, process.rank, process.count, count_restarts()).finish_minibatch)
    if pipeline.distributed:
        minibatches = simulated.microbatches / simulated.minibatch_microbatches
        profiled_s = [rank.busy_s / minibatches for rank in run_metrics(simulated).per_rank]
        watches.append(SlowRanks(pipeline, profiled_s, process.console).finish_minibatch)
    return watches


def _check_evaluations(pipeline: Pipeline, recipe: Recipe, options: TrainingOptions) -> None:
    """Raises a `RecipeError` if something depends on evaluations and this run makes none."""
    if pipeline.followed.needed_by and (recipe.test is None or not options.evaluate_every):
        missing = "the recipe has no test loader" if recipe.test is None else "evaluate_every=0 leaves only the last"
        raise RecipeError(
            f"{pipeline.followed.needed_by[0]} needs evaluations, but {missing}; evaluate after epochs, or leave it out"
        )


def _choose_checkpoint_policy(job: Job, process: Process) -> CheckpointPolicy:
    """Returns when and where checkpoints are made; warns if some machines do not see the run folder."""
    every, folder = job.options.checkpoint_every, job.run_folder
    if every != 0 and not all(find_ranks_that_see(folder, process.rank, process_group.world_group())):
        process.console.print(
            f"not all machines see the folder {folder}: each keeps its own part of a checkpoint; resume on the same "
            "machines, or put the parts together by 'pipedream checkpoint gather'\n"
        )
    return CheckpointPolicy(folder.within(run_folder.CHECKPOINTS), every, job.options.keep)


def _collect_files(
    planned: PlannedJob, process: Process, loop: TrainingLoop, slowness: list[float]
) -> run_folder.RunFiles:
    """Returns what goes into the run folder; only rank 0 has the weights. Every rank calls it.

    The prediction is simulated from the phase that trained most minibatches, and compared with the part after its last
    drain. On cores that did much other work, `slowness` gives a second prediction.
    """
    job, plan, pipeline = planned.job, planned.plan, loop.pipeline
    # `trained` is empty if nothing was left to train.
    trained = pipeline.trained or {len(pipeline.phases) - 1: (pipeline.drain(),) * 2}
    timelines = {number: pipeline.timeline(number) for number in sorted(trained)}
    # Only the later phases of a resumed run have spans.
    phase = max(trained, key=lambda number: (bool(timelines[number].spans), trained[number][1] - trained[number][0]))
    program, steady = pipeline.prepared[phase].program, run_folder.cut_last_segment(timelines[phase], pipeline.drains)
    # After Ctrl-C a launcher ends its workers soon: a million minibatches would take minutes, and change no figure.
    length = min(steady.microbatches, _LONGEST // program.cycle * program.cycle)
    simulate = partial(_simulate_run, program, plan, length, in_turns=not pipeline.distributed)
    if len(slowness) != plan.workers:  # all workers in a process, or several processes each
        slowness = [max(slowness)] * plan.workers
    predicted = simulate()
    slowed = simulate(slow=dict(enumerate(slowness))) if max(slowness) > MUCH_SLOWER else None
    summary = run_folder.summarise(pipeline, plan, predicted, steady, loop.samples_per_s, slowed)
    phases = phases_text(pipeline.phases) if job.phases else None
    summary |= loop.list_figures() | {
        "slowness": max(slowness),
        "skipped_updates": list(pipeline.skipped_updates()),
        "schedule": phases or program.name,
        "phases": run_folder.list_phase_figures(timelines, trained, pipeline.drains),
        "resumed_from": None if job.resumed is None else job.resumed.manifest.minibatches,
        "configuration": _describe_configuration(job, plan, program, process) | {"phases": phases},
        "recipe": job.recipe.name,
        "recipe_sha256": sha256(source.encode()).hexdigest()[:12] if (source := job.recipe.source) else None,
        "seed": job.seed,
        "versions": run_folder.list_versions(),
    }
    return run_folder.RunFiles(
        summary=summary,
        plan=plan,
        predicted=predicted,
        measured=list(timelines.values()),
        steady=steady,
        losses=loop.list_losses(),
        profile=planned.profile,
        weights=pipeline.state_dict(),
        average=pipeline.state_dict(ema=True) if job.recipe.ema is not None else None,
    )


def _describe_configuration(job: Job, plan: Plan, program: Program, process: Process) -> dict[str, Any]:
    return (
        plain(model_options(job.recipe))
        | plain(vars(job.options))
        | {
            "compile": job.compile,
            "workers": plan.workers,
            "processes": process.count,
            "schedule": program.name,
            "compensation": [str(rule) for rule in program.updates.compensation],
            "microbatches": program.microbatches,
            "in_flight": list(plan.in_flight),
            "depth": plan.depth_mode,
            "recompute": [stage.recompute for stage in plan.stages],
            "epochs": job.epochs,
            "seed": job.seed,
            "device": str(process.device),
        }
    )


def _simulate_run(
    program: Program, plan: Plan, microbatches: int = 0, *, in_turns: bool, slow: Mapping[int, float] | None = None
) -> Timeline:
    """Simulates a run long enough to fill the pipeline."""
    fill_cycles = -(-4 * max(map(mul, plan.in_flight, program.placement.replicas)) // program.cycle)
    total = max(microbatches, fill_cycles * program.cycle)
    return simulate_program(program, total, stragglers=Stragglers(slow=slow or {}), in_turns=in_turns)


def _print_result(process: Process, summary: dict[str, Any], job: Job) -> None:
    results = ", ".join(f"{name} {format_number(value)}" for name, value in summary["metrics"].items())
    rate, bubble, target = summary["throughput"], summary["bubble"], ""
    if summary["seconds_to_target"] is not None:
        target = f", to the target {summary['seconds_to_target']:.1f}"
    elif summary.get("target"):
        target = ", target not reached"
    memory = summary["memory"]
    peaks = {name: "?" if size is None else format_bytes(size) for name, size in memory.items() if name != "of"}
    cores_note = f" (for a core each, but {process.shares_cores})" if process.shares_cores else ""
    copied_note = "" if job.run_folder.on_disk else f", copied from {job.folder}"
    process.console.print(
        f"\ntest: {results or 'not evaluated'}"
        f"\nthroughput: {format_number(rate['measured_per_s'])} samples/s measured, "
        f"{format_number(rate['predicted_per_s'])} predicted"
        f"{cores_note}{slowness_text(summary)}"
        f"\nbubble: {bubble['measured']:.1%} measured, {bubble['predicted']:.1%} predicted"
        f"\npeak memory of {memory['of']}: {peaks['measured_bytes']} of tensors measured, {peaks['predicted_bytes']} "
        f"predicted; the process reserved {peaks['reserved_bytes']}"
        f"{collectives_text(summary['stages'])}"
        f"{failures_text(summary['failures'])}"
        f"\nseconds: {summary['seconds']:.1f}{target}"
        f"\nrun folder: {job.run_folder}{copied_note} (open report.html in a browser, trace.json in Perfetto)"
    )
    sys.stdout.flush()

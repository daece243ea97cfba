"""Chooses what a run trains, from options, checkpoint, plan and recipe, and plans it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from pipedream.apps.training.options import TrainingOptions
from pipedream.apps.training.recipe import Recipe, blaming
from pipedream.apps.training.run_folder import ResumePoint, find_resume_point
from pipedream.capture import Captured, capture
from pipedream.core.errors import PlanError, RecipeError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan, with_choices
from pipedream.core.plan.ranks import choose_layout, meshes_of, ranks_of
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.planner import parse_counts
from pipedream.runtime.comm.values import to_device
from pipedream.runtime.data.splitter import BatchAdapter
from pipedream.schedules import canonical, refuse_code
from pipedream.services.checkpoint.stores import open_store
from pipedream.services.checkpoint.stores.store import CheckpointStore
from pipedream.services.failure.launch import set_threads
from pipedream.services.failure.restarts import Survivors, find_survivors
from pipedream.services.joining import joining
from pipedream.services.loggers.loggers import make_loggers
from pipedream.services.losses.losses import Loss, find_loss, is_torch_loss
from pipedream.services.phases.phases import Phase, phases_text, read_phases
from pipedream.services.probe.probe import detect_cluster, measure_runtime
from pipedream.workflows import prepare
from pipedream.workflows.exclusions import check_options
from pipedream.workflows.methods import resolve_method
from pipedream.workflows.plan import make_plan
from pipedream.workflows.profile import MAX_RANKS, profile as profile_model

_SLOWEST = 5  # layers of a profile that are printed


@dataclass(frozen=True)
class Process:
    """This process of a run; only rank 0's console prints.

    Attributes:
        count: 1 if all workers run in this one.
        began_s: by `time.perf_counter`.
    """

    rank: int
    count: int
    device: Any
    console: Console
    began_s: float

    @property
    def shares_cores(self) -> str:
        """Says how many workers share how many cores; '' if each has its own, or a GPU."""
        cores, workers = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        return f"{workers} workers share {cores} cores" if workers > cores and self.device.type == "cpu" else ""

    @classmethod
    def join(cls, options: TrainingOptions) -> Process:
        began_s = time.perf_counter()
        device = joining.process_device(options.device)
        rank, count = joining.join_group(device, check_software=False)  # later, under guard_job
        set_threads(count)
        console = Console(quiet=options.quiet or rank != 0, highlight=False, markup=False, soft_wrap=True)
        return cls(rank, count, device, console, began_s)


@dataclass(frozen=True)
class Job:
    """The choices of a run that need no plan.

    Attributes:
        resumed: None for a new run.
        schedule: a method's name or file, or 'auto'; of several phases, the one that is planned for.
        phases: empty if the run has one method.
        compensation: None leaves it to the recipe and the methods.
        run_folder: the run folder, perhaps at a URL.
        folder: the run folder on disk, which is copied to `run_folder` if that is a URL.
    """

    options: TrainingOptions
    recipe: Recipe
    resumed: ResumePoint | None
    schedule: str
    microbatches: int | None
    phases: tuple[Phase, ...]
    compensation: Any
    seed: int
    workers: int
    run_folder: CheckpointStore
    folder: Path

    @property
    def epochs(self) -> int:
        return self.options.epochs or self.recipe.epochs

    @property
    def is_resumed_in_place(self) -> bool:
        folder = None if self.resumed is None else self.resumed.folder
        return folder is not None and folder == self.run_folder

    @property
    def compile(self) -> Any:
        return self.options.compile or self.recipe.compile


@dataclass(frozen=True)
class PlannedJob:
    """A job with its plan.

    Attributes:
        profile: None if the plan came without one.
        phases: one if the method does not change.
        compensation: for phases that do not flush and name none; or None.
        lost: ranks that the run continues without.
    """

    job: Job
    plan: Plan
    profile: Profile | None
    phases: tuple[Phase, ...]
    compensation: Any
    lost: tuple[int, ...] = ()


def resolve(make: Callable[[int], Recipe], options: TrainingOptions, process: Process) -> Job:
    """Chooses what to train: by the options, else the checkpoint, the plan, the recipe, the defaults.

    Raises PlanError, RecipeError or ArtifactError if these contradict each other.
    """
    check_options({"plan": options.plan} | options.choices.words | options.plan_settings)
    resumed = find_resume_point(options.resume, options.out)
    if options.schedule and options.schedule != "auto":
        options = replace(options, schedule=canonical(options.schedule))
    if resumed is not None and options.weights is not None:
        raise RecipeError("weights and a checkpoint to resume were both given; a checkpoint has its own weights")
    seed = options.seed if options.seed is not None else resumed.manifest.seed if resumed is not None else 0
    workers = _count_workers(options, resumed, process.count)
    recipe = make(seed)
    recipe = with_layout(recipe, options.layout, options.shard_weights)
    phases = _choose_phases(options, resumed, recipe)
    if phases:
        phase = prepare.choose_phase_to_plan(phases)
        schedule, microbatches = phase.name, phase.microbatches
    else:
        schedule, microbatches = _choose_method(options, resumed)
    if recipe.target is not None and recipe.target[0] not in {"loss", *recipe.metrics}:
        raise RecipeError(
            f"the recipe's target is on {recipe.target[0]!r}, its metrics are {sorted(recipe.metrics)}; name one "
            "of them, or 'loss'"
        )

    def choose_folder() -> str:
        resumed_folder = resumed.folder if resumed is not None else None
        return str(options.out or resumed_folder or Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")

    run_folder = open_store(joining.make_on_rank_0(choose_folder, process.rank))
    folder = run_folder.choose_local_folder()
    make_loggers(options.logs, folder)  # before anything is measured: a package may be missing
    return Job(
        options=options,
        recipe=recipe,
        resumed=resumed,
        schedule=schedule,
        microbatches=microbatches,
        phases=phases,
        compensation=_choose_compensation(options, resumed, phases, schedule),
        seed=seed,
        workers=workers,
        run_folder=run_folder,
        folder=folder,
    )


def with_layout(recipe: Recipe, rules: str | None, shard_weights: str | None) -> Recipe:
    """Returns the recipe with these rules for its dimension names, if any are given."""
    if rules is None and shard_weights is None:
        return recipe
    return replace(recipe, layout=choose_layout(recipe.layout, rules, shard_weights))


def plan_job(job: Job, process: Process) -> PlannedJob:
    """Plans a job: the given plan, the checkpoint's, or a new one; after a restart, the last one without lost workers.

    Raises a `PlanError` if none fits.
    """
    survivors = find_survivors()
    plan, lost = survivors.plan, survivors.lost
    if plan is not None and plan.ranks == job.workers:
        if job.resumed is None and job.options.schedule is None:
            job = replace(job, schedule=AUTO)  # the plan's
        lost_text = f" without rank{'s' * (len(lost) > 1)} {', '.join(map(str, sorted(lost)))}" if lost else ""
        try:
            planned = _choose_methods(job, plan, job.resumed.profile if job.resumed is not None else None)
            if lost:
                process.console.print(f"continuing with the plan {plan.config},{lost_text}")
                assert survivors.last_plan is not None
                _say_left_out(survivors.last_plan.choices, plan, process)
            return replace(planned, lost=lost)
        except (PlanError, ScheduleError) as error:
            process.console.print(f"the plan {plan.config}{lost_text} is not possible ({error}); planning again")
    return replace(_choose_methods(job, *_choose_plan(job, process, survivors)), lost=lost)


def _choose_plan(job: Job, process: Process, survivors: Survivors) -> tuple[Plan, Profile | None]:
    options, recipe = job.options, job.recipe
    plan, profile = options.plan, None
    saved = None
    if job.resumed is not None:
        profile, saved = job.resumed.profile, job.resumed.manifest.plan
        if plan is None and saved.ranks == job.workers and not any(options.plan_settings.values()):
            plan = saved
    # The runtime's costs are not measured again if a plan has them, given or from before a restart.
    timed_plan = survivors.last_plan or plan
    runtime = (timed_plan is not None and timed_plan.runtime) or _measure_runtime_costs(recipe, str(process.device))
    choices, is_given = _resolve_choices(job, plan, saved), plan is not None
    if plan is None:
        choices.check_device(process.device.type, saved if options.activations is None else None)
        meshes: Sequence[str] | str = tuple({mesh.text for mesh in meshes_of(options.single_mesh)} - {""})
        profiled = set() if profile is None else {rank.mesh for rank in profile.ranks}
        has_meshes = profiled.issuperset(meshes)
        if options.mesh == AUTO:
            meshes, has_meshes = f"{AUTO}:{min(max(job.workers, 2), MAX_RANKS)}", bool(profiled)
        if profile is None or not has_meshes:
            with blaming("the recipe failed while its model was profiled on its first batch"):
                profile = profile_recipe(
                    recipe,
                    device=str(process.device),
                    seed=job.seed,
                    microbatches=job.microbatches,
                    meshes=meshes,
                    runtime=runtime,
                )
        cluster = survivors.cluster or _choose_cluster(job, process)
        request = PlanRequest(
            cluster,
            schedule=job.schedule,
            microbatches=job.microbatches,
            in_flight=options.in_flight,
            shape=options.shape,
            update_delay=options.update_delay,
            all_workers=True,
            chunks=options.chunks,
            allow_asynchronous=options.allow_asynchronous and job.schedule == AUTO,
            mesh=options.mesh,
            **choices.words,
        )
        plan = make_plan(replace(profile, runtime=runtime), request)
        if survivors.lost:  # what the user asked for may have lost its meaning
            _say_left_out(options.choices, plan, process)
        else:
            options.choices.check(plan.replicas)
        is_short = options.verbose or len(profile.layers) <= _SLOWEST
        more = "\nall layers are in the report, and here with --verbose"
        process.console.print(f"\n{profile}" if is_short else f"\n{profile.describe(_SLOWEST)}{more}")
    elif options.in_flight != "noam":
        plan = plan.with_depth(options.in_flight)
    if is_given:
        moved = with_choices(plan, choices)
        plan = prepare.follow_moves(moved, plan, _list_phases(job, moved))
    return replace(plan, runtime=runtime).with_layout(recipe.layout), profile


def _say_left_out(choices: Choices, plan: Plan, process: Process) -> None:
    for name in choices.words.keys() - choices.on_replicas(plan.replicas).words:
        text = f"{name}={choices.words[name]} is left out"
        process.console.print(f"{text}: no stage of the plan {plan.config} has replicas")


def _resolve_choices(job: Job, plan: Plan | None, saved: Plan | None) -> Choices:
    """Returns what a plan is made with, or what is changed in a given one; a new run alone follows its recipe.

    Args:
        saved: the checkpoint's plan, for which `plan` stands if it is given.
    """
    recipe = None if saved is not None else Choices.resolve(recipe=job.recipe)
    if plan is None:
        return Choices.resolve(command=job.options, checkpoint=saved and saved.choices, recipe=recipe)
    recipe = recipe and recipe.on_replicas(plan.replicas)
    return Choices.resolve(command=job.options, plan=plan.choices, recipe=recipe)


def _list_phases(job: Job, plan: Plan) -> tuple[Phase, ...]:
    schedule, microbatches = job.schedule, job.microbatches
    if schedule == AUTO:
        schedule, microbatches = resolve_method(plan, None, microbatches)
    return job.phases or (Phase(schedule, microbatches=microbatches),)


def _choose_methods(job: Job, plan: Plan, profile: Profile | None) -> PlannedJob:
    phases, compensation = _list_phases(job, plan), job.compensation
    if compensation is None and not prepare.is_synchronous(plan, phases):
        # Methods that flush refuse a compensation asked of this run; the recipe's does not apply to them.
        compensation = job.recipe.compensation
    prepare.check_phases_fit(plan, prepare.add_compensation(plan, phases, compensation), profile)
    return PlannedJob(job, plan, profile, phases, compensation)


def _choose_cluster(job: Job, process: Process) -> Cluster:
    """Returns the given cluster, or that of this run's processes."""
    options = job.options
    cluster, message = options.cluster, ""
    if cluster is None:
        cluster, message = detect_cluster(str(process.device), workers=job.workers)
    if message:
        process.console.print(message)
    return cluster if options.memory_bytes is None else cluster.with_memory(lambda _: options.memory_bytes)


def profile_recipe(
    recipe: Recipe, *, device: str = "cpu", runtime: RuntimeCosts | None = None, **options: Any
) -> Profile:
    """Profiles a recipe's model on its first training batch, with loss, optimizer, loader and layout.

    Args:
        runtime: costs of the runtime and the loader; by default they are measured.
        options: others of `workflows.profile.profile`.
    """
    batch = recipe.first_batch()
    loss = make_batch_loss(recipe, batch, None if device == "meta" else joining.process_device(device))
    profile = profile_model(
        recipe.model,
        make_model_input(recipe, batch),
        loss=None if recipe.loss is None else loss,
        optimizer=recipe.optimizer,
        scheduler=recipe.scheduler,
        device=device,
        autocast=recipe.autocast,
        batch_dim=recipe.batch_dim,
        layout=recipe.layout,
        **options,
    )
    return profile if device == "meta" else replace(profile, runtime=runtime or _measure_runtime_costs(recipe, device))


def _measure_runtime_costs(recipe: Recipe, device: str) -> RuntimeCosts:
    """Measures the costs of the runtime and of the recipe's loader on these workers."""
    with blaming("the recipe failed while its training batches were made"):
        load_s = float(joining.run_on_rank_0(lambda: str(recipe.load_s()), device))
    costs = measure_runtime(device).costs
    return replace(costs, load_s=costs.load_s + load_s)


def capture_recipe(recipe: Recipe, *, device: str = "cpu", finest: bool = False) -> Captured:
    """Splits a recipe's model into layers, by running it on its first training batch."""
    with blaming("the recipe failed while its model was run on its first batch"):
        inputs = to_device(make_model_input(recipe, recipe.first_batch()), joining.process_device(device))
        if not any(parameter.is_meta for parameter in recipe.model.parameters()):
            recipe.model.to(joining.process_device(device))
        return capture(recipe.model, inputs, finest=finest)


def make_batch_loss(recipe: Recipe, batch: Any, device: Any) -> Callable[[Any], Any]:
    """Returns the recipe's loss of an output for a batch, whose targets go to the device (None: stay)."""
    loss = Loss(recipe.loss, recipe.weight)
    _, targets = BatchAdapter(recipe.inputs, recipe.targets, is_torch_loss(recipe.loss), recipe.loss is None)(batch)
    targets = targets if device is None else to_device(targets, device)
    return lambda output: find_loss(output) if recipe.loss is None else loss.value(output, targets)


def make_model_input(recipe: Recipe, batch: Any) -> Any:
    """Returns the recipe's sample, else the model's input in a batch."""
    if recipe.sample is not None:
        return recipe.sample
    return BatchAdapter(recipe.inputs, own_loss=recipe.loss is None).input_of(batch)


def _choose_method(options: TrainingOptions, resumed: ResumePoint | None) -> tuple[str, int | None]:
    schedule, microbatches = options.schedule, options.microbatches
    if resumed is None:
        if options.plan is not None:
            schedule, microbatches = resolve_method(
                options.plan, None if schedule == "auto" else schedule, microbatches
            )
        return schedule or "pipedream", microbatches
    manifest = resumed.manifest
    if microbatches is None and schedule in (None, manifest.schedule) and manifest.microbatches > 1:
        microbatches = manifest.microbatches
    if schedule is None:
        refuse_code(manifest.schedule, f"the checkpoint {resumed}")
    return schedule or manifest.schedule, microbatches


def _count_workers(options: TrainingOptions, resumed: ResumePoint | None, processes: int) -> int:
    """Returns the number of ranks. Raises a `PlanError` if options, plan and processes disagree."""
    requested, ranks = options.workers, replace(options, cluster=None).count_ranks() or 0
    if requested is None and not ranks:
        if options.cluster is not None:
            requested = options.cluster.workers
        elif resumed is not None and processes == 1:
            requested = resumed.manifest.plan.ranks
    count = requested or ranks or (processes if processes > 1 else ranks_of(options.single_mesh))
    if processes > 1 and count != processes:
        hint = "; torchrun's --nnodes does not count spare machines" if count < processes else ""
        origin = "are those of the cluster" if options.workers is None and options.cluster else "were asked for"
        raise PlanError(f"{count} workers {origin}, {processes} processes were started; make the numbers equal{hint}")
    if ranks not in (0, count):
        plan_size = f"with the mesh {options.mesh} is for {ranks} ranks" if options.mesh else f"is for {ranks} workers"
        config = options.plan.config if options.plan is not None else "-".join(map(str, parse_counts(options.shape)))
        raise PlanError(f"the plan {config} {plan_size}, {count} were asked for; plan again for {count}")
    if options.cluster is not None and options.cluster.workers != count:
        raise PlanError(
            f"the cluster has {options.cluster.workers} workers, {count} were asked for; start as many as it has, or "
            "give another cluster"
        )
    return count


def _choose_phases(options: TrainingOptions, resumed: ResumePoint | None, recipe: Recipe) -> tuple[Phase, ...]:
    phases = options.phases
    if phases is None and options.schedule is None:
        phases = recipe.phases
        # A checkpoint keeps phases as text, which cannot hold a Schedule object: the recipe's are taken if their text
        # is the same. A run of one method has saved none.
        if resumed is not None:
            saved_text = resumed.manifest.phases
            if not phases or phases_text(prepare.read_run_phases(None, None, phases)) != saved_text:
                phases = saved_text
                for phase in read_phases(saved_text) if saved_text else ():
                    refuse_code(phase.name, f"the checkpoint {resumed}")
    return prepare.read_run_phases(options.schedule, options.microbatches, phases) if phases else ()


def _choose_compensation(
    options: TrainingOptions, resumed: ResumePoint | None, phases: tuple[Phase, ...], schedule: str
) -> Any:
    if options.compensation is not None or resumed is None:
        return options.compensation
    if phases:
        return resumed.manifest.phases_compensation if options.phases is None else None
    return resumed.manifest.compensation if schedule == resumed.manifest.schedule else None

"""`pipedream train`."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream.cli.options import (
    AllowAsynchronous,
    AtRest,
    Chunks,
    ClusterName,
    Config,
    DataParallel,
    Depth,
    Device,
    Json,
    LayoutRules,
    Microbatches,
    RecipeFile,
    Straight,
    UpdateDelay,
    check_flags,
    cluster_of,
    depth_of,
    memory_of,
    print_json,
    shape_of,
)
from pipedream.cli.shared.workers import importing_torch, is_rank_0, is_worker, start_workers
from pipedream.core.errors import PipelineError, ScheduleError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.mesh import meshes_of, ranks_of
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.phase import read_phases
from pipedream.core.schedule.schedule import Schedule as ScheduleObject
from pipedream.options import TrainingOptions
from pipedream.planner import parse_counts
from pipedream.schedules import build, is_torch_csv, load_torch_csv, refuse_code, uniform

_METHOD, _CLUSTER, _MESH, _RUN, _FAILURES = "Method", "Cluster", "Mesh", "Run", "Failures"
_MEASURED = "this machine's, or measured between several"

Workers = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", show_default="the plan's, or 2", help="Number of local worker processes."),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[OPTION=VALUE,...]|FILE",
        rich_help_panel=_METHOD,
        show_default="the plan's own, or pipedream",
        help="The method: a name from 'pipedream schedules', a schedule in PyTorch's notation (FILE.csv), or FILE.py; "
        "'auto' chooses the fastest by simulation.",
    ),
]
Compensation = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:NUMBER]",
        rich_help_panel=_METHOD,
        show_default="the recipe's",
        help="Compensation of late gradients: spike, nesterov, error_feedback, t1:500 (smaller rates for the first 500 "
        "updates), ... or none; repeatable.",
    ),
]
Phases = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD[/M][+COMPENSATION]:END,...",
        rich_help_panel=_METHOD,
        help="Methods to train with in turn. M is the number of microbatches; END is the minibatch at which the method "
        "ends, or the epoch if an 'e' follows. For example 1f1b/4:200,pipedream:3e,1f1b/4.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default="profile the model and plan here", help="Plan to run, from 'pipedream plan -o'."
    ),
]
MeshText = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="auto|none|NAME:RANKS[,...][/...]",
        rich_help_panel=_MESH,
        show_default="none, one rank",
        help="Mesh of the ranks of every worker, e.g. model:2, or one for each stage, e.g. data:2/model:2/-; auto "
        "plans meshes with cuts and replicas. --workers then counts ranks, --config workers.",
    ),
]
Bandwidth = Annotated[
    list[str] | None,
    typer.Option(
        metavar="B [B ...]",
        rich_help_panel=_CLUSTER,
        show_default=_MEASURED,
        help="Bandwidth of a link in one direction, e.g. 1e9 (bytes/s) or 10Gbit/s; or two values, within and between "
        "machines.",
    ),
]
Latency = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        rich_help_panel=_CLUSTER,
        show_default=_MEASURED,
        help="One-way latency of a message.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        rich_help_panel=_CLUSTER,
        show_default="what the machines have, or no limit if links are given",
        help="Memory per worker, e.g. 16GB.",
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute",
        rich_help_panel="Shape of the plan",
        help="Make every stage keep only its input and repeat the forward before the backward, like 'pipedream plan "
        "--recompute always'. Without this flag the plan decides.",
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", rich_help_panel=_RUN, help="Compile the modules that lie within one stage with torch.compile."
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        rich_help_panel=_RUN,
        help="Compare the first minibatch (loss, gradients, buffers) with the model itself.",
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=_RUN, show_default="the recipe's", help="Epochs to train."),
]
Minibatches = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", rich_help_panel=_RUN, show_default="no limit", help="Stop after this many minibatches."
    ),
]
EvaluateEvery = Annotated[
    int,
    typer.Option(min=0, metavar="EPOCHS", rich_help_panel=_RUN, help="Epochs between evaluations; 0: only at the end."),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="MINIBATCHES",
        rich_help_panel=_RUN,
        show_default="at each evaluation",
        help="Minibatches between checkpoints; 0: no checkpoints.",
    ),
]
Keep = Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=_RUN, help="Number of checkpoints to keep.")]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_RUN,
        help="Continue a run: its run folder, or one of its checkpoints. The folder of --out may still be empty.",
    ),
]
TrainSeed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_RUN,
        show_default="0, or the resumed run's",
        help="Random seed for the recipe and all layers.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=_RUN,
        help="Weights to start from: a state dict, safetensors, or a folder with the latter.",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        rich_help_panel=_RUN,
        show_default="a new one in runs/",
        help="Run folder; or a URL such as s3://bucket/run, to which checkpoints and, at the end, all files go.",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        "--log",  # torchrun refuses it, as short for options of its own
        metavar="csv|tensorboard|wandb|mlflow",
        rich_help_panel=_RUN,
        help="Also log to the run folder, or to a service by its own package; repeatable.",
    ),
]
StuckAfter = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        rich_help_panel=_FAILURES,
        help="End the run if an op or the data loader takes longer than this; 0: never.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", rich_help_panel=_FAILURES, help="Restart the workers after a failure, at most N times."
    ),
]
Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic", rich_help_panel=_FAILURES, help="If restarts fail, continue with one worker fewer, and so on."
    ),
]
MinWorkers = Annotated[
    int, typer.Option(min=1, metavar="N", rich_help_panel=_FAILURES, help="Fewest workers that --elastic may leave.")
]


def train(
    recipe: RecipeFile,
    workers: Workers = None,
    plan: PlanFile = None,
    schedule: Schedule = None,
    compensation: Compensation = None,
    phases: Phases = None,
    allow_asynchronous: AllowAsynchronous = False,
    straight: Straight = False,
    data_parallel: DataParallel = False,
    config: Config = None,
    update_delay: UpdateDelay = TrainingOptions.update_delay,
    recompute: Recompute = False,
    check: Check = TrainingOptions.check,
    in_flight: Depth = "noam",
    chunks: Chunks = None,
    microbatches: Microbatches = None,
    cluster: ClusterName = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    memory: Memory = None,
    mesh: MeshText = None,
    layout: LayoutRules = None,
    at_rest: AtRest = None,
    compile: Compile = False,
    epochs: Epochs = None,
    minibatches: Minibatches = None,
    evaluate_every: EvaluateEvery = TrainingOptions.evaluate_every,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = TrainingOptions.keep,
    resume: Resume = None,
    seed: TrainSeed = None,
    device: Device = TrainingOptions.device,
    weights: Weights = None,
    out: Out = None,
    log: Log = None,
    stuck_after: StuckAfter = TrainingOptions.stuck_after_s,
    max_restarts: MaxRestarts = 0,
    elastic: Elastic = False,
    min_workers: MinWorkers = 1,
    as_json: Json = False,
) -> None:
    """Train a recipe: profile, plan, run, report.

    Starts local worker processes; under torchrun this process is one of the workers. Leaves summary.json, weights.pt,
    trace.json (for Perfetto), report.html and checkpoints in the run folder.

    \b
    Example:
      pipedream train examples/digits.py --workers 2 --schedule 1f1b
    """
    shape = shape_of(straight=straight, data_parallel=data_parallel, config=config)
    mesh = None if mesh == "none" else mesh
    links: dict[str, Any] = {"bandwidth": bandwidth, "latency": latency, "memory": memory}
    check_flags(plan=plan, shape=shape, update_delay=update_delay, chunks=chunks, cluster=cluster, mesh=mesh, **links)
    check_flags(phases=phases, schedule=schedule, microbatches=microbatches)
    if not Path(recipe).is_file():
        raise PipelineError(f"the recipe {recipe} does not exist; give the path of a Python file")
    given = Plan.load(plan) if plan is not None else None
    check_flags(
        elastic=elastic, mesh=mesh or ",".join(str(one) for one in given.meshes if one.size > 1) if given else mesh
    )
    described = None if cluster is None else cluster_of(cluster, [], [], 0.0, None)
    meshes = mesh if mesh and mesh != "auto" else ""
    counts = None if mesh == "auto" else config  # of workers, whose ranks are not known yet
    planned = None if is_worker() else _planned_workers(given, counts, meshes, resume, schedule, described, out)
    count = workers or planned or ranks_of(meshes)
    if elastic and not is_worker():
        for method in _methods(given, schedule, phases, resume, out):
            _check_elastic(method, count, min_workers, chunks)
    if not is_worker() and (count > 1 or max_restarts):
        own = _own_folder(recipe) if (max_restarts or elastic) and out is None else ()
        start_workers(count, more=own, max_restarts=max_restarts, fewest=min_workers if elastic else None)
    wanted = _planned_workers(given, counts, meshes, None, cluster=described)
    if elastic and is_worker() and wanted not in (None, int(os.environ.get("WORLD_SIZE", "1"))):
        given, shape, described = None, None, None  # workers were lost: plan again for those that are left
    if bandwidth or latency is not None:
        described = cluster_of(None, _widths(count, len(bandwidth or ())), bandwidth or [], latency or 0.0, memory)
    with importing_torch():
        from pipedream.recipe import Recipe, load_recipe
        from pipedream.training.train import train_recipe
        from pipedream.workflows.prepare import read_run_phases

    def make(chosen: int) -> Recipe:
        found = load_recipe(recipe, seed=chosen)
        if elastic and phases is None and schedule is None and found.phases:
            for phase in read_run_phases(None, None, found.phases):
                _check_elastic(phase.schedule, int(os.environ.get("WORLD_SIZE", "1")), min_workers, chunks)
        return found

    summary = train_recipe(
        make,
        workers=workers,
        schedule=schedule,
        compensation=None if compensation is None else [text for text in compensation if text != "none"],
        phases=phases,
        plan=given,
        shape=shape or TrainingOptions.shape,
        update_delay=update_delay,
        recompute=recompute,
        check=check,
        in_flight=depth_of(in_flight),
        chunks=chunks,
        mesh=mesh or "",
        layout=layout,
        at_rest=at_rest,
        microbatches=microbatches,
        allow_asynchronous=allow_asynchronous,
        cluster=described,
        memory_bytes=memory_of(memory) if described is None else None,
        compile=compile,
        epochs=epochs,
        minibatches=minibatches,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        keep=keep,
        resume=resume,
        seed=seed,
        device=device,
        weights=None if weights is None else str(weights),
        out=out,
        logs=tuple(log or ()),
        quiet=as_json,
        stuck_after_s=stuck_after,
    )
    if as_json and is_rank_0():
        print_json(summary)


def _methods(
    plan: Plan | None, schedule: str | None, phases: str | None, resume: str | None, out: str | None
) -> list[str]:
    """Returns the methods that the options, the checkpoint or the plan name; the recipe is not known yet."""
    if phases is not None:
        return [phase.name for phase in read_phases(phases)]
    if schedule is not None:
        return [schedule]
    named, source = [] if plan is None else [plan.method()[0]], "the plan"
    if resume is not None:
        from pipedream.training.resume import resume_point

        if (found := resume_point(resume, out)) is not None:
            saved, source = found.manifest, f"the checkpoint {found.path}"
            named = [phase.name for phase in read_phases(saved.phases)] if saved.phases else named or [saved.schedule]
    for name in named:
        refuse_code(name, source)
    return named or ["pipedream"]


def _check_elastic(method: str | ScheduleObject, most: int, fewest: int, chunks: int | None) -> None:
    """Raises a `ScheduleError` if the method does not work with a number of workers that may be left."""
    if method == "auto":
        return
    for workers in range(most - 1, fewest - 1, -1):
        try:
            if not isinstance(method, str):
                raise ScheduleError(f"it is a Schedule object, made for {method.plan.workers} workers")
            build(method, uniform(method, workers, chunks=chunks))
        except ScheduleError as error:
            name = method if isinstance(method, str) else method.name
            raise ScheduleError(
                f"--elastic may leave {workers} worker{'s' * (workers != 1)}, with which {name!r} does not work: "
                f"{error}; give --min-workers {workers + 1}, another method, or no --elastic"
            ) from error


def _own_folder(recipe: str) -> tuple[str, str]:
    """Returns --out with a new run folder, for all attempts."""
    return "--out", f"runs/{Path(recipe).stem}-{datetime.now():%Y%m%d-%H%M%S}"


def _widths(count: int, levels: int) -> list[str]:
    """Returns the workers of each level: those of a machine, then the machines; or all in one."""
    processes = int(os.environ.get("WORLD_SIZE", count))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return [str(here), str(processes // here)] if levels > 1 else [str(processes)]


def _planned_workers(
    plan: Plan | None,
    config: str | None,
    meshes: str,
    resume: str | None,
    schedule: str | None = None,
    cluster: Cluster | None = None,
    out: str | None = None,
) -> int | None:
    """Returns the number of processes that the options imply."""
    if plan is not None:
        return plan.ranks
    if config is not None:
        return ranks_of(meshes, parse_counts(config))
    if schedule is not None and is_torch_csv(schedule):
        placement = load_torch_csv(schedule).placement
        return sum(mesh.size for mesh in placement.meshes(meshes_of(meshes, placement.stages)))
    if cluster is not None:
        return cluster.workers
    if resume is None:
        return None
    from pipedream.training.resume import resume_point

    found = resume_point(resume, out)
    return None if found is None else found.manifest.plan.ranks

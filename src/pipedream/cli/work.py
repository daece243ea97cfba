"""The commands on a recipe: train, profile, compare; and report, on what a run left."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream.cli.options import (
    AllowAsynchronous,
    Chunks,
    Config,
    DataParallel,
    Depth,
    Device,
    Json,
    Microbatches,
    RecipeFile,
    Straight,
    UpdateDelay,
    depth_of,
    print_json,
    shape_of,
)
from pipedream.core.errors import PipelineError, PlanError, ProfileError
from pipedream.core.plan.plan import Plan
from pipedream.planner import counts_of
from pipedream.runtime.failure.verdict import STUCK_AFTER_S
from pipedream.schedules import is_torch_csv, load_torch_csv

__all__ = ["compare", "profile", "report", "train"]


def train(
    recipe: RecipeFile,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Local worker processes; 2 unless a plan, --config or a file says.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="A method: see 'pipedream schedules', with options as in pb_lwp[by=difference]; FILE.csv, FILE.py; "
            "auto: the fastest; the plan's; pipedream."
        ),
    ] = None,
    compensation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:NUMBER]",
            help="What makes up for late gradients: spike, nesterov, error_feedback, t1:500, ..., none; once for each.",
        ),
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD[/MICROBATCHES][+COMPENSATION]:END,...",
            help="Methods that take turns, each until a minibatch or an epoch (e): 1f1b/4:200,pipedream:3e,1f1b/4.",
        ),
    ] = None,
    allow_asynchronous: AllowAsynchronous = False,
    plan: Annotated[Path | None, typer.Option(help="A plan's file; none: profile the model and plan here.")] = None,
    straight: Straight = False,
    data_parallel: DataParallel = False,
    config: Config = None,
    update_delay: UpdateDelay = 0,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Keep only inputs: each backward does its forward again.")
    ] = False,
    in_flight: Depth = "noam",
    chunks: Chunks = None,
    microbatches: Microbatches = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs; the recipe's own unless said.")] = None,
    minibatches: Annotated[int | None, typer.Option(min=1, help="Stop after so many minibatches.")] = None,
    evaluate_every: Annotated[int, typer.Option(min=0, help="Epochs between evaluations; 0: at the end.")] = 1,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=0, help="Minibatches between checkpoints; 0: none; where it is evaluated unless said."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that are left.")] = 2,
    resume: Annotated[Path | None, typer.Option(help="A run folder, or a checkpoint, to go on from.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the recipe and of everything random in the layers; 0.")] = None,
    device: Device = "cpu",
    weights: Annotated[Path | None, typer.Option(help="A state dict to start from.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a new one under runs/ unless said.")] = None,
    log: Annotated[list[str] | None, typer.Option(help="Write logs into the run folder: csv, tensorboard.")] = None,
    stuck_after: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="End where an op or the loader hangs so long; 0: never.")
    ] = STUCK_AFTER_S,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start the workers again after a failure, so often at most.")
    ] = 0,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="When restarts are used up, go on with one worker fewer.")
    ] = False,
    min_workers: Annotated[int, typer.Option(min=1, help="Of --elastic: fewest workers.")] = 1,
    as_json: Json = False,
) -> None:
    """Train a recipe: profile, plan, run by worker processes, report.

    Starts the workers through torch's elastic launcher; under torchrun this process is one of them. Leaves
    summary.json, weights.pt, trace.json (Perfetto) and report.html in the run folder.
    """
    shape = shape_of(straight=straight, data_parallel=data_parallel, config=config, usual="pipeline")
    if plan is not None and (shape != "pipeline" or update_delay or chunks):
        raise PlanError(
            "--plan already says stages, workers and update delay; give it without --straight, --config, --chunks and the like"
        )
    given = Plan.load(plan) if plan is not None else None
    count = workers or _planned_workers(given, config, resume, schedule) or 2
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ
    if not launched and (count > 1 or max_restarts):
        from pipedream.runtime.failure.launch import launch  # torch is loaded only where workers run

        if not Path(recipe).is_file():
            raise PipelineError(f"the recipe {recipe} does not exist; give the path of a Python file")
        again = max_restarts or elastic
        # Every attempt works in one run folder.
        folder = ["--out", f"runs/{Path(recipe).stem}-{datetime.now():%Y%m%d-%H%M%S}"] if again and out is None else []
        raise typer.Exit(
            launch(
                count,
                ["-m", "pipedream.cli", *sys.argv[1:], *folder],
                max_restarts=max_restarts,
                fewest=min_workers if elastic else None,
            )
        )
    wanted = _planned_workers(given, config, None)
    if elastic and launched and wanted not in (None, int(os.environ.get("WORLD_SIZE", "1"))):
        given, shape = None, "pipeline"  # workers were lost: plan again for those that are left
    from pipedream.recipe import load_recipe
    from pipedream.training.train import train_recipe

    summary = train_recipe(
        lambda chosen: load_recipe(recipe, seed=chosen),
        workers=workers,
        schedule=schedule,
        compensation=None if compensation is None else [text for text in compensation if text != "none"],
        phases=phases,
        plan=given,
        shape=shape,
        update_delay=update_delay,
        recompute=recompute,
        in_flight=depth_of(in_flight),
        chunks=chunks,
        microbatches=microbatches,
        allow_asynchronous=allow_asynchronous,
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
    if as_json and int(os.environ.get("RANK", "0")) == 0:
        print_json(summary)


def profile(
    recipe: RecipeFile,
    device: Annotated[
        str, typer.Option("--device", help="cpu or cuda; meta: nothing is run, seconds are those of --as.")
    ] = "cpu",
    as_device: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="DEVICE", help="With meta: A100-80GB, H100, RTX-4090, ..., a device's file, or here."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With meta: of all floating-point tensors: bfloat16; their own unless said.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs behind each median.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the recipe.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write the profile to.")] = None,
    as_json: Json = False,
) -> None:
    """Measure seconds and bytes of each layer of a recipe's model; with --device meta, predict them."""
    from pipedream.recipe import load_recipe
    from pipedream.training.job import profile_recipe

    if device not in ("cpu", "cuda", "meta") and not device.startswith("cuda:"):
        raise ProfileError(f"device {device!r} cannot be measured; choose cpu, cuda or meta")
    made = load_recipe(recipe, seed=seed)
    found = profile_recipe(made, device=device, as_device=as_device, dtype=dtype, seed=seed, runs=runs)
    _answer(found, output, as_json)


def compare(
    recipe: RecipeFile,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of the parallel variants.")] = 2,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="A method to compare; may be given several times.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each variant.")] = 1,
    minibatches: Annotated[int | None, typer.Option(min=1, help="Stop each after so many minibatches.")] = None,
    seed: Annotated[int, typer.Option(help="Of the recipe.")] = 0,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/compare"),
    as_json: Json = False,
) -> None:
    """Train a recipe side by side: one worker, data parallelism, and some methods."""
    from pipedream.training.compare import compare_recipe, comparison_table

    names = tuple(schedule or ("pipedream", "1f1b", "pipedream_2bw"))
    rows = compare_recipe(
        recipe,
        workers=workers,
        schedules=names,
        epochs=epochs,
        minibatches=minibatches,
        seed=seed,
        device=device,
        out=out,
    )
    if as_json:
        print_json({"variants": rows})
    else:
        print(comparison_table(rows))


def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")], as_json: Json = False) -> None:
    """Make report.html again from a run folder."""
    from pipedream.training.run_folder import write_report

    path = write_report(folder)
    if as_json:
        print_json({"report": str(path)})
    else:
        print(path)


def _planned_workers(
    plan: Plan | None, config: str | None, resume: Path | None, schedule: str | None = None
) -> int | None:
    if plan is not None:
        return plan.workers
    if config is not None:
        return sum(counts_of(config))
    if schedule is not None and is_torch_csv(schedule):
        return load_torch_csv(schedule).placement.workers
    if resume is None:
        return None
    from pipedream.training.resume import resume_point

    found = resume_point(resume, None, 0)
    return None if found is None else found.page.plan.workers


def _answer(noun: Any, output: Path | None, as_json: bool) -> None:
    if output is not None:
        noun.save(output)
    print(noun.to_json() if as_json else noun)

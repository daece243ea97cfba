"""The `pipedream` command. It reads flags and prints; everything else is done elsewhere.

Answers are for people; ``--json`` gives one object on standard output and nothing else there. Errors are one
message on standard error: exit status 2 for a wrong call or bad input, 1 for a run that failed, 130 after
Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import api, metrics, schedules
from .core import units
from .core.artifact import encode
from .core.cluster import Cluster
from .core.errors import PeerError, PipelineError, PlanError, ProfileError, WorkerError
from .core.plan import Plan
from .core.profile import Profile
from .lowering import lower
from .report.listing import schedule_table
from .report.svg import timeline_svg
from .report.text import grid, grid_rich
from .verifier import verify

__all__ = ["app", "main", "script"]

app = typer.Typer(
    name="pipedream",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pipeline-parallel training of PyTorch models: profile, plan, simulate, run.\n\n"
    "Try: pipedream show 1f1b --stages 4 --microbatches 8",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Depth = Annotated[
    str, typer.Option("--in-flight", help="Depth: noam (the paper's), full (hides messages), or counts: 3,2,1.")
]
ScheduleName = Annotated[str, typer.Option("--schedule", help="A method: see 'pipedream schedules'.")]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="Parts of a minibatch, for methods that split it.")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="A Python file with a function recipe().")]


@app.command()
def train(
    recipe: RecipeFile,
    workers: Annotated[int | None, typer.Option(min=1, help="Local worker processes; 2 unless a plan says.")] = None,
    schedule: ScheduleName = "pipedream",
    plan: Annotated[Path | None, typer.Option(help="A plan's file; none: profile the model and plan here.")] = None,
    data_parallel: Annotated[
        bool, typer.Option("--data-parallel", help="Plan one stage on all workers instead of a pipeline.")
    ] = False,
    in_flight: Depth = "noam",
    microbatches: Microbatches = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs; the recipe's own unless said.")] = None,
    minibatches: Annotated[int | None, typer.Option(min=1, help="Stop after so many minibatches.")] = None,
    evaluate_every: Annotated[int, typer.Option(min=0, help="Epochs between evaluations; 0: at the end.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the recipe and of everything random in the layers.")] = 0,
    device: Device = "cpu",
    weights: Annotated[Path | None, typer.Option(help="A state dict to start from.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a new one under runs/ unless said.")] = None,
    log: Annotated[list[str] | None, typer.Option(help="Write logs into the run folder: csv, tensorboard.")] = None,
    as_json: Json = False,
) -> None:
    """Train a recipe: profile, plan, run by worker processes, report.

    Starts the workers through torch's elastic launcher; under torchrun this process is one of them. Leaves
    summary.json, weights.pt, trace.json (Perfetto) and report.html in the run folder.
    """
    count = workers or (Plan.load(plan).workers if plan is not None else 2)
    if "TORCHELASTIC_RUN_ID" not in os.environ and "WORLD_SIZE" not in os.environ and count > 1:
        from .runtime.launch import launch  # torch is loaded only where workers run

        if not Path(recipe).is_file():
            raise PipelineError(f"the recipe {recipe} does not exist; give the path of a Python file")
        raise typer.Exit(launch(count, ["-m", "pipedream.cli", *sys.argv[1:]]))
    from .recipe import load_recipe
    from .training import train_recipe

    summary = train_recipe(
        lambda chosen: load_recipe(recipe, seed=chosen),
        workers=workers,
        schedule=schedule,
        plan=Plan.load(plan) if plan is not None else None,
        straight=not data_parallel,
        in_flight=_depth(in_flight),
        microbatches=microbatches,
        epochs=epochs,
        minibatches=minibatches,
        evaluate_every=evaluate_every,
        seed=seed,
        device=device,
        weights=None if weights is None else str(weights),
        out=out,
        logs=tuple(log or ()),
        quiet=as_json,
    )
    if as_json and int(os.environ.get("RANK", "0")) == 0:
        _print_json(summary)


@app.command()
def profile(
    recipe: RecipeFile,
    device: Device = "cpu",
    runs: Annotated[int, typer.Option(min=1, help="Runs behind each median.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the recipe.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write the profile to.")] = None,
    as_json: Json = False,
) -> None:
    """Measure seconds and bytes of each layer of a recipe's model."""
    from .recipe import load_recipe
    from .training import profile_recipe

    if device not in ("cpu", "cuda") and not device.startswith("cuda:"):
        raise ProfileError(f"device {device!r} cannot be measured; choose cpu or cuda")
    _answer(profile_recipe(load_recipe(recipe, seed=seed), device=device, seed=seed, runs=runs), output, as_json)


@app.command()
def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile's file.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Workers.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Of a link, in one direction: 1e9 (bytes/s), 10Gbit/s.")] = "1.25e9",
    latency: Annotated[float, typer.Option(min=0.0, help="Seconds of a message.")] = 0.0,
    cluster: Annotated[Path | None, typer.Option(help="A cluster's file, instead of the three above.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of one worker: 16e9, 16GB.")] = None,
    schedule: ScheduleName = "pipedream",
    microbatches: Microbatches = None,
    in_flight: Depth = "noam",
    straight: Annotated[bool, typer.Option("--straight", help="One stage for each worker.")] = False,
    data_parallel: Annotated[bool, typer.Option("--data-parallel", help="One stage on all workers.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write the plan to.")] = None,
    as_json: Json = False,
) -> None:
    """Cut a profiled model into stages, as fast as can be within the memory."""
    import time

    measured = Profile.load(profile)
    joined = _cluster(cluster, workers, bandwidth, latency, memory)
    if straight and data_parallel:
        raise PlanError("--straight and --data-parallel exclude each other; give one or neither")
    began = time.perf_counter()
    found = api.plan(
        measured,
        joined,
        schedule=schedule,
        microbatches=microbatches,
        in_flight=_depth(in_flight),
        straight=True if straight else False if data_parallel else None,
    )
    seconds = time.perf_counter() - began
    if output is not None:
        found.save(output)
    if not as_json:
        print(found)
        return
    alone = measured.forward_s + measured.backward_s + measured.update_s + measured.loss_s
    parallel = api.plan(
        measured, Cluster.flat(joined.workers, joined.bandwidth_bytes_per_s, joined.latency_s), straight=False
    )
    _print_json(
        {
            "config": found.config,
            "slowest_stage_s": found.slowest_stage_s,
            "speedup_over_one_worker": alone / found.slowest_stage_s,
            "speedup_over_data_parallel": parallel.slowest_stage_s / found.slowest_stage_s,
            "planning_s": seconds,
            "in_flight": list(found.in_flight),
            "note": found.note,
            "stages": [
                {
                    "layers": list(stage.names),
                    "first": stage.first,
                    "last": stage.last,
                    "replicas": stage.replicas,
                    "compute_s": stage.compute_s,
                    "peak_bytes": stage.peak_bytes,
                }
                for stage in found.stages
            ],
        }
    )


@app.command()
def simulate(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="A plan's file; or give --uniform.")] = None,
    uniform: Annotated[int | None, typer.Option(min=1, metavar="P", help="P equal stages instead of a plan.")] = None,
    forward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a forward, with --uniform.")] = 1.0,
    backward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a backward, with --uniform.")] = 2.0,
    transfer_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a message one way, with --uniform.")] = 0.0,
    weight_s: Annotated[float | None, typer.Option(min=0.0, help="Seconds of the weight gradient.")] = None,
    schedule: ScheduleName = "pipedream",
    microbatches: Annotated[int, typer.Option(min=1, help="Of the run, from an empty pipeline to an empty one.")] = 16,
    in_flight: Depth = "noam",
    picture: Annotated[bool, typer.Option("--grid", help="Draw it too.")] = False,
    as_json: Json = False,
) -> None:
    """Predict a run: makespan, bubble, throughput, and each rank's busy time, versions and staleness."""
    if (plan is None) == (uniform is None):
        raise PlanError("give either a plan's file or --uniform P")
    if plan is not None:
        chosen = Plan.load(plan)
        chosen = chosen if in_flight == "noam" and chosen.depth != "noam" else chosen.with_depth(_depth(in_flight))
    else:
        chosen = Plan.uniform(uniform or 1, forward_s, backward_s, transfer_s).with_depth(_depth(in_flight))
    timeline = api.simulate(chosen, schedule=schedule, microbatches=microbatches, weight_s=weight_s)
    found = metrics.measure(timeline)
    if as_json:
        rows = [
            {
                "busy_s": row.busy_s,
                "peak_in_flight": row.peak_in_flight,
                "peak_versions": row.peak_versions,
                "staleness": row.staleness,
            }
            for row in found.per_rank
        ]
        _print_json(
            {
                "makespan_s": found.makespan_s,
                "bubble": found.bubble,
                "throughput_per_s": found.throughput_per_s,
                "per_rank": rows,
            }
        )
        return
    print(found)
    if picture:
        Console(highlight=False).print(grid_rich(timeline, width=_width()))


@app.command("schedules")
def list_schedules(as_json: Json = False) -> None:
    """List the methods, with the claims of their papers."""
    built = {name: schedules.build(name, Plan.uniform(4)) for name in schedules.SCHEDULES}
    if as_json:
        _print_json({name: schedules.claims_at(schedule, 4, 8) for name, schedule in built.items()})
    else:
        print(schedule_table(built, stages=4, microbatches=8))


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method: see 'pipedream schedules'.")],
    stages: Annotated[int, typer.Option(min=1, help="Stages.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of the run.")] = 8,
    in_flight: Depth = "noam",
    forward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a forward.")] = 1.0,
    backward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a backward.")] = 1.0,
    verify_it: Annotated[bool, typer.Option("--verify", help="Print the proof too.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Draw a method's grid; with --verify print the proof: in flight, versions, staleness."""
    chosen = Plan.uniform(stages, forward_s, backward_s).with_depth(_depth(in_flight))
    tried = schedules.build(name, chosen)
    built = schedules.build(name, chosen, microbatches) if tried.flushes else tried
    proof = verify(lower(built))
    timeline = api.simulate(chosen, schedule=built, microbatches=microbatches)
    if svg is not None:
        svg.write_text(timeline_svg(timeline, title=f"{built.name}, {stages} stages"), encoding="utf-8")
    if as_json:
        _print_json({"grid": grid(timeline).splitlines(), "proof": encode(proof)})
        return
    Console(highlight=False, width=10_000 if not sys.stdout.isatty() else None).print(
        grid_rich(timeline, width=_width()), soft_wrap=True
    )
    if verify_it:
        print(f"\n{proof}")


@app.command()
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
    from .comparing import compare_recipe, comparison_table

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
        _print_json({"variants": rows})
    else:
        print(comparison_table(rows))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")], as_json: Json = False) -> None:
    """Make report.html again from a run folder."""
    from .runfolder import write_report

    path = write_report(folder)
    if as_json:
        _print_json({"report": str(path)})
    else:
        print(path)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status, and exits with it when called as a script."""
    try:
        status = app(arguments, standalone_mode=False)
        return int(status or 0)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except KeyboardInterrupt:
        return 130
    except PipelineError as error:
        return _failed(error)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own: a wrong call
            error.show()  # type: ignore[attr-defined]
            return 2
        raise


def _failed(error: PipelineError) -> int:
    """Says what went wrong, once for all workers, and returns the exit status."""
    status = 1 if isinstance(error, WorkerError) else 2
    if isinstance(error, PeerError):
        return status  # the worker that failed says it
    text = f"pipedream: {error}"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from .runtime.launch import leave_word

        if leave_word(text) and os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("pipedream-"):
            return status  # our own launcher prints it
        if os.environ.get("RANK", "0") != "0" and not isinstance(error, WorkerError):
            return status  # all ranks found the same; rank 0 says it
    print(text, file=sys.stderr, flush=True)
    return status


def _answer(noun: Any, output: Path | None, as_json: bool) -> None:
    if output is not None:
        noun.save(output)
    print(noun.to_json() if as_json else noun)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _depth(text: str) -> str | tuple[int, ...]:
    if text in ("noam", "full"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--in-flight {text!r} is not known; write noam, full or counts as in 3,2,1") from None


def _cluster(path: Path | None, workers: int | None, bandwidth: str, latency: float, memory: str | None) -> Cluster:
    try:
        size = None if memory is None else units.parse_bytes(memory)
        rate = units.parse_rate(bandwidth)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if path is not None:
        return Cluster.load(path)
    if workers is None:
        raise PlanError("say how many workers: --workers N, or give --cluster FILE")
    return Cluster.flat(workers, rate, latency, size)


def _width() -> int | None:
    return Console().width if sys.stdout.isatty() else None


def script() -> None:
    """Runs the command and exits with its status: the entry point of ``pipedream``."""
    sys.exit(main())


if __name__ == "__main__":
    script()

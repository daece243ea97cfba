"""The commands that need no model: simulate, schedules, show."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipedream import metrics, schedules
from pipedream.cli.options import (
    Chunks,
    ClusterName,
    Depth,
    Json,
    PlansSchedule,
    RunMicrobatches,
    RunMinibatches,
    cluster_of,
    depth_of,
    print_json,
)
from pipedream.core.artifact import encode, write_text
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.lowering import lower
from pipedream.report.listing import schedule_table
from pipedream.report.svg import timeline_svg
from pipedream.report.text import grid, grid_rich
from pipedream.verifier import verify
from pipedream.workflows import api
from pipedream.workflows.methods import asked_of

__all__ = ["list_schedules", "show", "simulate"]


_USUAL_RUN = 8  # microbatches of a picture, and of a minibatch in the list


def simulate(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="A plan's file; or give --uniform.")] = None,
    uniform: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="P workers with equal stages instead of a plan.")
    ] = None,
    forward_s: Annotated[float | None, typer.Option(min=0.0, help="Seconds of a forward, with --uniform; 1.")] = None,
    backward_s: Annotated[float | None, typer.Option(min=0.0, help="Seconds of a backward, with --uniform; 2.")] = None,
    transfer_s: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of a message one way, with --uniform; 0.")
    ] = None,
    chunks: Chunks = None,
    weight_s: Annotated[float | None, typer.Option(min=0.0, help="Seconds of the weight gradient.")] = None,
    schedule: PlansSchedule = None,
    microbatches: RunMicrobatches = None,
    minibatches: RunMinibatches = None,
    in_flight: Depth = "noam",
    jitter: Annotated[
        float, typer.Option(min=0.0, metavar="CV", help="Coefficient of variation of the seconds of ops.")
    ] = 0.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=FACTOR", help="A slow rank's factor on its seconds; once for each."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    overlap: Annotated[
        bool, typer.Option(help="Sums over replicas begin inside the backward, or are charged whole before the update.")
    ] = True,
    cluster: ClusterName = None,
    picture: Annotated[bool, typer.Option("--grid", help="Draw it too.")] = False,
    as_json: Json = False,
) -> None:
    """Predict a run: makespan, bubble, throughput, and each rank's busy time, versions and staleness."""
    if (plan is None) == (uniform is None):
        raise PlanError("give either a plan's file or --uniform P")
    if cluster is not None and plan is None:
        raise PlanError("--cluster puts a plan on other machines; give a plan's file with it, not --uniform")
    said = {"--chunks": chunks, "--forward-s": forward_s, "--backward-s": backward_s, "--transfer-s": transfer_s}
    for option, value in said.items():
        if value is not None and plan is not None:
            raise PlanError(f"{option} is of equal stages, and a plan has its own; give it with --uniform")
    if plan is not None:
        chosen = Plan.load(plan)
        chosen = chosen if cluster is None else chosen.on(cluster_of(cluster, [], [], 0.0, None))
        chosen = chosen if in_flight == "noam" and chosen.depth != "noam" else chosen.with_depth(depth_of(in_flight))
    else:
        name = schedule or "pipedream"
        seconds = (
            1.0 if forward_s is None else forward_s,
            2.0 if backward_s is None else backward_s,
            transfer_s or 0.0,
        )
        chosen = schedules.uniform(name, uniform or 1, *seconds, chunks=chunks).with_depth(depth_of(in_flight))
    name, split = asked_of(chosen, schedule)
    run = schedules.run_of(name, chosen, microbatches, minibatches, split=split)
    timeline = api.simulate(
        chosen,
        schedule=run.schedule,
        minibatches=run.minibatches,
        weight_s=weight_s,
        jitter=jitter,
        slow=dict(_slow(text) for text in slow or ()),
        seed=seed,
        overlap=overlap,
    )
    found = metrics.measure(timeline)
    if as_json:
        rows = [
            {
                "busy_s": row.busy_s,
                "peak_in_flight": row.peak_in_flight,
                "peak_versions": row.peak_versions,
                "peak_bytes": row.peak_bytes,
                "staleness": row.staleness,
            }
            for row in found.per_rank
        ]
        print_json(
            {
                "microbatches": run.schedule.microbatches,
                "minibatches": run.minibatches,
                "makespan_s": found.makespan_s,
                "bubble": found.bubble,
                "throughput_per_s": found.throughput_per_s,
                "per_rank": rows,
            }
        )
        return
    print(found)
    _tell(run, microbatches)
    if picture:
        Console(highlight=False).print(grid_rich(timeline, width=_width()))


def list_schedules(as_json: Json = False) -> None:
    """List the methods, with the claims of their papers."""
    names = [*schedules.SCHEDULES, *schedules.COMPENSATED]
    runs = [schedules.run_of(name, schedules.uniform(name, 4), _USUAL_RUN) for name in names]
    runs.sort(key=lambda run: not run.schedule.flushes)
    claimed = {run.schedule.name: schedules.claims_at(run.schedule, 4, run.microbatches) for run in runs}
    if as_json:
        print_json(claimed)
    else:
        print(schedule_table(claimed, stages=4))


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A method: see 'pipedream schedules', with options as in roundpipe[forwards=3]; FILE.csv in PyTorch's "
            "notation; FILE.py that declares one.",
        ),
    ],
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages; workers, where each has several stages; 4, or the file's.")
    ] = None,
    chunks: Chunks = None,
    microbatches: RunMicrobatches = None,
    minibatches: RunMinibatches = None,
    in_flight: Depth = "noam",
    forward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a forward.")] = 1.0,
    backward_s: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of a backward; 1, or 2 where it is split in halves.")
    ] = None,
    verify_it: Annotated[bool, typer.Option("--verify", help="Print the proof too.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the schedule to this file in PyTorch's notation; for methods that flush.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a method's grid; with --verify print the proof: in flight, versions, staleness."""
    for option, path in (("--csv", csv), ("--svg", svg)):
        if path is not None and path.is_dir():
            raise PlanError(f"{option} {path} was asked for, which is a folder; name a file in it")
        if path is not None and not path.parent.is_dir():
            raise PlanError(f"{option} {path} was asked for, but there is no folder {path.parent}; make it first")
    chosen = schedules.uniform(name, stages, forward_s, chunks=chunks).with_depth(depth_of(in_flight))
    run = schedules.run_of(name, chosen, microbatches, minibatches, usual=_USUAL_RUN)
    seconds = (2.0 if run.schedule.splits_backward else 1.0) if backward_s is None else backward_s
    chosen = replace(chosen, stages=tuple(replace(stage, backward_s=seconds) for stage in chosen.stages))
    built = schedules.build(name, chosen, run.schedule.microbatches)
    proof = verify(lower(built))
    timeline = api.simulate(chosen, schedule=built, minibatches=run.minibatches)
    if csv is not None:
        write_text(csv, schedules.to_torch_csv(built))
    if svg is not None:
        svg.write_text(timeline_svg(timeline, title=f"{built.name}, {len(chosen.stages)} stages"), encoding="utf-8")
    if as_json:
        print_json({"grid": grid(timeline).splitlines(), "proof": encode(proof)})
        return
    Console(highlight=False, width=10_000 if not sys.stdout.isatty() else None).print(
        grid_rich(timeline, width=_width()), soft_wrap=True
    )
    _tell(run, microbatches)
    if verify_it:
        print(f"\n{proof}")


def _tell(run: schedules.Run, asked: int | None) -> None:
    """Prints how long a run is, where it is not as many microbatches as were asked for."""
    if run.microbatches != asked:
        print(run)


def _slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise PlanError(f"--slow {text!r} is not known; write RANK=FACTOR, as in 2=1.5") from None


def _width() -> int | None:
    return Console().width if sys.stdout.isatty() else None

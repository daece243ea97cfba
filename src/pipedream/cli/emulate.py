"""`pipedream emulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Json, Microbatches, ScheduleOrPlans, depth_of, print_json
from pipedream.cli.shared.workers import is_rank_0, is_worker, start_workers
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.units import check_factor


def emulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan to run, from 'pipedream plan -o'.")],
    schedule: ScheduleOrPlans = None,
    microbatches: Microbatches = None,
    minibatches: Annotated[int, typer.Option(min=1, metavar="N", help="Minibatches to run.")] = 32,
    in_flight: Annotated[
        str | None,
        typer.Option(
            metavar="noam|full|N,N,...",
            show_default="the plan's",
            help="Depth, the microbatches in flight at each stage, e.g. 3,2,1.",
        ),
    ] = None,
    dilation: Annotated[float, typer.Option(metavar="FACTOR", help="Factor on all times.")] = 1.0,
    byte_scale: Annotated[float, typer.Option(metavar="FACTOR", help="Factor on all sizes in bytes.")] = 1.0,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="the plan's", help="Number of local worker processes."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default="a new one in runs/", help="Run folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a plan with waits in place of compute.

    Uses the real runtime, with a local process for each worker of the plan, and prints predicted and measured figures;
    under torchrun this process is one of the workers. Messages use the network between the processes.

    \b
    Example:
      pipedream emulate digits.plan.json --dilation 10
    """
    chosen = Plan.load(plan)
    if workers not in (None, chosen.workers):
        raise PlanError(
            f"{workers} workers were asked for, the plan {chosen.config} has {chosen.workers}; give as many"
        )
    check_factor("dilation", dilation)  # before workers are started
    check_factor("byte scale", byte_scale)
    if not is_worker() and chosen.workers > 1:
        start_workers(chosen.workers)
    from pipedream.training.emulate import emulate as emulated

    summary = emulated(
        chosen,
        schedule=schedule,
        microbatches=microbatches,
        minibatches=minibatches,
        in_flight=None if in_flight is None else depth_of(in_flight),
        dilation=dilation,
        byte_scale=byte_scale,
        out=out,
        quiet=as_json,
    )
    if as_json and is_rank_0():
        print_json(summary)

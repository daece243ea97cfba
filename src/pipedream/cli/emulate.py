"""The command `emulate`: a plan run by the real runtime, with waits for compute."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Json, Microbatches, PlansSchedule, depth_of, print_json
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.units import check_factor

__all__ = ["emulate"]


def emulate(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's file.")],
    schedule: PlansSchedule = None,
    microbatches: Microbatches = None,
    minibatches: Annotated[int, typer.Option(min=1, help="Minibatches of the run.")] = 32,
    in_flight: Annotated[
        str | None, typer.Option("--in-flight", help="Depth: noam, full, or counts: 3,2,1; the plan's unless said.")
    ] = None,
    dilation: Annotated[float, typer.Option(help="Factor on all seconds.")] = 1.0,
    byte_scale: Annotated[float, typer.Option(help="Factor on all bytes.")] = 1.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Local worker processes: as many as the plan has workers.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a new one under runs/ unless said.")] = None,
    as_json: Json = False,
) -> None:
    """Run a plan by the real runtime with waits for compute; predicted beside measured.

    Starts a local process for each of the plan's workers; under torchrun this process is one of them. Messages travel
    over the network that the processes have.
    """
    given = Plan.load(plan)
    if workers not in (None, given.workers):
        raise PlanError(f"{workers} workers were asked for, the plan {given.config} has {given.workers}; give as many")
    check_factor("dilation", dilation)  # here: before workers are started
    check_factor("byte scale", byte_scale)
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "WORLD_SIZE" in os.environ
    if not launched and given.workers > 1:
        from pipedream.runtime.failure.launch import launch  # torch is loaded only where workers run

        raise typer.Exit(launch(given.workers, ["-m", "pipedream.cli", *sys.argv[1:]]))
    from pipedream.training.emulate import emulate as emulated

    summary = emulated(
        given,
        schedule=schedule,
        microbatches=microbatches,
        minibatches=minibatches,
        in_flight=None if in_flight is None else depth_of(in_flight),
        dilation=dilation,
        byte_scale=byte_scale,
        out=out,
        quiet=as_json,
    )
    if as_json and int(os.environ.get("RANK", "0")) == 0:
        print_json(summary)

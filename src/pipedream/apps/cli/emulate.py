"""`pipedream emulate`."""

from pathlib import Path

from pipedream.apps.cli.options import JSON, MICROBATCHES, SCHEDULE, print_json
from pipedream.apps.cli.workers import is_rank_0, is_worker, start_workers
from pipedream.core.errors import PlanError
from pipedream.core.flags import argument, number, option
from pipedream.core.plan.depth import read_depth
from pipedream.core.plan.plan import Plan
from pipedream.core.units import check_factor


def emulate(
    plan: Path = argument("PLAN", "Plan to run, from 'pipedream plan -o'."),
    schedule: str | None = SCHEDULE,
    microbatches: int | None = MICROBATCHES,
    minibatches: int = number(32, "Minibatches to run."),
    in_flight: str | tuple[int, ...] | None = option(
        None,
        "Depth, the microbatches in flight at each stage, e.g. 3,2,1.",
        metavar="noam|full|N,N,...",
        unset="the plan's",
        read=read_depth,
    ),
    dilation: float = option(1.0, "Factor on all times.", metavar="FACTOR"),
    byte_scale: float = option(1.0, "Factor on all sizes in bytes.", metavar="FACTOR"),
    workers: int | None = number(None, "Number of local worker processes.", unset="the plan's"),
    out: Path | None = option(None, "Run folder.", metavar="DIR", unset="a new one in runs/"),
    as_json: bool = JSON,
) -> None:
    """Run a plan with sleeps instead of computation.

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
        start_workers(chosen.workers, "pipedream.apps.emulate.emulate")
    from pipedream.apps.emulate.emulate import emulate as emulated

    summary = emulated(
        chosen,
        schedule=schedule,
        microbatches=microbatches,
        minibatches=minibatches,
        in_flight=in_flight,
        dilation=dilation,
        byte_scale=byte_scale,
        out=out,
        quiet=as_json,
    )
    if as_json and is_rank_0():
        print_json(summary)

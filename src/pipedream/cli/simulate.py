"""`pipedream simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream import metrics, schedules
from pipedream.cli.options import (
    Chunks,
    ClusterName,
    Depth,
    Json,
    Microbatches,
    RunMinibatches,
    ScheduleOrPlans,
    Seed,
    check_flags,
    cluster_of,
    depth_of,
    print_json,
)
from pipedream.cli.printing import print_grid, print_length
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.workflows.methods import asked_of
from pipedream.workflows.simulate import simulate as simulated

__all__ = ["simulate"]

_EQUAL, _TIMES = "Equal stages in place of a plan", "Variations"

PlanFile = Annotated[
    Path | None, typer.Argument(metavar="PLAN", help="Plan to simulate, from 'pipedream plan -o'; or --uniform.")
]
Uniform = Annotated[
    int | None, typer.Option(min=1, metavar="P", rich_help_panel=_EQUAL, help="Simulate P workers with equal stages.")
]
ForwardS = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="SECONDS", rich_help_panel=_EQUAL, show_default="1.0", help="Time of a forward."),
]
BackwardS = Annotated[
    float | None,
    typer.Option(min=0.0, metavar="SECONDS", rich_help_panel=_EQUAL, show_default="2.0", help="Time of a backward."),
]
TransferS = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="SECONDS", rich_help_panel=_EQUAL, show_default="0.0", help="One-way time of a message."
    ),
]
WeightS = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        rich_help_panel=_TIMES,
        show_default="half of the backward",
        help="Time of the weight gradient, where the backward is split.",
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        min=0.0, metavar="CV", rich_help_panel=_TIMES, help="Coefficient of variation of the time of each op."
    ),
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR", rich_help_panel=_TIMES, help="Factor on the times of a rank, e.g. 2=1.5; repeatable."
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        rich_help_panel=_TIMES,
        help="Start the all-reduces over replicas during the backward, as the runtime does, or after it.",
    ),
]
Grid = Annotated[bool, typer.Option("--grid", help="Draw the run too.")]


def simulate(
    plan: PlanFile = None,
    uniform: Uniform = None,
    forward_s: ForwardS = None,
    backward_s: BackwardS = None,
    transfer_s: TransferS = None,
    chunks: Chunks = None,
    cluster: ClusterName = None,
    schedule: ScheduleOrPlans = None,
    microbatches: Microbatches = None,
    minibatches: RunMinibatches = None,
    in_flight: Depth = "noam",
    weight_s: WeightS = None,
    jitter: Jitter = 0.0,
    slow: Slow = None,
    seed: Seed = 0,
    overlap: Overlap = True,
    picture: Grid = False,
    as_json: Json = False,
) -> None:
    """Predict a run: throughput, bubble, memory, staleness.

    \b
    Examples:
      pipedream simulate digits.plan.json --schedule 1f1b --microbatches 16
      pipedream simulate --uniform 4 --transfer-s 0.5 --minibatches 64
    """
    check_flags(PLAN=plan, uniform=uniform, chunks=chunks, forward_s=forward_s, backward_s=backward_s,
                transfer_s=transfer_s, cluster=cluster)  # fmt: skip
    if plan is not None:
        chosen = Plan.load(plan)
        chosen = chosen if cluster is None else chosen.on(cluster_of(cluster, [], [], 0.0, None))
        chosen = (
            chosen if in_flight == "noam" and chosen.depth_mode != "noam" else chosen.with_depth(depth_of(in_flight))
        )
    elif uniform is not None:
        seconds = (
            1.0 if forward_s is None else forward_s,
            2.0 if backward_s is None else backward_s,
            transfer_s or 0.0,
        )
        chosen = schedules.uniform(schedule or "pipedream", uniform, *seconds, chunks=chunks)
        chosen = chosen.with_depth(depth_of(in_flight))
    else:
        raise PlanError("there is nothing to simulate; give a plan's file or --uniform P")
    name, split = asked_of(chosen, schedule)
    run = schedules.run_of(name, chosen, microbatches, minibatches, split=split)
    timeline = simulated(
        chosen,
        schedule=run.schedule,
        minibatches=run.minibatches,
        weight_s=weight_s,
        jitter=jitter,
        slow=dict(_slow(text) for text in slow or ()),
        seed=seed,
        overlap=overlap,
    )
    found = metrics.run_metrics(timeline)
    if as_json:
        print_json(_summary(run, found))
        return
    print(found)
    print_length(run, microbatches, minibatches)
    if picture:
        print_grid(timeline)


def _summary(run: schedules.Run, found: metrics.Metrics) -> dict[str, Any]:
    return {
        "microbatches": run.schedule.microbatches,
        "minibatches": run.minibatches,
        "makespan_s": found.makespan_s,
        "bubble": found.bubble,
        "throughput_per_s": found.throughput_per_s,
        "per_rank": [
            {
                "busy_s": row.busy_s,
                "peak_in_flight": row.peak_in_flight,
                "peak_versions": row.peak_versions,
                "peak_bytes": row.peak_bytes,
                "staleness": row.staleness,
            }
            for row in found.per_rank
        ],
    }


def _slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise PlanError(f"--slow {text!r} is not known; write RANK=FACTOR, as in 2=1.5") from None

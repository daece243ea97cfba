"""`pipedream simulate`."""

from __future__ import annotations

from dataclasses import replace
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
    Picture,
    RunMinibatches,
    ScheduleOrPlans,
    Seed,
    check_flags,
    check_outputs,
    cluster_of,
    depth_of,
    depth_of_plan,
    print_json,
)
from pipedream.cli.shared.printing import print_chunks, print_grid, print_length
from pipedream.core.artifact import write_text
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.report.files import save_picture
from pipedream.report.svg import timeline_svg
from pipedream.report.trace import save_trace
from pipedream.workflows.methods import resolve_method
from pipedream.workflows.simulate import simulate as simulated

_EQUAL, _TIMES = "Equal stages in place of a plan", "Variations"
_SHARE = " on a worker, which its stages share"

PlanFile = Annotated[
    Path | None, typer.Argument(metavar="PLAN", help="Plan to simulate, from 'pipedream plan -o'; or --uniform.")
]
Uniform = Annotated[
    int | None, typer.Option(min=1, metavar="P", rich_help_panel=_EQUAL, help="Simulate P workers with equal stages.")
]
ForwardS = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="SECONDS", rich_help_panel=_EQUAL, show_default="1.0", help=f"Time of a forward{_SHARE}."
    ),
]
BackwardS = Annotated[
    float | None,
    typer.Option(
        min=0.0, metavar="SECONDS", rich_help_panel=_EQUAL, show_default="2.0", help=f"Time of a backward{_SHARE}."
    ),
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
Csv = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Also write a table of what ran when: rank, kind, stage, index, start, end, version."
    ),
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write a trace for ui.perfetto.dev or chrome://tracing.")
]


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
    svg: Picture = None,
    csv: Csv = None,
    trace: Trace = None,
    as_json: Json = False,
) -> None:
    """Predict a run: throughput, bubble, memory, staleness.

    \b
    Examples:
      pipedream simulate digits.plan.json --schedule 1f1b --microbatches 16
      pipedream simulate --uniform 4 --transfer-s 0.5 --minibatches 64
      pipedream simulate digits.plan.json --svg digits.pdf --csv digits.csv
    """
    check_outputs(svg=svg, csv=csv, trace=trace)
    check_flags(PLAN=plan, uniform=uniform, chunks=chunks, forward_s=forward_s, backward_s=backward_s,
                transfer_s=transfer_s, cluster=cluster)  # fmt: skip
    if plan is not None:
        chosen = Plan.load(plan)
        chosen = chosen if cluster is None else chosen.on(cluster_of(cluster, [], [], 0.0, None))
        chosen = depth_of_plan(chosen, in_flight)
    elif uniform is not None:
        seconds = (
            1.0 if forward_s is None else forward_s,
            2.0 if backward_s is None else backward_s,
            transfer_s or 0.0,
        )
        chosen = schedules.uniform(schedule or "pipedream", uniform, *seconds, chunks=chunks)
        chosen = _share_workers(chosen).with_depth(depth_of(in_flight))
    else:
        raise PlanError("there is nothing to simulate; give a plan's file or --uniform P")
    name, split = resolve_method(chosen, schedule)
    run = schedules.run_of(name, chosen, microbatches, minibatches, split=split)
    timeline = simulated(
        chosen,
        schedule=run.schedule,
        minibatches=run.minibatches,
        weight_s=weight_s,
        jitter=jitter,
        slow=dict(_parse_slow(text) for text in slow or ()),
        seed=seed,
        overlap=overlap,
    )
    if svg is not None:
        title = f"{run.schedule.name} on {chosen.workers} workers"
        save_picture(timeline_svg(timeline, title=title), svg)
    if csv is not None:
        write_text(csv, timeline.to_csv())
    if trace is not None:
        save_trace(timeline, trace)
    run_metrics = metrics.run_metrics(timeline)
    if as_json:
        print_json(_summarize(run, run_metrics))
        return
    print(run_metrics)
    print_length(run, microbatches, minibatches)
    print_chunks(run)
    if picture:
        print_grid(timeline)


def _share_workers(plan: Plan) -> Plan:
    """Returns equal stages whose workers take the seconds of one stage each, so that all methods run one model."""
    share = plan.workers / len(plan.stages)
    stages = (
        replace(stage, forward_s=stage.forward_s * share, backward_s=stage.backward_s * share) for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def _summarize(run: schedules.Run, run_metrics: metrics.Metrics) -> dict[str, Any]:
    return {
        "microbatches": run.schedule.microbatches,
        "minibatches": run.minibatches,
        "makespan_s": run_metrics.makespan_s,
        "bubble": run_metrics.bubble,
        "throughput_per_s": run_metrics.throughput_per_s,
        "per_rank": [
            {
                "busy_s": row.busy_s,
                "peak_in_flight": row.peak_in_flight,
                "peak_versions": row.peak_versions,
                "peak_bytes": row.peak_bytes,
                "staleness": row.staleness,
            }
            for row in run_metrics.per_rank
        ],
    }


def _parse_slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise PlanError(f"--slow {text!r} is not known; write RANK=FACTOR, as in 2=1.5") from None

"""`pipedream simulate`."""

from functools import partial
from pathlib import Path

from pipedream import metrics, schedules
from pipedream.apps.cli import options as common
from pipedream.apps.cli.compare_methods import compare_methods, share_model
from pipedream.apps.report.charts import methods_svg
from pipedream.apps.report.svg import save_picture, timeline_svg
from pipedream.apps.report.text import print_grid
from pipedream.apps.report.trace import save_trace
from pipedream.core.artifact import encode_attributes, write_text
from pipedream.core.errors import PlanError
from pipedream.core.flags import Panel, argument, number, option
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_seconds
from pipedream.plan_request import METHOD_HELP, METHOD_NAME
from pipedream.workflows.methods import resolve_method
from pipedream.workflows.simulate import simulate as simulated

_EQUAL, _TIMES = "Equal stages in place of a plan", "Variations"
_SHARE = " on a worker, which its stages share"


def simulate(
    plan: Path | None = argument("PLAN", "Plan to simulate, from 'pipedream plan -o'; or --uniform.", default=None),
    uniform: int | None = number(None, "Simulate P workers with equal stages of one model.", metavar="P", panel=_EQUAL),
    forward_s: float | None = option(None, f"Time of a forward{_SHARE}.", unset="1.0", panel=_EQUAL),
    backward_s: float | None = option(None, f"Time of a backward{_SHARE}.", unset="2.0", panel=_EQUAL),
    transfer_s: float | None = option(None, "One-way time of a message.", unset="0.0", panel=_EQUAL),
    chunks: int | None = common.CHUNKS,
    cluster: Path | None = common.CLUSTER,
    schedule: list[str] | None = Panel.METHOD.option(
        None,
        f"{METHOD_HELP}. Repeatable with --uniform: compares the methods.",
        metavar=METHOD_NAME,
        unset="the plan's own, or pipedream",
    ),
    microbatches: int | None = common.MICROBATCHES,
    minibatches: int | None = common.MINIBATCHES,
    in_flight: str | tuple[int, ...] = common.IN_FLIGHT,
    weight_s: float | None = option(
        None, "Time of the weight gradient, where the backward is split.", unset="half of the backward", panel=_TIMES
    ),
    jitter: float = option(
        0.0, "Coefficient of variation of the time of each op.", metavar="CV", least=0.0, panel=_TIMES
    ),
    slow: list[str] | None = option(
        None, "Factor on the times of a rank, e.g. 2=1.5; repeatable.", metavar="RANK=FACTOR", panel=_TIMES
    ),
    seed: int = common.SEED,
    overlap: bool = option(
        True, "Start the all-reduces over replicas during the backward, as the runtime does, or after it.", panel=_TIMES
    ),
    picture: bool = option(False, "Draw the run too.", "--grid"),
    svg: Path | None = common.SVG,
    csv: Path | None = option(
        None, "Also write a table of what ran when: rank, kind, stage, index, start, end, version."
    ),
    trace: Path | None = option(None, "Also write a trace for ui.perfetto.dev or chrome://tracing."),
    as_json: bool = common.JSON,
) -> None:
    """Predict a run: throughput, bubble, memory, staleness.

    Several methods on equal workers become a table, and --svg a picture of their bubbles over their activations.

    \b
    Examples:
      pipedream simulate digits.plan.json --schedule 1f1b --microbatches 16
      pipedream simulate --uniform 4 --transfer-s 0.5 --minibatches 64
      pipedream simulate --uniform 4 --schedule 1f1b --schedule zbv --schedule mine.py --svg methods.svg
      pipedream simulate digits.plan.json --svg digits.pdf --csv digits.csv
    """
    common.check_outputs(svg=svg, csv=csv, trace=trace)
    seconds = {"forward_s": forward_s, "backward_s": backward_s, "transfer_s": transfer_s}
    common.check_flags(PLAN=plan, uniform=uniform, chunks=chunks, cluster=cluster, **seconds)
    names = schedule or []

    def make_equal_stages(name: str) -> Plan:
        chosen_s = {name: value for name, value in seconds.items() if value is not None}
        return share_model(schedules.uniform(name, uniform, chunks=chunks, **chosen_s)).with_depth(in_flight)

    simulate_run = partial(
        simulated,
        weight_s=weight_s,
        jitter=jitter,
        slow=dict(_parse_slow(text) for text in slow or ()),
        seed=seed,
        overlap=overlap,
    )
    if len(names) > 1:
        if uniform is None or csv is not None or trace is not None or picture:
            raise PlanError(
                f"{len(names)} methods were given; they are compared on equal stages (--uniform P), without --csv, "
                "--trace and --grid"
            )
        comparison = compare_methods(names, make_equal_stages, microbatches, minibatches, simulate_run)
        if svg is not None:
            save_picture(methods_svg(comparison), svg)
        common.print_json(encode_attributes(comparison, "workers", "methods")) if as_json else print(comparison)
        return
    if plan is not None:
        chosen = Plan.load(plan)
        chosen = chosen if cluster is None else chosen.on(common.read_cluster(cluster))
        chosen = common.with_depth(chosen, in_flight)
    elif uniform is not None:
        chosen = make_equal_stages(names[0] if names else "pipedream")
    else:
        raise PlanError("there is nothing to simulate; give a plan's file or --uniform P")
    name, split = resolve_method(chosen, names[0] if names else None)
    run = schedules.run_of(name, chosen, microbatches, minibatches, split=split)
    timeline = simulate_run(chosen, schedule=run.schedule, minibatches=run.minibatches)
    if svg is not None:
        title = f"{run.schedule.name} on {chosen.workers} workers"
        save_picture(timeline_svg(timeline, title=title, versions=True), svg)
    if csv is not None:
        write_text(csv, timeline.to_csv())
    if trace is not None:
        save_trace(timeline, trace)
    run_metrics = metrics.run_metrics(timeline)
    if as_json:
        ranks = ("busy_s", "peak_in_flight", "peak_versions", "peak_bytes", "staleness")
        summary = encode_attributes(run_metrics, "makespan_s", "bubble", "throughput_per_s")
        summary |= {"per_rank": [encode_attributes(row, *ranks) for row in run_metrics.per_rank]}
        lengths = {"microbatches": run.schedule.microbatches, "minibatches": run.minibatches}
        common.print_json(lengths | summary)
        return
    print(run_metrics)
    if run.microbatches != (microbatches or 1) * (minibatches or 1):
        print(run)
    _print_chunks(run)
    if picture:
        print_grid(timeline)


def _print_chunks(run: schedules.Run) -> None:
    """Prints how many stages the workers have, for methods that give a worker several."""
    plan = run.schedule.plan
    if schedules.is_schedule_file(run.schedule.name) or schedules.stage_order_of(run.schedule.name) is None:
        return
    chunks = sum(plan.replicas) / plan.workers
    seconds = sorted({round(stage.forward_s + stage.backward_s, 12) for stage in plan.stages})
    words = " to ".join(map(format_seconds, dict.fromkeys((seconds[0], seconds[-1]))))
    print(f"each worker has {chunks:g} stage{'' if chunks == 1 else 's'} of {words} per microbatch")


def _parse_slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise PlanError(f"--slow {text!r} is not known; write RANK=FACTOR, as in 2=1.5") from None

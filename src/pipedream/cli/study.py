"""The commands that need no model: plan, simulate, schedules, show."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import api, metrics, planner, schedules
from ..core.artifact import encode
from ..core.errors import PlanError
from ..core.graphtxt import GraphText
from ..core.plan import Plan
from ..core.profile import Profile
from ..lowering import lower
from ..report.listing import schedule_table, stage_memory_table
from ..report.svg import timeline_svg
from ..report.text import grid, grid_rich
from ..verifier import verify
from . import checking, sweeping
from .mixed import Devices, kinds_of, with_kinds
from .options import (
    AllowAsynchronous,
    ClusterName,
    Config,
    DataParallel,
    Depth,
    Json,
    Lag,
    Microbatches,
    PlanSchedule,
    Straight,
    cluster_of,
    depth_of,
    measured,
    print_json,
    shape_of,
)

__all__ = ["list_schedules", "plan", "show", "simulate"]


def plan(
    profile: Annotated[
        Path | None,
        typer.Argument(metavar="PROFILE", help="A profile's file, or a graph.txt of the original PipeDream."),
    ] = None,
    workers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M1 [M2 ...]",
            help="Workers; of a network of several levels, innermost first: 4 4; of unequal machines: 4+4+2 3.",
        ),
    ] = None,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B1 [B2 ...]",
            help="Of a link, in one direction, a value for each level: 1e9 (bytes/s), 10Gbit/s (the default).",
        ),
    ] = None,
    latency: Annotated[float, typer.Option(min=0.0, help="Seconds of a message.")] = 0.0,
    cluster: ClusterName = None,
    memory: Annotated[str | None, typer.Option(help="Of one worker: 16e9, 16GB.")] = None,
    devices: Devices = None,
    cost_model: Annotated[
        str,
        typer.Option(
            "--cost-model", metavar="pipedream|classic", help="classic: the arithmetic of the original's planner."
        ),
    ] = "pipedream",
    schedule: PlanSchedule = None,
    allow_asynchronous: AllowAsynchronous = False,
    strategy: Annotated[
        str, typer.Option(metavar="search|2bw", help="2bw: equal replicas, by PipeDream-2BW's planner and cost model.")
    ] = "search",
    explain: Annotated[bool, typer.Option("--explain", help="With auto: print what was compared.")] = False,
    microbatches: Microbatches = None,
    in_flight: Depth = "noam",
    lag: Lag = 0,
    straight: Straight = False,
    data_parallel: DataParallel = False,
    config: Config = None,
    cuts: Annotated[
        str | None, typer.Option(help="By hand: the layers that begin a stage, by index or name: 3,7.")
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="never|auto|always", help="Stages that keep only their input: none, those that must, or all."
        ),
    ] = "never",
    memory_table: Annotated[
        bool, typer.Option("--memory-table", help="Print what the peak of each stage is made of.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write the plan to; name.txt: a graph.txt.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN", help="Instead: check a plan that was edited; with a profile its seconds and bytes too."
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--profile", metavar="PROFILE", help="With --check: the profile of its model.")
    ] = None,
    over: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Instead: predict all of --workers 2,4,8 --bandwidth 1e8,1e9 --schedule pipedream,1f1b; "
            "these lists are then alternatives, not levels of a network.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --sweep: draw it, as name.svg or name.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Cut a profiled model into stages, as fast as can be within the memory; check a plan; compare clusters."""
    if check is not None:
        checking.check(check, against or profile, schedule, microbatches, as_json)
        return
    if profile is None:
        raise PlanError("say which PROFILE to plan from, or which plan to check: --check PLAN")
    schedule = schedule or "pipedream"
    given = measured(profile)
    if over:
        told = {
            "--cluster": cluster is not None,
            "--devices": devices is not None,
            "--cost-model": cost_model != "pipedream",
            "--strategy": strategy != "search",
            "--lag": bool(lag),
            "--cuts": cuts is not None,
            "--recompute": recompute != "never",
            "--output": output is not None,
        }
        if unknown := [name for name, is_given in told.items() if is_given]:
            raise PlanError(f"--sweep knows no {' and no '.join(unknown)}; leave it out, or plan without --sweep")
        sweeping.sweep(
            given.profile(profile.stem) if isinstance(given, GraphText) else given,
            workers=workers or [],
            bandwidths=bandwidth or [],
            latency_s=latency,
            memory=memory,
            schedules=schedule,
            microbatches=microbatches,
            in_flight=depth_of(in_flight),
            shape=shape_of(straight=straight, data_parallel=data_parallel, config=config, usual="pipeline"),
            allow_asynchronous=allow_asynchronous,
            plot=plot,
            as_json=as_json,
        )
        return
    kinds = kinds_of(devices, given)
    widths = workers or ([str(sum(kind.count for kind in kinds))] if kinds and cluster is None else [])
    joined = with_kinds(cluster_of(cluster, widths, bandwidth or [], latency, memory), kinds)
    shape = shape_of(straight=straight, data_parallel=data_parallel, config=config, usual="any")
    if cuts is not None and (straight or data_parallel):
        raise PlanError("--cuts already says the stages; give it alone or with --config, the workers of each")
    began = time.perf_counter()
    compared: tuple[planner.Candidate, ...] = ()
    if cost_model == "classic":
        if shape != "any" or cuts is not None or lag or microbatches or recompute != "never":
            raise PlanError(
                "--cost-model classic knows no --straight, --data-parallel, --config, --cuts, --lag, --recompute and "
                "--microbatches; leave them out, or plan with --cost-model pipedream"
            )
        answer = api.classic(given, joined, schedule=schedule, in_flight=depth_of(in_flight))
        seconds = time.perf_counter() - began
        found = replace(answer.plan, model=answer.plan.model if isinstance(given, Profile) else profile.stem)
        slowest_s, alone_s, parallel_s = answer.slowest_stage_s, answer.one_worker_s, answer.data_parallel_s
    else:
        known = given.profile(profile.stem) if isinstance(given, GraphText) else given
        depth = depth_of(in_flight)
        if schedule == "auto" and cuts is None and (cost_model, strategy) == ("pipedream", "search"):
            best = api.choose(
                known,
                joined,
                microbatches=microbatches,
                in_flight=depth,
                shape=shape,
                lag=lag,
                recompute=recompute,
                allow_asynchronous=allow_asynchronous,
            )
            found, compared = best.plan, best.candidates
            if explain and not as_json:
                print(best, end="\n\n")
        else:
            found = api.plan(
                known,
                joined,
                schedule=schedule,
                microbatches=microbatches,
                in_flight=depth,
                shape=shape,
                cuts=None if cuts is None else tuple(int(c) if c.isdecimal() else c for c in cuts.split(",") if c),
                lag=lag,
                recompute=recompute,
                cost_model=cost_model,
                strategy=strategy,
            )
        seconds = time.perf_counter() - began
        slowest_s = found.slowest_stage_s
        alone_s = known.forward_s + known.backward_s + known.update_s + known.loss_s
        parallel_s = api.plan(known, joined.unlimited(), shape="data-parallel").slowest_stage_s
    if output is not None and output.suffix == ".txt":
        text = given if isinstance(given, GraphText) else GraphText.of(given)
        text.with_stages(stage.names for stage in found.stages).save(output)
    elif output is not None:
        found.save(output)
    if not as_json:
        print(found)
        if memory_table:
            print(f"\n{stage_memory_table(found)}")
        return
    print_json(
        {
            "config": found.config,
            "slowest_stage_s": slowest_s,
            "speedup_over_one_worker": _ratio(alone_s, slowest_s),
            "speedup_over_data_parallel": _ratio(parallel_s, slowest_s),
            "planning_s": seconds,
            "in_flight": list(found.in_flight),
            "lag": list(found.lag),
            "schedule": found.schedule,
            "microbatches": found.microbatches,
            "note": found.note,
            "bound_s": found.bound_s,
            "gap": found.gap,
            "order": list(found.order),
            **({"candidates": encode(compared)} if compared else {}),
            "stages": [
                {
                    "layers": list(stage.names),
                    "first": stage.first,
                    "last": stage.last,
                    "replicas": stage.replicas,
                    "recompute": stage.recompute,
                    "compute_s": stage.compute_s,
                    "peak_bytes": stage.peak_bytes,
                    "memory": encode(stage.memory),
                }
                for stage in found.stages
            ],
        }
    )


def _ratio(seconds: float, shorter_s: float) -> float | None:
    """Speed-up, of the profile's device; None where nothing takes time."""
    return seconds / shorter_s if shorter_s else None


def simulate(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="A plan's file; or give --uniform.")] = None,
    uniform: Annotated[int | None, typer.Option(min=1, metavar="P", help="P equal stages instead of a plan.")] = None,
    forward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a forward, with --uniform.")] = 1.0,
    backward_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a backward, with --uniform.")] = 2.0,
    transfer_s: Annotated[float, typer.Option(min=0.0, help="Seconds of a message one way, with --uniform.")] = 0.0,
    weight_s: Annotated[float | None, typer.Option(min=0.0, help="Seconds of the weight gradient.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="A method: see 'pipedream schedules'; the plan's, or pipedream.")
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Of the run, from an empty pipeline to an empty one; the plan's, or 16."),
    ] = None,
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
    if plan is not None:
        chosen = Plan.load(plan)
        chosen = chosen if cluster is None else chosen.on(cluster_of(cluster, [], [], 0.0, None))
        chosen = chosen if in_flight == "noam" and chosen.depth != "noam" else chosen.with_depth(depth_of(in_flight))
    else:
        chosen = Plan.uniform(uniform or 1, forward_s, backward_s, transfer_s).with_depth(depth_of(in_flight))
    timeline = api.simulate(
        chosen,
        schedule=schedule,
        microbatches=microbatches,
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


def list_schedules(as_json: Json = False) -> None:
    """List the methods, with the claims of their papers."""
    built = {name: schedules.build(name, Plan.uniform(4)) for name in schedules.SCHEDULES}
    if as_json:
        print_json({name: schedules.claims_at(schedule, 4, 8) for name, schedule in built.items()})
    else:
        print(schedule_table(built, stages=4, microbatches=8))


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
    chosen = Plan.uniform(stages, forward_s, backward_s).with_depth(depth_of(in_flight))
    tried = schedules.build(name, chosen)
    built = schedules.build(name, chosen, microbatches) if tried.flushes else tried
    proof = verify(lower(built))
    timeline = api.simulate(chosen, schedule=built, microbatches=microbatches)
    if svg is not None:
        svg.write_text(timeline_svg(timeline, title=f"{built.name}, {stages} stages"), encoding="utf-8")
    if as_json:
        print_json({"grid": grid(timeline).splitlines(), "proof": encode(proof)})
        return
    Console(highlight=False, width=10_000 if not sys.stdout.isatty() else None).print(
        grid_rich(timeline, width=_width()), soft_wrap=True
    )
    if verify_it:
        print(f"\n{proof}")


def _slow(text: str) -> tuple[int, float]:
    rank, _, factor = text.partition("=")
    try:
        return int(rank), float(factor)
    except ValueError:
        raise PlanError(f"--slow {text!r} is not known; write RANK=FACTOR, as in 2=1.5") from None


def _width() -> int | None:
    return Console().width if sys.stdout.isatty() else None

"""`pipedream plan`: cut a profiled model into stages, check a plan, sweep over clusters."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from pipedream import planner
from pipedream.cli import check as checking
from pipedream.cli import sweep as sweeping
from pipedream.cli.devices import Devices, kinds_of, with_kinds
from pipedream.cli.options import (
    AllowAsynchronous,
    Chunks,
    ClusterName,
    Config,
    DataParallel,
    Depth,
    Json,
    Microbatches,
    PlanSchedule,
    Straight,
    UpdateDelay,
    cluster_of,
    depth_of,
    measured,
    print_json,
    shape_of,
)
from pipedream.core.artifact import encode
from pipedream.core.errors import PlanError
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile
from pipedream.core.units import format_seconds
from pipedream.report.listing import stage_memory_table
from pipedream.workflows import api
from pipedream.workflows.methods import simulated_period_s

__all__ = ["plan"]


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
    chunks: Chunks = None,
    microbatches: Microbatches = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a minibatch, for a graph.txt, which does not say; 1.")
    ] = None,
    in_flight: Depth = "noam",
    update_delay: UpdateDelay = 0,
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
        _refuse_unused(
            "--check takes all else from the plan",
            {
                "--workers": bool(workers),
                "--bandwidth": bool(bandwidth),
                "--memory": memory is not None,
                "--cluster": cluster is not None,
                "--devices": devices is not None,
                "--output": output is not None,
                "--sweep": over,
            },
        )
        checking.check(check, against or profile, schedule, microbatches, as_json)
        return
    if profile is None:
        raise PlanError("say which PROFILE to plan from, or which plan to check: --check PLAN")
    _refuse_unused(
        "they are of other ways to plan",
        {
            "--plot (of --sweep)": plot is not None and not over,
            "--explain (of --schedule auto)": explain and schedule != "auto",
            "--allow-asynchronous (of --schedule auto and --sweep)": allow_asynchronous
            and not over
            and schedule != "auto",
            "--profile (of --check)": against is not None,
            "--chunks (of a method with several stages a worker)": chunks is not None and (over or schedule == "auto"),
            "--batch (of a graph.txt)": batch is not None and (profile.suffix != ".txt" or cost_model == "classic"),
            "--strategy (of --cost-model pipedream)": strategy != "search" and cost_model == "classic",
            "--schedule (--strategy 2bw plans for pipedream_2bw)": strategy == "2bw"
            and schedule not in (None, "2bw", "pipedream_2bw"),
        },
    )
    schedule = schedule or "pipedream"
    given = measured(profile)
    if over:
        told = {
            "--cluster": cluster is not None,
            "--devices": devices is not None,
            "--cost-model": cost_model != "pipedream",
            "--strategy": strategy != "search",
            "--update-delay": bool(update_delay),
            "--cuts": cuts is not None,
            "--recompute": recompute != "never",
            "--output": output is not None,
        }
        _refuse_unused("--sweep knows nothing of it; or plan without --sweep", told)
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
    simulated_s: float | None = None
    if cost_model == "classic":
        if shape not in ("any", "straight") or cuts is not None or update_delay or microbatches or recompute != "never":
            raise PlanError(
                "--cost-model classic does not support --data-parallel, --config, --cuts, --update-delay, --recompute "
                "or --microbatches; leave them out, or plan with --cost-model pipedream"
            )
        answer = api.classic(
            given, joined, straight=shape == "straight", schedule=schedule, in_flight=depth_of(in_flight)
        )
        seconds = time.perf_counter() - began
        found = replace(answer.plan, model=answer.plan.model if isinstance(given, Profile) else profile.stem)
        slowest_s, alone_s, parallel_s = answer.slowest_stage_s, answer.one_worker_s, answer.data_parallel_s
    else:
        known = given.profile(profile.stem) if isinstance(given, GraphText) else given
        depth = depth_of(in_flight)
        if batch is not None:
            known = replace(known, batch=batch)
        if schedule == "auto" and cuts is None and (cost_model, strategy) == ("pipedream", "search"):
            best = api.choose(
                known,
                joined,
                microbatches=microbatches,
                in_flight=depth,
                shape=shape,
                update_delay=update_delay,
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
                update_delay=update_delay,
                recompute=recompute,
                cost_model=cost_model,
                strategy=strategy,
                chunks=chunks,
            )
        seconds = time.perf_counter() - began
        slowest_s = found.slowest_stage_s
        alone_s = known.forward_s + known.backward_s + known.update_s + known.loss_s
        parallel_s = api.plan(known, joined.unlimited(), shape="data-parallel").slowest_stage_s
        simulated_s = compared[0].period_s if compared else simulated_period_s(found)
    if output is not None and output.suffix == ".txt":
        text = given if isinstance(given, GraphText) else GraphText.of(given)
        text.with_stages(stage.names for stage in found.stages).save(output)
    elif output is not None:
        found.save(output)
    if not as_json:
        print(found)
        if simulated_s is not None:
            alone = f"one worker alone takes {format_seconds(alone_s)}"
            slower = ", less than this plan" if simulated_s > 1.001 * alone_s else ""
            print(f"simulated: {format_seconds(simulated_s)} per minibatch by {found.schedule}; {alone}{slower}")
        if memory_table:
            print(f"\n{stage_memory_table(found)}")
        return
    print_json(
        {
            "config": found.config,
            "slowest_stage_s": slowest_s,
            "simulated_s": simulated_s,
            "speedup_over_one_worker": _ratio(alone_s, simulated_s or slowest_s),
            "speedup_over_data_parallel": _ratio(parallel_s, simulated_s or slowest_s),
            "planning_s": seconds,
            "in_flight": list(found.in_flight),
            "update_delay": list(found.update_delay),
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
                    "devices": [found.cluster.devices[worker] for worker in found.workers_of(s)],
                    "recompute": stage.recompute,
                    "compute_s": stage.compute_s,
                    "peak_bytes": stage.peak_bytes,
                    "memory": encode(stage.memory),
                }
                for s, stage in enumerate(found.stages)
            ],
        }
    )


def _refuse_unused(why: str, given: dict[str, bool]) -> None:
    """Raises PlanError where options are given that would do nothing."""
    if unused := [name for name, is_given in given.items() if is_given]:
        raise PlanError(f"{', '.join(unused)}: not used here, {why}; leave it out")


def _ratio(seconds: float, shorter_s: float) -> float | None:
    """Speed-up, of the profile's device; None where nothing takes time."""
    return seconds / shorter_s if shorter_s else None

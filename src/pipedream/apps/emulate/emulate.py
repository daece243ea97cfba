"""Emulation: the real runtime runs a plan with sleeps in place of computation; compares predicted and measured."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipedream import schedules
from pipedream.apps.training import run_folder
from pipedream.apps.training.summary_text import slowness_text
from pipedream.core.artifact import write_text
from pipedream.core.errors import PlanError
from pipedream.core.plan.plan import Plan
from pipedream.core.progress import progress
from pipedream.core.units import check_factor, format_number
from pipedream.pipeline import Pipeline
from pipedream.runtime.comm import process_group
from pipedream.services.failure.guard import guard_job
from pipedream.services.failure.launch import set_threads
from pipedream.services.joining import joining
from pipedream.services.probe.core_times import CoreTimes
from pipedream.workflows.methods import resolve_method
from pipedream.workflows.simulate import simulate_program

_SECONDS = ("forward_s", "backward_s", "update_s", "copy_s")
_SIZES = (
    *("output_bytes", "activation_bytes", "temporary_bytes"),
    *("gathered_bytes", "parameter_bytes", "frozen_bytes", "optimizer_bytes"),
)


def emulate(
    plan: Plan,
    *,
    schedule: str | None = None,
    microbatches: int | None = None,
    minibatches: int = 32,
    in_flight: str | tuple[int, ...] | None = None,
    dilation: float = 1.0,
    byte_scale: float = 1.0,
    out: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Runs a plan with sleeps in place of computation, and writes a run folder as training does. Returns its summary.

    Under torchrun each worker's process calls it; `pipedream emulate` starts them. Messages travel over the real
    network; the prediction assumes the plan's links, their bandwidth times `byte_scale` / `dilation`.

    Args:
        schedule: a method's name; by default the plan's, or PipeDream.
        microbatches: parts of a minibatch, for methods that split it.
        in_flight: depth; by default the plan's.
        dilation: factor on all seconds, so that short ones stand out from the machine's overhead.
        byte_scale: factor on all bytes, for machines with less memory or slower links.
        out: by default a new folder under ``runs/``.

    Raises:
        PlanError: the number of processes is not the plan's number of workers, or a factor makes no sense.
    """
    Plan.check_is(plan)
    began_s = time.perf_counter()
    scaled = scale_plan(plan if in_flight is None else plan.with_depth(in_flight), dilation, byte_scale)
    if minibatches < 1:
        raise PlanError(f"{minibatches} minibatches were asked for; run at least 1")
    rank, processes = _join_group(plan)
    default_folder = f"runs/emulated-{plan.config}-{datetime.now():%Y%m%d-%H%M%S}"
    with guard_job(rank, processes), ExitStack() as stack:
        folder = Path(joining.make_on_rank_0(lambda: str(out or default_folder), rank))
        name, parts = resolve_method(scaled, schedule, microbatches)
        stack.enter_context(run_folder.locked(folder, rank))
        run_folder.check_unused(folder)
        with build_emulated_pipeline(scaled, schedule=name, microbatches=parts, byte_scale=byte_scale) as pipeline:
            if rank == 0 and not quiet:
                print(f"{scaled}\n\n{pipeline.proof}\n", flush=True)
            losses, begin_times = [], CoreTimes.now()
            with progress("emulating", minibatches) as advance:
                for done in pipeline.train(make_emulated_batches(pipeline, minibatches)):
                    losses.append((done.number, done.loss))
                    advance()
            slowness, measured, drains = run_folder.gather_slowness(begin_times), pipeline.timeline(), pipeline.drains
            steady = run_folder.cut_last_segment(measured, drains)
            dilated = scale_plan(scaled, byte_scale=1 / byte_scale)  # with buckets of their own size
            count = max(steady.microbatches, 4 * pipeline.program.cycle * max(scaled.in_flight))
            predicted = simulate_program(replace(pipeline.program, plan=dilated), count)
            summary = run_folder.summarise(pipeline, scaled, predicted, steady)
        summary |= {
            "recipe": f"emulation of {plan.model or 'a plan'}",
            "emulated": True,
            "minibatches": minibatches,
            "drains": drains,
            "epochs": 1,
            "metrics": {},
            "evaluations": [],
            "seconds": time.perf_counter() - began_s,
            "slowness": max(slowness),
            "cluster": str(scaled.cluster),
            "configuration": {
                "workers": plan.workers,
                "processes": processes,
                "schedule": pipeline.program.name,
                "microbatches": pipeline.program.microbatches,
                "in_flight": list(scaled.in_flight),
                "depth": scaled.depth_mode,
                "minibatches": minibatches,
                "dilation": dilation,
                "byte_scale": byte_scale,
            },
            "versions": run_folder.list_versions(),
        }
        if rank == 0:
            run_folder.write_run(folder, run_folder.RunFiles(summary, scaled, predicted, [measured], steady, losses))
            write_text(folder / "planned.json", plan.to_json() + "\n")
            if not quiet:
                print(_format_result(summary, folder), flush=True)
        process_group.wait_for_all()
    return summary


def _join_group(plan: Plan) -> tuple[int, int]:
    rank, processes = joining.join_group("cpu")
    if processes != plan.workers:
        raise PlanError(
            f"the plan {plan.config} has {plan.workers} workers, found {processes} processes; an emulation needs a "
            "process for each: use pipedream emulate, or torchrun"
        )
    set_threads(processes)
    return rank, processes


def scale_plan(plan: Plan, dilation: float = 1.0, byte_scale: float = 1.0) -> Plan:
    """Returns the plan of a model with one layer per stage, all seconds and bytes multiplied (by positive factors).

    Tied weights are left out, and so are their sums. One rank of each mesh is emulated; it exchanges messages only with
    ranks of other stages.
    """
    check_factor("dilation", dilation)
    check_factor("byte scale", byte_scale)
    sums = plan.choices.sums
    if sums.needs_shapes and byte_scale != 1:
        raise PlanError(
            f"byte scale {byte_scale:g} was asked for with sums={sums!r}, whose bytes depend on the shapes of "
            "weights; leave it out, or emulate sums='bfloat16'"
        )

    stages = tuple(
        replace(
            stage,
            first=number,
            last=number + 1,
            names=(f"stage{number}",),
            mesh="",
            forward_s=stage.forward_s * dilation,
            backward_s=stage.backward_s * dilation,
            update_s=(stage.update_s - stage.copy_s) * dilation + stage.copy_s * byte_scale,
            copy_s=stage.copy_s * byte_scale,  # real, so not dilated
            **{name: round(getattr(stage, name) * byte_scale) for name in _SIZES},
            peak_bytes=0,  # an emulated stage has next to no activations
        )
        for number, stage in enumerate(plan.stages)
    )
    rate_factor = byte_scale / dilation
    return replace(
        plan,
        stages=stages,
        cluster=plan.cluster.with_links(lambda rate: rate * rate_factor, dilation),
        bound_s=plan.bound_s * dilation,
        note=plan.note if dilation == byte_scale == 1 else "",  # it names seconds of the unscaled plan
        tied_weights=(),
        graph=None,
    )


def build_emulated_pipeline(
    plan: Plan, *, schedule: str = "pipedream", microbatches: int | None = None, byte_scale: float = 1.0
) -> Pipeline:
    """Returns a pipeline that sleeps in place of computing a plan of `scale_plan`; feed it `make_emulated_batches`.

    Args:
        byte_scale: that of `scale_plan`; also scales the buckets of sums.
    """
    from pipedream.apps.emulate import emulated  # here, because scaling a plan should not load torch

    built = schedules.build(schedule, plan, microbatches)
    parts = built.microbatches
    if plan.unit == "microbatch":
        names = ("forward_s", "backward_s", "output_bytes", "activation_bytes", "temporary_bytes")
        scaled = (replace(stage, **{name: getattr(stage, name) * parts for name in names}) for stage in plan.stages)
        plan = replace(plan, unit="minibatch", stages=tuple(scaled))
    rank, _ = joining.join_group("cpu")
    speed = plan.cluster.speeds[sorted(set(plan.worker_order))[rank] if plan.worker_order else rank]
    stages = [replace(stage, **{name: getattr(stage, name) / speed for name in _SECONDS}) for stage in plan.stages]
    model = emulated.make_emulated_model(
        stages,
        parts,
        splits_backward=built.splits_backward,
        byte_scale=byte_scale,
        shaped=plan.choices.sums.needs_shapes,
    )
    return Pipeline(
        model,
        plan,
        schedule=schedule,
        compensation=(),  # an emulated update changes nothing, so there is nothing to make up for
        microbatches=microbatches,
        loss=lambda output, batch: output.mean(),
        optimizer=emulated.make_emulated_optimizer(stages),
        check=False,  # a forward takes the time of a stage
    )


def make_emulated_batches(pipeline: Pipeline, minibatches: int) -> Iterator[Any]:
    """Yields minibatches for `build_emulated_pipeline`."""
    import torch

    for _ in range(minibatches):  # one row for each microbatch
        yield torch.zeros(pipeline.program.microbatches, 1), torch.zeros(pipeline.program.microbatches, 1)


def _format_result(summary: dict[str, Any], folder: Path) -> str:
    rate, bubble = summary["throughput"], summary["bubble"]
    lines = [
        f"throughput: {format_number(rate['measured_per_s'])} samples/s measured, "
        f"{format_number(rate['predicted_per_s'])} predicted "
        f"({rate['measured_per_s'] / rate['predicted_per_s']:.1%}){slowness_text(summary)}",
        f"bubble: {bubble['measured']:.1%} measured, {bubble['predicted']:.1%} predicted",
    ]
    dilation = summary["configuration"]["dilation"]
    if dilation != 1.0:
        lines.append(f"without dilation: {format_number(rate['measured_per_s'] * dilation)} samples/s")
    lines.append(f"messages went over this machine's own network; predicted for {summary['cluster']}")
    return "\n".join([*lines, f"run folder: {folder} (open report.html in a browser, trace.json in Perfetto)"])

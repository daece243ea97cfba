"""`pipedream plan`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipedream.apps.cli.options import JSON, OUTPUT, ClusterFlags, ShapeFlags, check_flags, print_json, read_profile
from pipedream.apps.report.text import stage_memory_table
from pipedream.core.artifact import encode, encode_attributes
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.flags import Panel, argument, option
from pipedream.core.hardware.cluster import Cluster, Workers
from pipedream.core.hardware.devices import device_named, workers_of
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.plan_request import PlanRequest
from pipedream.planner import Comparison
from pipedream.workflows import plan as planning
from pipedream.workflows.check import check_plan

_DEVICES = Panel.CLUSTER.option(
    None,
    "Devices of the workers in their order, e.g. 4xV100-16GB,2xRTX-4090. Speeds and memory are those of the "
    "datasheets, relative to the profile's device.",
    metavar="NxDEVICE,...",
)


def _read_kinds(text: str | None, profile: Profile) -> tuple[Workers, ...]:
    """Reads --devices; raises an error if one, or the profile's own device, has no datasheet."""
    if text is None:
        return ()
    try:
        other = device_named(profile.device)
    except ProfileError:
        raise PlanError(
            f"--devices needs a profile of a device with a datasheet, found one of {profile.device!r}; profile with "
            "--device meta --as DEVICE, or write speeds into a cluster's file"
        ) from None
    return workers_of(text, other, profile.dtype, profile.work)


def _replace_kinds(cluster: Cluster, kinds: tuple[Workers, ...]) -> Cluster:
    """Returns the cluster with these workers; raises PlanError for another number of them."""
    if not kinds:
        return cluster
    count = sum(kind.count for kind in kinds)
    if count != cluster.workers:
        raise PlanError(f"--devices gives {count} workers, the network joins {cluster.workers}; make the numbers equal")
    limit = cluster.memory_bytes
    if limit is not None:
        kinds = tuple(replace(kind, memory_bytes=min(limit, kind.memory_bytes or limit)) for kind in kinds)
    return replace(cluster, kinds=kinds)


def plan(
    *,
    profile: Path | None = argument("PROFILE", "Profile of the model.", default=None, unset="needed without --check"),
    check: Path | None = option(
        None,
        "Check an edited plan instead: layers, depth, memory, method, and that no deadlock is possible; with PROFILE "
        "also times and sizes. Predicts its speed.",
        metavar="PLAN",
        unset="make a plan",
    ),
    links: ClusterFlags,
    devices: str | None = _DEVICES,
    request: PlanRequest,
    explain: bool = Panel.METHOD.option(False, "Print all that --schedule auto compared."),
    shape: ShapeFlags,
    memory_table: bool = option(False, "Print the parts of each stage's peak memory."),
    output: Path | None = OUTPUT,
    as_json: bool = JSON,
    named_options: set[str],
) -> None:
    """Partition a profiled model into stages, or check a plan.

    Training is as fast as possible by simulation, and each stage fits the memory of its workers. The first line says
    what to use: one worker, data parallelism (DDP) or a pipeline.

    \b
    Examples:
      pipedream plan digits.profile.json --workers 4 -o digits.plan.json
      pipedream plan digits.profile.json --workers 8 --bandwidth 1Gbit/s --schedule auto
      pipedream plan digits.profile.json --check digits.plan.json
    """
    if check is not None:
        _check(check, profile, request, named_options, as_json=as_json)
        return
    if profile is None:
        raise PlanError("a profile is missing; give its file, or --check PLAN alone")
    request = replace(request, shape=shape.read() or "any")
    check_flags(**vars(request), explain=explain)
    model_profile = read_profile(profile)
    kinds = _read_kinds(devices, model_profile)
    request = replace(request, cluster=_replace_kinds(links.read(sum(kind.count for kind in kinds) or None), kinds))
    began = time.perf_counter()
    compared = planning.plan_and_compare(model_profile, request)
    planning_s = time.perf_counter() - began
    if output is not None:
        compared.plan.save(output)
    if as_json:
        print_json(_as_json(model_profile, request, compared, planning_s))
        return
    print(f"verdict: {compared.verdict}\n")
    print(compared if explain else compared.keep_best(), end="\n\n")
    print(compared.plan)
    if memory_table:
        print(f"\n{stage_memory_table(compared.plan)}")


def _check(file: Path, profile: Path | None, request: PlanRequest, named_options: set[str], *, as_json: bool) -> None:
    """Checks a plan, whose own method and microbatches count where the command names none."""
    if others := sorted(named_options - {"check", "profile", "schedule", "microbatches", "as_json"}):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in others)
        raise PlanError(f"--check {file} was given with {flags}, but the plan determines these; leave out {flags}")
    result = check_plan(
        Plan.load(file),
        profile=None if profile is None else read_profile(profile),
        schedule=request.schedule if "schedule" in named_options else None,
        microbatches=request.microbatches,
    )
    if not as_json:
        print(result)
        return
    print_json(
        {
            **encode_attributes(result.plan, "config", "schedule", "microbatches", "in_flight", "update_delay"),
            **encode_attributes(result, "differences"),
            **encode_attributes(result.score, "period_s"),
            **encode_attributes(result, "samples_per_s"),
            **encode_attributes(result.score, "bubble"),
            "stages": [
                encode_attributes(stage, "first", "last", "replicas", "peak_bytes") for stage in result.plan.stages
            ],
        }
    )


def _as_json(profile: Profile, request: PlanRequest, compared: Comparison, planning_s: float) -> dict[str, Any]:
    plan, chosen = compared.plan, compared.candidates[0]
    period_s = chosen.period_s or plan.slowest_stage_s
    one_worker_s = profile.forward_s + profile.backward_s + profile.update_s + profile.loss_s
    unlimited = PlanRequest(request.workers_and_links.without_memory_limits(), shape="data-parallel")
    data_parallel_s = planning.make_plan(profile, unlimited).slowest_stage_s
    return {
        **encode_attributes(compared, "verdict"),
        **encode_attributes(plan, "config", "ranks", "slowest_stage_s", "in_flight", "update_delay", "schedule"),
        **encode_attributes(plan, "microbatches", "note", "bound_s", "gap"),
        **encode_attributes(chosen, "kind", "samples_per_update"),
        "kinds": encode(compared.kinds()),
        "simulated_s": chosen.period_s,
        "speedup_over_one_worker": one_worker_s / period_s if period_s else None,
        "speedup_over_data_parallel": data_parallel_s / period_s if period_s else None,
        "planning_s": planning_s,
        "order": list(plan.worker_order),
        **encode_attributes(compared, "candidates", "references"),
        "stages": [
            {
                "layers": list(stage.names),
                **encode_attributes(stage, "first", "last", "replicas", "mesh"),
                "devices": [plan.cluster.devices[worker] for worker in plan.workers_of(s)],
                **encode_attributes(stage, "recompute", "compute_s", "peak_bytes", "memory"),
            }
            for s, stage in enumerate(plan.stages)
        ],
    }

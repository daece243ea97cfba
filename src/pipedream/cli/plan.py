"""`pipedream plan`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.cli.options import JSON, PROFILE, ClusterFlags, ShapeFlags, check_flags, print_json, read_profile
from pipedream.core.artifact import encode, encode_attributes
from pipedream.core.errors import PlanError, ProfileError
from pipedream.core.flags import Panel, option
from pipedream.core.hardware.cluster import Cluster, Workers
from pipedream.core.hardware.devices import device_named, workers_of
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.plan_request import PlanRequest
from pipedream.planner import Comparison
from pipedream.report.text import stage_memory_table
from pipedream.schedules.delay_cost import describe_delay_cost
from pipedream.workflows import plan as planning

_DEVICES = option(
    None,
    "Devices of the workers in their order, e.g. 4xV100-16GB,2xRTX-4090. Speeds and memory are those of the "
    "datasheets, relative to the profile's device.",
    metavar="NxDEVICE,...",
    panel=Panel.CLUSTER,
)


def _read_kinds(text: str | None, profile: Profile | GraphText) -> tuple[Workers, ...]:
    """Reads --devices; raises an error if one, or the profile's own device, has no datasheet."""
    if text is None:
        return ()
    if isinstance(profile, GraphText):
        raise PlanError("--devices needs a profile that names its device, found a graph.txt; profile the model again")
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
    profile: Path = PROFILE,
    links: ClusterFlags,
    devices: str | None = _DEVICES,
    request: PlanRequest,
    explain: bool = option(False, "Print all that --schedule auto compared.", panel=Panel.METHOD),
    shape: ShapeFlags,
    batch: int | None = option(
        None, "Minibatch size, for graph.txt profiles, which have none.", metavar="N", least=1, unset="1"
    ),
    memory_table: bool = option(False, "Print the parts of each stage's peak memory."),
    output: Path | None = option(
        None,
        "Also write the plan to a file; as a graph.txt if it ends in .txt.",
        "-o",
        "--output",
        metavar="FILE",
    ),
    as_json: bool = JSON,
) -> None:
    """Partition a profiled model into stages.

    Training is as fast as possible by simulation, and each stage fits the memory of its workers. The first line says
    what to use: one worker, data parallelism (DDP) or a pipeline.

    \b
    Examples:
      pipedream plan digits.profile.json --workers 4 -o digits.plan.json
      pipedream plan digits.profile.json --workers 8 --bandwidth 1Gbit/s --schedule auto
    """
    request = replace(request, shape=shape.read() or "any")
    check_flags(**vars(request), explain=explain, batch=batch, PROFILE=profile)
    model_profile = read_profile(profile)
    kinds = _read_kinds(devices, model_profile)
    request = replace(request, cluster=_replace_kinds(links.read(sum(kind.count for kind in kinds) or None), kinds))
    answer = _compute_answer(model_profile, request, name=profile.stem, batch=batch)
    if output is not None and output.suffix == ".txt":
        text = model_profile if isinstance(model_profile, GraphText) else GraphText.of(model_profile)
        text.with_stages(stage.names for stage in answer.plan.stages).save(output)
    elif output is not None:
        answer.plan.save(output)
    if as_json:
        print_json(answer.as_json())
        return
    if answer.compared is not None:
        cost = describe_delay_cost(answer.plan.schedule, len(answer.plan.stages))
        print(f"verdict: {answer.compared.verdict}\n{cost}\n" if cost else f"verdict: {answer.compared.verdict}\n")
        print(answer.compared if explain else answer.compared.keep_best(), end="\n\n")
    print(answer.plan)
    if memory_table:
        print(f"\n{stage_memory_table(answer.plan)}")


class _Answer(NamedTuple):
    """A plan and its rivals, in seconds per minibatch; the classic cost model compares nothing by simulation."""

    plan: Plan
    slowest_stage_s: float
    one_worker_s: float
    data_parallel_s: float
    planning_s: float
    compared: Comparison | None = None

    def as_json(self) -> dict[str, Any]:
        plan, compared = self.plan, self.compared
        chosen = compared.candidates[0] if compared else None
        simulated_s = chosen.period_s if chosen else None
        period_s = simulated_s or self.slowest_stage_s
        return {
            "verdict": compared.verdict if compared else None,
            "delay_cost": describe_delay_cost(plan.schedule, len(plan.stages)) or None,
            "config": plan.config,
            "kind": chosen.kind if chosen else None,
            "kinds": encode(compared.kinds()) if compared else {},
            "ranks": plan.ranks,
            "slowest_stage_s": self.slowest_stage_s,
            "simulated_s": simulated_s,
            "samples_per_update": chosen.samples_per_update if chosen else None,
            "speedup_over_one_worker": self.one_worker_s / period_s if period_s else None,
            "speedup_over_data_parallel": self.data_parallel_s / period_s if period_s else None,
            "planning_s": self.planning_s,
            **encode_attributes(plan, "in_flight", "update_delay", "schedule", "microbatches", "note", "bound_s"),
            "gap": plan.gap,
            "order": list(plan.worker_order),
            "candidates": encode(compared.candidates) if compared else [],
            "references": encode(compared.references) if compared else [],
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


def _compute_answer(profile: Profile | GraphText, request: PlanRequest, *, name: str, batch: int | None) -> _Answer:
    """`name` and `batch` are for a graph.txt, which has none."""
    began = time.perf_counter()
    if request.cost_model == "classic":
        answer = planning.classic(profile, request)
        plan = answer.plan if isinstance(profile, Profile) else replace(answer.plan, model=name)
        seconds = (answer.slowest_stage_s, answer.one_worker_s, answer.data_parallel_s)
        return _Answer(plan, *seconds, time.perf_counter() - began)
    profile = profile.profile(name) if isinstance(profile, GraphText) else profile
    if batch is not None:
        profile = replace(profile, batch=batch)
    compared = planning.plan_and_compare(profile, request)
    unlimited = PlanRequest(request.workers_and_links.without_memory_limits(), shape="data-parallel")
    return _Answer(
        compared.plan,
        compared.plan.slowest_stage_s,
        profile.forward_s + profile.backward_s + profile.update_s + profile.loss_s,
        planning.make_plan(profile, unlimited).slowest_stage_s,
        time.perf_counter() - began,
        compared,
    )

"""How a plan shows itself: a table of its stages, and what is proved of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipedream.core.plan.depth import DEPTH_MODES
from pipedream.core.plan.plan_costs import NO_GAP
from pipedream.core.plan.stage import Stage
from pipedream.core.units import format_bytes, format_excess, format_number, format_seconds, shorten

if TYPE_CHECKING:
    from pipedream.core.plan.plan import Plan


def format_plan(plan: Plan) -> str:
    """Returns the table of a plan's stages, with a line before it and what is proved after it."""
    head = (
        f"Plan {plan.config}{f' of {plan.model}' if plan.model else ''}: {plan.workers} workers, depth "
        f"{plan.depth_mode}, {format_seconds(plan.period_s)} per {plan.unit} predicted"
    )
    columns: list[tuple[str, int, Callable[[int, Stage], str]]] = [
        ("workers", 7, lambda s, stage: str(stage.replicas)),
        ("forward", 9, lambda s, stage: format_seconds(stage.forward_s)),
        ("backward", 9, lambda s, stage: format_seconds(stage.backward_s)),
        ("update", 9, lambda s, stage: format_seconds(stage.update_s)),
        ("sends", 9, lambda s, stage: format_bytes(stage.output_bytes) if s < len(plan.stages) - 1 else "-"),
        ("weights", 9, lambda s, stage: format_bytes(stage.parameter_bytes)),
        ("in flight", 9, lambda s, stage: str(plan.in_flight[s])),
        ("peak", 9, lambda s, stage: format_bytes(stage.peak_bytes) if stage.peak_bytes else "-"),
    ]
    words = [f"in flight: microbatches at depth {plan.depth_mode}, {DEPTH_MODES[plan.depth_mode]}"]
    if plan.microbatches == 1 and len(set(plan.rate_factors)) > 1:  # otherwise there is one rate
        columns.insert(-1, ("lr factor", 9, lambda s, stage: format_number(plan.rate_factors[s])))
        words.append("lr factor: on the learning rate, as an update covers a minibatch of each replica")
    if plan.cluster.kinds:
        taken = [dict.fromkeys(plan.cluster.devices[w] for w in plan.workers_of(s)) for s in range(len(plan.stages))]
        width = max(2, *(len("+".join(devices)) for devices in taken))
        columns.append(("on", width, lambda s, stage: "+".join(taken[s])))
    if any(plan.update_delay):
        columns.insert(7, ("delay", 5, lambda s, stage: str(plan.update_delay[s])))
        words.append("delay: 1 if the next forward runs before the update")
    if max(plan.replicas) > 1:
        sync_s = plan.costs.sync_s
        columns.insert(4, ("all-reduce", 10, lambda s, stage: format_seconds(sync_s[s]) if stage.replicas > 1 else "-"))
    if plan.ranks > plan.workers:
        meshes = [str(mesh) for mesh in plan.meshes]
        columns.insert(1, ("mesh", max(4, *map(len, meshes)), lambda s, stage: meshes[s]))
        words.append("mesh: the ranks of each worker, - is one")
    spans = [describe_span(stage) for stage in plan.stages]
    wide = max(24, *map(len, spans))
    rows = ["  ".join([f"{'stage':>5}", f"{'layers':<{wide}}", *(f"{name:>{w}}" for name, w, _ in columns)])]
    for s, stage in enumerate(plan.stages):
        cells = (f"{cell(s, stage):>{w}}" for _, w, cell in columns)
        rows.append("  ".join([f"{s:>5}", f"{spans[s]:<{wide}}", *cells]))
    rows.append("; ".join(words))
    rows += [
        f"tied: {tied}, {format_bytes(tied.parameter_bytes)}, summed at each update in {format_seconds(seconds)}"
        for tied, seconds in zip(plan.tied, plan.costs.tied_sums_s, strict=True)
    ]
    if plan.runtime:
        rows.append(str(plan.runtime))
    return "\n".join(
        [
            head,
            *rows,
            *([plan.note] if plan.note else []),
            *([] if plan.gap is None else [_describe_proof(plan, plan.gap)]),
        ]
    )


def _describe_proof(plan: Plan, gap: float) -> str:
    how = "optimal" if gap < NO_GAP else format_excess(gap)
    stage_s = plan.slowest_stage_s
    shared = "" if plan.period_s == stage_s else f"slowest stage {format_seconds(stage_s)}, "
    return f"{shared}proven bound {format_seconds(plan.bound_s)} per {plan.unit}: {how}"


def describe_span(stage: Stage) -> str:
    """Returns its first and last layer in words."""
    if not stage.names:
        return f"{stage.first}..{stage.last - 1}"
    first, last = shorten(stage.names[0]), shorten(stage.names[-1])
    return first if len(stage.names) == 1 else f"{first} .. {last}"

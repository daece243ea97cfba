"""Tables for the terminal: the claims of the methods' papers, the memory of a plan's stages, a run's collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pipedream.core.model.collective import StageCollectives
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes


def schedule_table(claimed: Mapping[str, Mapping[str, Any]], *, stages: int) -> str:
    """Returns a row for each method, of the claims of its paper (`schedules.claims_at`) for this many stages."""
    width = max(len(name) for name in claimed)
    lines = [
        f"claims at p = {stages} stages and minibatches of m microbatches; without a flush, of a long run",
        f"{'method':<{width}}  {'flush':<5}  {'m':>2}  {'bubble':>6}  {'in flight':<14}  {'staleness':<12}  versions",
    ]
    for name, claims in claimed.items():
        in_flight, late, versions = (
            "-" if claims[key] is None else " ".join(map(str, claims[key]))
            for key in ("in_flight", "staleness", "versions")
        )
        bubble = "-" if claims["bubble"] is None else f"{claims['bubble']:.3f}"
        lines.append(
            f"{name:<{width}}  {'yes' if claims['flushes'] else 'no':<5}  {claims['microbatches']:>2}  {bubble:>6}  "
            f"{in_flight:<14}  {late:<12}  {versions}"
        )
    return "\n".join(lines)


def stage_memory_table(plan: Plan) -> str:
    """Returns the parts of one worker's predicted peak memory, a row for each stage (`core.plan.memory`)."""
    names = [field.name for field in fields(plan.stages[0].memory)]
    heads = [name.removesuffix("_bytes") for name in names]
    lines = ["  ".join([f"{'stage':>5}", *(f"{head:>10}" for head in heads), f"{'peak':>10}"])]
    for s, stage in enumerate(plan.stages):
        sizes = [*(getattr(stage.memory, name) for name in names), stage.peak_bytes]
        lines.append("  ".join([f"{s:>5}", *(f"{format_bytes(size) if size else '-':>10}" for size in sizes)]))
    return "\n".join(lines)


def collectives_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each stage of a summary that has a mesh, each after a line break."""
    lines, seen = [], set()
    for stage in stages:
        if stage["collectives"] is None or stage["stage"] in seen:
            continue
        seen.add(stage["stage"])
        collectives = StageCollectives.from_json(stage["collectives"])
        passes = [f"{name} {', '.join(map(str, rows)) or 'none'}" for name, rows in collectives.measured.items()]
        verdict = "not predicted" if collectives.predicted is None else "as predicted"
        if collectives.predicted is not None and collectives.predicted != collectives.measured:
            verdict = "NOT as predicted"
        lines.append(f"\ncollectives of stage {stage['stage']}: {'; '.join(passes)} ({verdict})")
    return "".join(lines)

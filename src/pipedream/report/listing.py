"""Tables for the terminal: the methods with the claims of their papers, the memory of a plan's stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from ..core.plan import Plan
from ..core.schedule import Schedule
from ..core.units import format_bytes

__all__ = ["schedule_table", "stage_memory_table"]


def schedule_table(built: Mapping[str, Schedule], *, stages: int, microbatches: int) -> str:
    """Returns a row a method: flush or not, bubble, and for each stage in flight, staleness and versions.

    Args:
        built: name -> schedule.
        stages, microbatches: p and m that the claims are shown for.
    """
    width = max(len(name) for name in built)
    lines = [
        f"claims at p = {stages} stages and m = {microbatches} microbatches (per minibatch; in the run if not flushed)",
        f"{'method':<{width}}  {'flush':<5}  {'bubble':>6}  {'in flight':<14}  {'staleness':<12}  versions",
    ]
    for name, schedule in built.items():
        claims = schedule.claims

        def row(form: object, p: int = stages, m: int = microbatches) -> str:
            return " ".join(str(form(p, m, s)) for s in range(p)) if callable(form) else "-"

        holds = claims.bubble is not None and microbatches >= claims.least(stages)
        bubble = f"{claims.bubble(stages, microbatches):.3f}" if claims.bubble is not None and holds else "-"
        lines.append(
            f"{name:<{width}}  {'yes' if schedule.flushes else 'no':<5}  {bubble:>6}  {row(claims.in_flight):<14}  "
            f"{row(claims.staleness):<12}  {row(claims.versions)}"
        )
    return "\n".join(lines)


def stage_memory_table(plan: Plan) -> str:
    """Returns a row a stage: what one worker's predicted peak is made of (`core.memory`)."""
    names = [field.name for field in fields(plan.stages[0].memory)]
    heads = [name.removesuffix("_bytes") for name in names]
    lines = ["  ".join([f"{'stage':>5}", *(f"{head:>10}" for head in heads), f"{'peak':>10}"])]
    for s, stage in enumerate(plan.stages):
        sizes = [*(getattr(stage.memory, name) for name in names), stage.peak_bytes]
        lines.append("  ".join([f"{s:>5}", *(f"{format_bytes(size) if size else '-':>10}" for size in sizes)]))
    return "\n".join(lines)

"""The registry as a table for the terminal: each method with the claims of its paper."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.schedule import Schedule

__all__ = ["schedule_table"]


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

        bubble = "-" if claims.bubble is None else f"{claims.bubble(stages, microbatches):.3f}"
        lines.append(
            f"{name:<{width}}  {'yes' if schedule.flushes else 'no':<5}  {bubble:>6}  {row(claims.in_flight):<14}  "
            f"{row(claims.staleness):<12}  {row(claims.versions)}"
        )
    return "\n".join(lines)

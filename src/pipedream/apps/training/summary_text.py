"""What a run's summary says in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipedream.core.artifact import decode
from pipedream.core.model.profile import StageCollectives
from pipedream.core.units import describe_slowness, format_number


def slowness_text(summary: Mapping[str, Any]) -> str:
    """Returns how much of the cores other work took and what is predicted for the rest, if that is in a summary."""
    words = describe_slowness(summary.get("slowness") or 1.0, "the most disturbed worker's")
    per_s = (summary.get("throughput") or {}).get("predicted_slowed_per_s")
    rest = f", {format_number(per_s)} for the cores that were there" if per_s else ""
    return f"{rest} ({words})" if words else ""


def failures_text(failures: Mapping[str, Any]) -> str:
    """Returns a line about a summary's restarts, if there were any, after a line break."""
    if not failures["restarts"]:
        return ""
    losses = describe_losses(failures)
    return f"\nrestarts after failures: {failures['restarts']}{', ' if losses else ''}{losses}"


def describe_losses(failures: Mapping[str, Any]) -> str:
    """Returns the workers and the seconds that a summary's failures cost, as far as known."""
    words = [f"{failures['workers_lost']} workers lost"] if failures.get("workers_lost") else []
    if failures.get("minibatches_repeated") is not None:
        words.append(f"{failures['minibatches_repeated']} minibatches repeated")
    return ", ".join(words)


def collectives_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each stage of a summary that has a mesh, each after a line break."""
    lines, shown = [], set()
    for stage in stages:
        if stage["collectives"] is None or stage["stage"] in shown:
            continue
        shown.add(stage["stage"])
        collectives = decode(StageCollectives, stage["collectives"], "collectives")
        passes = [f"{name} {', '.join(map(str, rows)) or 'none'}" for name, rows in collectives.measured.items()]
        verdict = "not predicted" if collectives.predicted is None else "as predicted"
        if collectives.predicted is not None and collectives.predicted != collectives.measured:
            verdict = "NOT as predicted"
        lines.append(f"\ncollectives of stage {stage['stage']}: {'; '.join(passes)} ({verdict})")
    return "".join(lines)

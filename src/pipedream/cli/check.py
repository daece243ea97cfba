"""`pipedream plan --check`: what is wrong with a plan that a person edited, or what it comes to."""

from __future__ import annotations

from pathlib import Path

from pipedream.cli.options import measured, print_json
from pipedream.core.model.graph_txt import GraphText
from pipedream.core.plan.plan import Plan
from pipedream.workflows.check import check_plan

__all__ = ["check"]


def check(file: Path, profile: Path | None, schedule: str | None, microbatches: int | None, as_json: bool) -> None:
    """Checks a plan's file and prints it with its prediction."""
    known = None if profile is None else measured(profile)
    if isinstance(known, GraphText):
        assert profile is not None
        known = known.profile(profile.stem)
    found = check_plan(Plan.load(file), profile=known, schedule=schedule, microbatches=microbatches)
    if not as_json:
        print(found)
        return
    plan = found.plan
    print_json(
        {
            "config": plan.config,
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "in_flight": list(plan.in_flight),
            "update_delay": list(plan.update_delay),
            "differences": list(found.differences),
            "period_s": found.score.period_s,
            "samples_per_s": found.samples_per_s,
            "bubble": found.score.bubble,
            "stages": [
                {"first": stage.first, "last": stage.last, "replicas": stage.replicas, "peak_bytes": stage.peak_bytes}
                for stage in plan.stages
            ],
        }
    )

"""`pipedream check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipedream.cli.options import Json, Microbatches, ScheduleOrPlans, print_json, profile_of
from pipedream.core.plan.plan import Plan
from pipedream.workflows.check import check_plan


def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan to check.")],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PROFILE",
            show_default="trust the plan's figures",
            help="Profile of the model, to check layers, times and sizes too.",
        ),
    ] = None,
    schedule: ScheduleOrPlans = None,
    microbatches: Microbatches = None,
    as_json: Json = False,
) -> None:
    """Check a plan that was edited, and predict its speed.

    Checks layers, depth, memory and method, and proves the program free of deadlock.

    \b
    Example:
      pipedream check digits.plan.json --profile digits.profile.json
    """
    model_profile = None if profile is None else profile_of(profile)
    result = check_plan(Plan.load(plan), profile=model_profile, schedule=schedule, microbatches=microbatches)
    if not as_json:
        print(result)
        return
    checked = result.plan
    print_json(
        {
            "config": checked.config,
            "schedule": checked.schedule,
            "microbatches": checked.microbatches,
            "in_flight": list(checked.in_flight),
            "update_delay": list(checked.update_delay),
            "differences": list(result.differences),
            "period_s": result.score.period_s,
            "samples_per_s": result.samples_per_s,
            "bubble": result.score.bubble,
            "stages": [
                {"first": stage.first, "last": stage.last, "replicas": stage.replicas, "peak_bytes": stage.peak_bytes}
                for stage in checked.stages
            ],
        }
    )

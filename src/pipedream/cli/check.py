"""`pipedream check`."""

from __future__ import annotations

from pathlib import Path

from pipedream.cli.options import JSON, MICROBATCHES, SCHEDULE, print_json, read_profile
from pipedream.core.artifact import encode_attributes
from pipedream.core.flags import argument, option
from pipedream.core.plan.plan import Plan
from pipedream.workflows.check import check_plan


def check(
    plan: Path = argument("PLAN", "Plan to check."),
    profile: Path | None = option(
        None,
        "Profile of the model, to check layers, times and sizes too.",
        metavar="PROFILE",
        unset="trust the plan's figures",
    ),
    schedule: str | None = SCHEDULE,
    microbatches: int | None = MICROBATCHES,
    as_json: bool = JSON,
) -> None:
    """Check an edited plan, and predict its speed.

    Checks layers, depth, memory and method, and proves the program free of deadlock.

    \b
    Example:
      pipedream check digits.plan.json --profile digits.profile.json
    """
    model_profile = None if profile is None else read_profile(profile)
    result = check_plan(Plan.load(plan), profile=model_profile, schedule=schedule, microbatches=microbatches)
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

"""Methods: one per file, all answers to the same four questions (docs/exact_rules.md).

This package exports all that a method's file needs.
"""

from pipedream.schedules import kit
from pipedream.schedules.files import format_schedule, is_schedule_file, load_schedule
from pipedream.schedules.kit import *  # noqa: F403
from pipedream.schedules.kit.idioms import evaluation
from pipedream.schedules.registry import (
    ALIASES,
    COMPENSATED,
    METHODS,
    SCHEDULES,
    STAGE_ORDERS,
    build,
    canonical,
    check_chunks,
    method_of,
    refuse_code,
    stage_order_of,
)
from pipedream.schedules.runs import (
    Run,
    claims_at,
    derive_properties,
    first_stage_units,
    properties_of,
    run_of,
    uniform,
)

__all__ = [
    "ALIASES",
    "COMPENSATED",
    "METHODS",
    "SCHEDULES",
    "STAGE_ORDERS",
    "Run",
    "build",
    "canonical",
    "check_chunks",
    "claims_at",
    "derive_properties",
    "evaluation",
    "first_stage_units",
    "format_schedule",
    "is_schedule_file",
    "load_schedule",
    "method_of",
    "properties_of",
    "refuse_code",
    "run_of",
    "stage_order_of",
    "uniform",
]

__all__ += kit.__all__

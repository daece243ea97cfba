"""One published method, one file; all are answers to the same four questions (docs/design.md)."""

from pipedream.schedules.evaluation import evaluation
from pipedream.schedules.layouts import Layout
from pipedream.schedules.method import Method, Picture
from pipedream.schedules.pytorch_csv import from_torch_csv, is_torch_csv, load_torch_csv, to_torch_csv
from pipedream.schedules.registry import (
    ALIASES,
    COMPENSATED,
    LAYOUTS,
    METHODS,
    SCHEDULES,
    Run,
    build,
    canonical,
    check_chunks,
    claims_at,
    layout_of,
    method_of,
    run_of,
    smallest,
    uniform,
)

__all__ = [
    "ALIASES",
    "COMPENSATED",
    "LAYOUTS",
    "METHODS",
    "SCHEDULES",
    "Layout",
    "Method",
    "Picture",
    "Run",
    "build",
    "canonical",
    "check_chunks",
    "claims_at",
    "evaluation",
    "from_torch_csv",
    "is_torch_csv",
    "layout_of",
    "load_torch_csv",
    "method_of",
    "run_of",
    "smallest",
    "to_torch_csv",
    "uniform",
]

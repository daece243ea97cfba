"""One published method, one file; all are answers to the same four questions (docs/design.md)."""

from .evaluation import evaluation
from .layouts import Layout
from .method import Method, Picture
from .registry import (
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
from .torch_csv import from_torch_csv, is_torch_csv, load_torch_csv, to_torch_csv

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

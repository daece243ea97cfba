"""One published method, one file; all are answers to the same four questions (docs/design.md)."""

from .evaluation import evaluation
from .layouts import Layout
from .registry import ALIASES, COMPENSATED, LAYOUTS, SCHEDULES, Choice, build, claims_at, layout_of, uniform
from .torch_csv import from_torch_csv, is_torch_csv, load_torch_csv, to_torch_csv

__all__ = [
    "ALIASES",
    "COMPENSATED",
    "LAYOUTS",
    "SCHEDULES",
    "Choice",
    "Layout",
    "build",
    "claims_at",
    "evaluation",
    "from_torch_csv",
    "is_torch_csv",
    "layout_of",
    "load_torch_csv",
    "to_torch_csv",
    "uniform",
]

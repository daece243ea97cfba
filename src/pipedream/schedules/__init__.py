"""One published method, one file; all are answers to the same four questions (docs/design.md)."""

from .evaluation import evaluation
from .layouts import Layout
from .registry import ALIASES, COMPENSATED, LAYOUTS, SCHEDULES, Choice, build, claims_at, layout_of, uniform

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
    "layout_of",
    "uniform",
]

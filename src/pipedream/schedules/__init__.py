"""One published method, one file; all are answers to the same four questions (docs/design.md)."""

from .evaluation import evaluation
from .registry import ALIASES, CHUNKED, SCHEDULES, Choice, build, claims_at, uniform

__all__ = ["ALIASES", "CHUNKED", "SCHEDULES", "Choice", "build", "claims_at", "evaluation", "uniform"]

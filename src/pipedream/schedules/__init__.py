"""One published method, one file; all are answers to the same four questions (docs/design.md)."""

from .evaluation import evaluation
from .registry import ALIASES, SCHEDULES, Choice, build, claims_at

__all__ = ["ALIASES", "SCHEDULES", "Choice", "build", "claims_at", "evaluation"]

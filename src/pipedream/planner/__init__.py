"""Which layers form a stage: PipeDream's dynamic program, its oracle, cuts made by hand, and the original's answers."""

from .classic import Classic, classic
from .dynamic import Pipelines
from .exhaustive import every_plan, exhaustive
from .hand import by_hand, whole
from .search import SHAPES, counts_of, plan
from .space import Holds, Space, Versions, stash

__all__ = [
    "SHAPES",
    "Classic",
    "Holds",
    "Pipelines",
    "Space",
    "Versions",
    "by_hand",
    "classic",
    "counts_of",
    "every_plan",
    "exhaustive",
    "plan",
    "stash",
    "whole",
]

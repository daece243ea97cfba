"""Which layers form a stage: PipeDream's dynamic program, its oracle, and cuts made by hand."""

from .dynamic import Pipelines
from .exhaustive import every_plan, exhaustive
from .hand import by_hand, whole
from .search import SHAPES, counts_of, plan
from .space import Space, Versions, stash

__all__ = [
    "SHAPES",
    "Pipelines",
    "Space",
    "Versions",
    "by_hand",
    "counts_of",
    "every_plan",
    "exhaustive",
    "plan",
    "stash",
    "whole",
]

"""Which layers form a stage: PipeDream's dynamic program, its oracle, and cuts made by hand."""

from .dynamic import Pipelines, straight
from .exhaustive import exhaustive, partitions
from .hand import by_hand, whole
from .search import plan
from .space import Space, Versions, stash

__all__ = [
    "Pipelines",
    "Space",
    "Versions",
    "by_hand",
    "exhaustive",
    "partitions",
    "plan",
    "stash",
    "straight",
    "whole",
]

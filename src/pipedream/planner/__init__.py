"""Which layers form a stage: PipeDream's dynamic program, its oracle, cuts made by hand, the original's answers;
and which method to train with."""

from .choosing import Candidate, Comparison, Method, Score, choose
from .classic import Classic, classic
from .dynamic import Pipelines, check_recompute
from .exhaustive import every_plan, exhaustive
from .hand import by_hand, check_cuts, whole
from .held import Holds, Versions, stash
from .search import SHAPES, counts_of, plan
from .space import Space
from .two_bw import two_bw, two_bw_s

__all__ = [
    "SHAPES",
    "Candidate",
    "Classic",
    "Comparison",
    "Holds",
    "Method",
    "Pipelines",
    "Score",
    "Space",
    "Versions",
    "by_hand",
    "check_cuts",
    "check_recompute",
    "choose",
    "classic",
    "counts_of",
    "every_plan",
    "exhaustive",
    "plan",
    "stash",
    "two_bw",
    "two_bw_s",
    "whole",
]

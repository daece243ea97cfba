"""Which layers form a stage: PipeDream's dynamic program, its oracle, cuts made by hand, the original's answers;
and which method to train with."""

from pipedream.planner.auto import Candidate, Comparison, Score, choose
from pipedream.planner.dynamic_program.oracle import every_plan, exhaustive
from pipedream.planner.dynamic_program.recurrence import Pipelines, check_recompute
from pipedream.planner.manual import by_hand, check_cuts, whole
from pipedream.planner.papers.classic import Classic, classic
from pipedream.planner.papers.two_bw import two_bw, two_bw_s
from pipedream.planner.search import SHAPES, counts_of, plan
from pipedream.planner.tables.method_occupancy import MethodOccupancy, VersionsRule, stash
from pipedream.planner.tables.search_space import Space

__all__ = [
    "SHAPES",
    "Candidate",
    "Classic",
    "Comparison",
    "MethodOccupancy",
    "Pipelines",
    "Score",
    "Space",
    "VersionsRule",
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

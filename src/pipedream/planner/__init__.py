"""Planning: which layers form a stage, on how many workers, and with which method to train."""

from pipedream.planner.auto import choose
from pipedream.planner.comparison import Candidate, Comparison, Score, candidate_from_plan, find_fastest, with_score
from pipedream.planner.dynamic_program import DynamicProgram, check_recompute
from pipedream.planner.manual import check_cuts, manual_plan, place_of, single_stage_plan
from pipedream.planner.mesh_search import MeshSearch, fits_rank_memory
from pipedream.planner.papers import Classic, classic, two_bw, two_bw_s
from pipedream.planner.search import SHAPES, Finalist, PlanSearch, finalists, parse_counts, plan
from pipedream.planner.tables import MeshSpace, MethodOccupancy, SearchSpace, StageChoice, VersionsRule, stash

__all__ = [
    "SHAPES",
    "Candidate",
    "Classic",
    "Comparison",
    "DynamicProgram",
    "Finalist",
    "MeshSearch",
    "MeshSpace",
    "MethodOccupancy",
    "PlanSearch",
    "Score",
    "SearchSpace",
    "StageChoice",
    "VersionsRule",
    "candidate_from_plan",
    "check_cuts",
    "check_recompute",
    "choose",
    "classic",
    "finalists",
    "find_fastest",
    "fits_rank_memory",
    "manual_plan",
    "parse_counts",
    "place_of",
    "plan",
    "single_stage_plan",
    "stash",
    "two_bw",
    "two_bw_s",
    "with_score",
]

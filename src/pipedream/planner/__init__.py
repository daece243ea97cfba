"""Planning: which layers form a stage, on how many workers, and with which method to train."""

from pipedream.core.schedule.occupancy import MethodOccupancy
from pipedream.planner.auto import SearchOptions, choose_method
from pipedream.planner.classic import Classic, classic
from pipedream.planner.comparison import (
    Candidate,
    Comparison,
    Score,
    candidate_from_plan,
    compare_by_simulation,
    with_score,
)
from pipedream.planner.dynamic_program.recurrence import check_recompute
from pipedream.planner.manual import check_cuts, manual_plan, place_of
from pipedream.planner.mesh_search import MeshSearch
from pipedream.planner.search import SHAPES, Finalist, PlanSearch, list_finalists, parse_counts, search_plan
from pipedream.planner.tables.search_space import SearchSpace
from pipedream.planner.two_bw import two_bw

__all__ = [
    "SHAPES",
    "Candidate",
    "Classic",
    "Comparison",
    "Finalist",
    "MeshSearch",
    "MethodOccupancy",
    "PlanSearch",
    "Score",
    "SearchOptions",
    "SearchSpace",
    "candidate_from_plan",
    "check_cuts",
    "check_recompute",
    "choose_method",
    "classic",
    "compare_by_simulation",
    "list_finalists",
    "manual_plan",
    "parse_counts",
    "place_of",
    "search_plan",
    "two_bw",
    "with_score",
]

"""Planning: which layers form a stage, on how many workers, and with which method to train."""

from pipedream.core.schedule.occupancy import MethodOccupancy as MethodOccupancy
from pipedream.planner.comparison import (
    Candidate as Candidate,
    Comparison as Comparison,
    Score as Score,
    candidate_from_plan as candidate_from_plan,
    compare_by_simulation as compare_by_simulation,
    with_score as with_score,
)
from pipedream.planner.manual import check_cuts as check_cuts, manual_plan as manual_plan, place_of as place_of
from pipedream.planner.search import (
    SHAPES as SHAPES,
    PlanSearch as PlanSearch,
    SearchVariant as SearchVariant,
    list_finalists as list_finalists,
    parse_counts as parse_counts,
)
from pipedream.planner.tables.search_space import SearchSpace as SearchSpace

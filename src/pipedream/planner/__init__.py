"""Planning: which layers form a stage, on how many workers, and with which method to train."""

from pipedream.core.schedule.occupancy import MethodOccupancy as MethodOccupancy
from pipedream.planner.auto import SearchOptions as SearchOptions
from pipedream.planner.auto import choose_method as choose_method
from pipedream.planner.comparison import Candidate as Candidate
from pipedream.planner.comparison import Comparison as Comparison
from pipedream.planner.comparison import Score as Score
from pipedream.planner.comparison import candidate_from_plan as candidate_from_plan
from pipedream.planner.comparison import compare_by_simulation as compare_by_simulation
from pipedream.planner.comparison import with_score as with_score
from pipedream.planner.dynamic_program.recurrence import check_recompute as check_recompute
from pipedream.planner.manual import check_cuts as check_cuts
from pipedream.planner.manual import manual_plan as manual_plan
from pipedream.planner.manual import place_of as place_of
from pipedream.planner.mesh_search import MeshSearch as MeshSearch
from pipedream.planner.search import SHAPES as SHAPES
from pipedream.planner.search import Finalist as Finalist
from pipedream.planner.search import PlanSearch as PlanSearch
from pipedream.planner.search import list_finalists as list_finalists
from pipedream.planner.search import parse_counts as parse_counts
from pipedream.planner.tables.search_space import SearchSpace as SearchSpace
from pipedream.planner.two_bw import two_bw as two_bw

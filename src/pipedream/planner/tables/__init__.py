"""Tables of seconds and bytes that the searches read."""

from pipedream.planner.tables.mesh_space import MeshSite, MeshSpace, StageChoice
from pipedream.planner.tables.method_occupancy import MethodOccupancy, VersionsRule, stash
from pipedream.planner.tables.search_space import SearchSpace, apply_depth

__all__ = [
    "MeshSite",
    "MeshSpace",
    "MethodOccupancy",
    "SearchSpace",
    "StageChoice",
    "VersionsRule",
    "apply_depth",
    "stash",
]

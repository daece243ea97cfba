"""The dynamic program over stages and replicas."""

from pipedream.planner.dynamic_program.mesh_program import MeshPeriods, MeshProgram
from pipedream.planner.dynamic_program.pruning import prune_places
from pipedream.planner.dynamic_program.recurrence import (
    RECOMPUTE,
    DynamicProgram,
    Shortage,
    State,
    check_recompute,
    refuse,
    replicated_states,
    states_of_counts,
    straight_states,
    tie_break_key,
)

__all__ = [
    "RECOMPUTE",
    "DynamicProgram",
    "MeshPeriods",
    "MeshProgram",
    "Shortage",
    "State",
    "check_recompute",
    "prune_places",
    "refuse",
    "replicated_states",
    "states_of_counts",
    "straight_states",
    "tie_break_key",
]

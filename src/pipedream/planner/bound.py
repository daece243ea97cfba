"""What is proved about a plan: that none is faster, or by how much one could be."""

from __future__ import annotations

from dataclasses import replace

from pipedream.core.model.graph import LayerGraph
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_excess
from pipedream.planner.tables.search_space import Space

__all__ = ["least_period_s", "with_bound"]


def with_bound(plan: Plan, space: Space) -> Plan:
    """Returns a plan that a search of a space found, with what that proves (`Plan.bound_s`) and a word on it.

    What the search itself has proved holds where it tried all places that matter. Elsewhere the bound is that of
    `least_period_s`, whatever memory allows.
    """
    graph, cuts = space.profile.graph, len(space.positions) - 2
    period_s = plan.slowest_stage_s
    if space.is_whole:
        if space.spare_bytes:
            return plan  # the best of those that leave so much free
        is_chain = graph.edges == LayerGraph.chain(graph.layers).edges
        if is_chain or plan.bound_s < period_s:
            return plan
        return replace(plan, note=f"{plan.note}; optimal: the {cuts} cuts of the graph that can matter were all tried")
    bound_s = min(least_period_s(space), period_s)
    if bound_s == period_s:
        proved = "optimal, for no plan can be faster"
    else:
        proved = f"{format_excess(period_s / bound_s - 1)} of a proven bound" if bound_s else "nothing is proved"
    return replace(plan, bound_s=bound_s, note=f"{plan.note}; {cuts} of the graph's cuts were tried: {proved}")


def least_period_s(space: Space) -> float:
    """Returns seconds per minibatch that no plan can beat: all compute, shared out evenly by the workers' speeds."""
    end = len(space.profile.layers)
    seconds = (*space.passes_s(0, end), float(space.update_s(0, end)))
    return float(sum(seconds)) / sum(space.cluster.speeds)

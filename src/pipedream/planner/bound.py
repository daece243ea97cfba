"""What is proved about a plan: that none is faster, or by how much one could be."""

from __future__ import annotations

from dataclasses import replace

from ..core.graph import LayerGraph
from ..core.plan import Plan
from .space import Space

__all__ = ["least_period_s", "with_bound"]


def with_bound(plan: Plan, space: Space) -> Plan:
    """Returns a plan that a search of a space found, with what that proves (`Plan.bound_s`) and a word on it.

    On workers that are alike, on one level, a search of all places that matter is exact. Where not all were searched,
    the bound is that of `least_period_s`, whatever memory allows.
    """
    if not space.cluster.is_flat:
        return plan
    graph, cuts = space.profile.graph, len(space.positions) - 2
    period_s = plan.slowest_stage_s
    if space.is_whole:
        is_chain = graph.edges == LayerGraph.chain(graph.layers).edges
        note = "" if is_chain else f"; optimal: the {cuts} cuts of the graph that can matter were all tried"
        return replace(plan, bound_s=period_s, note=plan.note + note)
    bound_s = min(least_period_s(space), period_s)
    if bound_s == period_s:
        proved = "optimal, for no plan can be faster"
    else:
        proved = f"within {100 * (period_s / bound_s - 1):.2g} % of a proven bound" if bound_s else "nothing is proved"
    return replace(plan, bound_s=bound_s, note=f"{plan.note}; {cuts} of the graph's cuts were tried: {proved}")


def least_period_s(space: Space) -> float:
    """Returns seconds per minibatch that no plan on workers that are alike can beat: all compute, shared out evenly."""
    end = len(space.profile.layers)
    seconds = (*space.passes_s(0, end), float(space.update_s(0, end)))
    return float(sum(seconds)) / space.cluster.workers

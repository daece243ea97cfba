"""PACI: PipeDream's order with an update every m microbatches, and one set of weights, updated in place.

2026 (arXiv 2606.07881). The forward reads the newest weights, the backward uses the old activations with the newest
(the rule 'graph'). Stage s has staleness (p-1-s)/m on average, at most ceil((p-1-s)/m).

    rank 0 | F0  F1  .   B0  F2  B1' F3  B2  F4  B3'
    rank 1 | .   F0  B0  F1  B1' F2  B2  F3  B3' F4

With ``backward_rule=stash`` it is PipeDream with accumulation, the macrobatch of the original's code and ``step_every``
of FTPipe (Eliad et al., ATC 2021): as stale, with true gradients and ceil((p-1-s)/m) + 1 sets of weights at stage s.
"""

from pipedream.schedules import kit


def paci(plan: kit.Plan, microbatches: int | None = None, *, backward_rule: str = "graph") -> kit.Schedule:
    """Returns PACI, at the plan's depth.

    Args:
        microbatches: in an update; by default as many as the input stage holds in flight, for a staleness of at most 1.
        backward_rule: see `kit.idioms`; also 'stash'.
    """
    kit.refuse_update_delay("paci", plan)
    plan = kit.with_backward_rule(plan, backward_rule, kit.BACKWARD_RULES)
    m = kit.choose_microbatches("paci", plan, microbatches, kit.max_in_flight(plan))
    kit.check_input_replicas("paci", plan, m)
    claims = kit.Claims(
        in_flight=lambda p, total, s: min(p - s, total),
        staleness=lambda p, total, s: -(-(p - 1 - s) // m),
        versions=lambda p, total, s: -(-(p - 1 - s) // m) + 1 if backward_rule == "stash" else 1,
    )
    return kit.unflushed("paci", plan, kit.latest_weights(plan, m, backward_rule=backward_rule), claims, m=m)


METHODS = (
    kit.Method(
        paci,
        since=2026,
        properties=kit.MethodProperties(flushes=False, same_updates=False, reads_stored_weights=False, uses_depth=True),
        picture=kit.Picture("PACI: each op reads the newest version (v); m = 4", 4, 12),
        choose="When weights are large and a little staleness does no harm: no bubble, one set of weights, and, with m "
        ">= p - 1 microbatches, a staleness of at most one update. `paci[backward_rule=stash]`, PipeDream with "
        "accumulation, stashes weights for true gradients: at most two versions if m >= p - 1, one at the last stage.",
    ),
)

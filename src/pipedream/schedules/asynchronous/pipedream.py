"""PipeDream: one forward, one backward, no flush; each minibatch stashes the weights that its forward read.

Narayanan et al., SOSP 2019, sections 3.2 (1F1B-RR) and 3.3 (weight stashing, vertical sync).

    rank 0 | F0  F1  .   B0' F2  B1' F3  B2' F4  B3'
    rank 1 | .   F0  B0' F1  B1' F2  B2' F3  B3' F4

A plan of one stage is plain data parallelism: each round of its replicas is one all-reduce and one update.
"""

from dataclasses import replace

from pipedream.schedules import kit

STASHING = kit.MethodProperties(
    flushes=False, same_updates=False, splits_minibatch=False, uses_depth=True, delays_updates=True
)


def pipedream(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream with weight stashing: a stage with W_s warm-up forwards has staleness W_s, W_s + 1 versions."""
    return stashing("pipedream", plan, microbatches)


def stashing(name: str, plan: kit.Plan, microbatches: int | None) -> kit.Schedule:
    """Returns `pipedream` under another name."""
    kit.refuse_microbatches(name, microbatches)
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(p - s, m),
        staleness=lambda p, m, s: p - 1 - s,
        versions=lambda p, m, s: p - s,
    )
    return kit.unflushed(name, plan, kit.Stash(kit.warmup_forwards(plan), plan.replicas, plan.update_delay), claims)


def pipedream_vertical_sync(plan: kit.Plan, microbatches: int | None = None) -> kit.Schedule:
    """Returns PipeDream with vertical sync: every stage has staleness W_0 and W_0 + 1 versions."""
    kit.refuse_microbatches("pipedream_vertical_sync", microbatches)
    weights = kit.VerticalSync(kit.warmup_forwards(plan), plan.replicas, plan.update_delay)
    claims = kit.Claims(
        in_flight=lambda p, m, s: min(p - s, m),
        staleness=lambda p, m, s: p - 1,
        versions=lambda p, m, s: p,
    )
    return kit.unflushed("pipedream_vertical_sync", plan, weights, claims)


METHODS = (
    kit.Method(
        pipedream,
        since=2019,
        properties=STASHING,
        picture=kit.Picture("PipeDream: 1F1B, no flush; v is the version of the weights that an op reads", None, 12),
        choose="When the minibatch cannot be split or a flush's bubble costs too much: no worker waits in steady "
        "state, at the price of stale gradients and one set of weights per minibatch in flight. The plan may replicate "
        "stages.",
    ),
    kit.Method(
        pipedream_vertical_sync,
        since=2019,
        aliases=("vertical_sync",),
        properties=replace(STASHING, versions_grow_with_stages=True),
        picture=kit.Picture("PipeDream with vertical sync: one version (v) for a minibatch at all stages", None, 12),
        choose="When all stages must see one version of the whole model per minibatch, so that the update rule is "
        "exactly delayed SGD. Costs more staleness and more weight sets than pipedream.",
    ),
)

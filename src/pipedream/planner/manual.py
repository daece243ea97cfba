"""Plans cut by hand: the user says where, the planner fills in what it costs."""

from __future__ import annotations

from itertools import pairwise

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.planner.dynamic_program.recurrence import check_recompute
from pipedream.planner.tables.method_occupancy import MethodOccupancy, VersionsRule, stash
from pipedream.planner.tables.search_space import Space

__all__ = ["by_hand", "check_cuts", "whole"]


def whole(
    profile: Profile,
    cluster: Cluster,
    *,
    replicas: int = 1,
    versions: VersionsRule = stash,
    microbatches: int = 1,
) -> Plan:
    """Returns the plan of one stage: one worker alone, or data parallelism over `replicas` workers.

    Raises:
        PlanError: see `by_hand`.
    """
    return by_hand(profile, cluster, (), (replicas,), versions=versions, microbatches=microbatches)


def by_hand(
    profile: Profile,
    cluster: Cluster,
    cuts: tuple[int | str, ...],
    replicas: tuple[int, ...] | None = None,
    *,
    versions: VersionsRule = stash,
    holds: MethodOccupancy | None = None,
    microbatches: int = 1,
    depth: str | tuple[int, ...] = "noam",
    update_delay: int = 0,
    recompute: str = "never",
    part_ties: bool = False,
) -> Plan:
    """Returns the plan that is cut before each of the given layers, in the order of the model's graph.

    Args:
        cuts: indices or names of layers.
        replicas: workers of each stage; one each unless given.
        update_delay: of the replicated stages of a pipeline.
        versions, holds: what the method holds of what is admitted, see `plan`.
        recompute: which stages keep only their input: 'never' any, 'auto' those that do not fit the memory at the
            paper's depth otherwise, 'always' all.
        part_ties: layers that share a parameter may lie in different stages: each holds it then (a method that flushes
            keeps them equal), though its bytes are counted at the first alone.

    Raises:
        PlanError: a cut that the model does not allow (says why), counts that match neither stages nor
            workers, or a stage that does not fit the memory.
    """
    places = tuple(_place(profile.graph, cut) for cut in cuts)
    check_cuts(profile.graph, places, part_ties=part_ties)
    counts = (1,) * (len(cuts) + 1) if replicas is None else tuple(replicas)
    if len(counts) != len(cuts) + 1:
        raise PlanError(
            f"replicas {counts} name {len(counts)} stages, cuts {cuts} make {len(cuts) + 1}; give one count a stage"
        )
    if min(counts) < 1:
        raise PlanError(f"replicas {counts} were asked; every stage needs at least one worker")
    if sum(counts) > cluster.workers:
        raise PlanError(
            f"replicas {counts} take {sum(counts)} workers, the cluster has {cluster.workers}; ask for fewer or give "
            "more workers"
        )
    space = Space.of(
        profile,
        cluster,
        versions=versions,
        update_delay=update_delay,
        microbatches=microbatches,
        holds=holds,
        downsets=(),
    )
    check_recompute(recompute)
    found = space.plan(places, counts, note="cut by hand", recompute=(recompute == "always",) * len(counts))
    if recompute == "auto":
        needs = (stage.peak_bytes for stage in space.with_bytes(found).stages)
        limits = (site.memory_bytes for site in found.sites)
        must = (limit is not None and need > limit for need, limit in zip(needs, limits, strict=True))
        found = space.plan(places, counts, note="cut by hand", recompute=tuple(must))
    return space.at_depth(found, depth)


def _place(graph: LayerGraph, cut: int | str) -> int:
    if isinstance(cut, int):
        return cut
    names = [layer.name for layer in graph.layers]
    if cut not in names:
        raise PlanError(f"a cut before layer {cut!r} was asked, the model's layers are {', '.join(names)}; name one")
    return names.index(cut)


def check_cuts(graph: LayerGraph, cuts: tuple[int, ...], *, part_ties: bool = False) -> None:
    """Checks that a model may be cut before each of these layers, `part_ties` also between some that share parameters.

    Raises:
        PlanError: it may not, with the reason; or they do not rise.
    """
    count = len(graph.layers)
    ties = graph.whole if part_ties else graph.ties
    allowed = [i for i in range(1, count) if not any(min(group) < i <= max(group) for group in ties)]
    if any(after <= before for before, after in pairwise(cuts)):
        raise PlanError(f"cuts {cuts} were asked; give layer indices that rise, each once")
    for cut in cuts:
        if cut in allowed:
            continue
        if not 0 < cut < count:
            reason = f"the model has {count} layers, a cut lies between 1 and {count - 1}"
        else:
            reason = _reason(graph, cut)
        raise PlanError(f"a cut before layer {cut} was asked: {reason}; cut at one of {allowed}")


def _reason(graph: LayerGraph, cut: int) -> str:
    group = next(group for group in (*graph.whole, *graph.ties) if min(group) < cut <= max(group))
    names = ", ".join(graph.layers[i].name for i in sorted(group))
    if group in graph.whole:
        return (
            f"it would part layers that share a module with buffers, or running statistics ({names}), which both move"
        )
    return f"it would part layers that share a parameter ({names}), which takes a method that flushes"

"""Plans cut by hand: the user gives the cuts, the planner fills in what the stages cost."""

from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.planner.tables.search_space import SearchSpace, apply_depth

_MAX_LISTED = 12  # layers in an error


def manual_plan(
    profile: Profile,
    cluster: Cluster,
    cuts: tuple[int | str, ...],
    replicas: tuple[int, ...] | None = None,
    *,
    in_flight: str | tuple[int, ...] = "noam",
    **of_space: Any,
) -> Plan:
    """Returns the plan with a cut before each of the given layers, in the order of the model's graph.

    Args:
        cuts: indices of layers, or names of layers or modules; a module is cut before its first layer.
        replicas: workers of each stage; None: one each.
        of_space: arguments of `SearchSpace.of`.

    Raises:
        PlanError: a cut that the model does not allow, counts that match neither the stages nor the workers, or a stage
            that does not fit the memory.
    """
    positions = tuple(place_of(profile.graph, cut) for cut in cuts)
    check_cuts(profile, positions)
    counts = (1,) * (len(cuts) + 1) if replicas is None else tuple(replicas)
    if len(counts) != len(cuts) + 1:
        raise PlanError(
            f"replicas {counts} are for {len(counts)} stages, cuts {cuts} make {len(cuts) + 1}; give one count for "
            "each stage"
        )
    if min(counts) < 1:
        raise PlanError(f"replicas {counts} were asked for; every stage needs at least one worker")
    if sum(counts) > cluster.workers:
        raise PlanError(
            f"replicas {counts} take {sum(counts)} workers, the cluster has {cluster.workers}; ask for fewer or give "
            "more workers"
        )
    space = SearchSpace.of(profile, cluster, downsets=(), **of_space)
    first, *others = space.choices.recomputing
    plan = space.build_plan(positions, counts, note="cut by hand", recompute=(first,) * len(counts))
    if others:
        peaks = (stage.peak_bytes for stage in space.with_bytes(plan).stages)
        limits = (site.memory_bytes for site in plan.costs.sites)
        redone = (limit is not None and peak > limit for peak, limit in zip(peaks, limits, strict=True))
        plan = space.build_plan(positions, counts, note="cut by hand", recompute=tuple(redone))
    return apply_depth(space, plan, in_flight)


def place_of(graph: LayerGraph, cut: int | str) -> int:
    """Returns the index of the layer of this name, or of the first layer of the module of this name."""
    if isinstance(cut, int):
        return cut
    names = [layer.name for layer in graph.layers]
    paths = [name.partition("@")[0] for name in names]
    if cut in names:
        place: int | None = names.index(cut)
    else:
        place = next((i for i, path in enumerate(paths) if path == cut or path.startswith(f"{cut}.")), None)
    if place is None:
        raise PlanError(f"a cut before layer {cut!r} was asked for, {_explain_no_layer(graph, cut, names, paths)}")
    if not place:
        raise PlanError(
            f"a cut before layer {cut!r} was asked for, which begins with the model's first layer, so no layer would "
            f"be before the cut; cut before {_quote_names(names[1:]) or 'no layer: the model has only one'}"
        )
    return place


def _explain_no_layer(graph: LayerGraph, cut: str, names: list[str], paths: list[str]) -> str:
    starts = {call.name: call.start for call in graph.calls}
    inner_starts = [call.start for call in graph.calls if f"{call.path}.".startswith(f"{cut}.") or call.name == cut]
    enclosing = [i for i, path in enumerate(paths) if cut.startswith(f"{path}.")]
    if inner_starts:
        enclosing = [i for i, name in enumerate(names) if starts.get(name, 0) <= inner_starts[0]]
    if enclosing:
        last = enclosing[-1]
        why = (
            "and that cannot be cut ('pipedream layers RECIPE' prints why)"
            if graph.calls
            else "one module of a chain; profile with finest=True (--finest) to cut inside of it"
        )
        alternatives = _quote_names(names[max(last, 1) : last + 2])
        return f"which is within layer {names[last]!r}, {why}{alternatives and f'; or cut before {alternatives}'}"
    if len(names) <= _MAX_LISTED:
        return f"the model's layers are {', '.join(names)}; name one"
    modules = dict.fromkeys(prefix for path in paths for prefix in accumulate(path.split("."), "{}.{}".format))
    nearest = get_close_matches(cut, modules, n=4, cutoff=0.5) or names[1:5]
    return f"but the model has no layer or module of this name; cut before {_quote_names(nearest)}, or another module"


def _quote_names(names: list[str]) -> str:
    return " or ".join(map(repr, names[:4]))


def check_cuts(profile: Profile, cuts: tuple[int, ...]) -> None:
    """Checks that the model may be cut before each of these layers; see `Profile.without_tied_groups`.

    Raises:
        PlanError: a cut is not allowed, or the cuts are not in increasing order.
    """
    graph = profile.graph
    count = len(graph.layers)
    allowed = [i for i in range(1, count) if not any(min(group) < i <= max(group) for group in graph.ties)]
    if any(after <= before for before, after in pairwise(cuts)):
        raise PlanError(f"cuts {cuts} were asked for; give layer indices in increasing order, each once")
    for cut in cuts:
        if cut in allowed:
            continue
        if not 0 < cut < count:
            reason = f"the model has {count} layers, a cut lies between 1 and {count - 1}"
        else:
            reason = _explain_cut(profile, cut)
        nearest = sorted(sorted(allowed, key=lambda i: abs(i - cut))[:_MAX_LISTED])
        raise PlanError(f"a cut before layer {cut} was asked for: {reason}; cut at one of {nearest}")


def _explain_cut(profile: Profile, cut: int) -> str:
    graph = profile.graph
    group = next(group for group in (*graph.inseparable, *graph.ties) if min(group) < cut <= max(group))
    names = ", ".join(graph.layers[i].name for i in sorted(group))
    if group in graph.inseparable:
        return (
            f"it would separate layers that share a module with buffers, running statistics, or one storage under "
            f"different parameters ({names}), which no method can keep equal"
        )
    return f"it would separate tied layers: {profile.ties_in_words()}"

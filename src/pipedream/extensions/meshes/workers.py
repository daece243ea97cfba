"""Clusters whose workers are several ranks of another cluster."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster, Workers


def of_meshes(cluster: Cluster, ranks: int) -> Cluster:
    """Returns a cluster whose workers are meshes of `ranks` consecutive workers of this one.

    Speed and memory stay those of one rank.

    Raises:
        PlanError: the workers of a machine, or of another group, do not divide into such meshes.
    """
    levels, remaining = list(cluster.levels), ranks
    while remaining > 1:
        first = levels[0]
        sizes = first.sizes or (first.width,)
        if not any(size % remaining for size in sizes):
            groups = tuple(size // remaining for size in first.sizes)
            levels[0], remaining = replace(first, width=first.width // remaining, sizes=groups), 1
        elif len(levels) > 1 and not first.sizes and remaining % first.width == 0:
            remaining //= first.width
            del levels[0]
        else:
            raise PlanError(
                f"workers of {ranks} ranks each were asked for, but the cluster joins {first.width} ranks at a "
                "time; choose a mesh whose size divides them"
            )
    if any(kind.count % ranks for kind in cluster.kinds):
        raise PlanError(f"workers of {ranks} ranks each were asked for, but the cluster's kinds do not divide by it")
    kinds = tuple(replace(kind, count=kind.count // ranks) for kind in cluster.kinds)
    return replace(cluster, levels=tuple(levels), kinds=kinds)


def of_workers(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """Returns a cluster whose worker i is the next `ranks[i]` workers of this one.

    Raises:
        PlanError: a worker neither lies within one machine (or other group) nor fills several, or its ranks differ.
    """
    ends = list(accumulate(ranks, initial=0))
    rows: list[list[int]] = [ends]
    for number in range(1, len(cluster.levels)):
        for first, last in pairwise(ends):
            if _is_in_parts(cluster, number, first, last):
                raise PlanError(
                    f"a worker of {last - first} ranks from rank {first} on was asked for, which would be in parts "
                    f"of several machines, {cluster}; choose meshes that fit into one, or fill several"
                )
        rows.append([start for start in cluster.starts(number) if start in set(ends)])
    levels = []
    for level, row, groups in zip(cluster.levels, rows, [*rows[1:], [0, ends[-1]]], strict=True):
        sizes = tuple(sum(first <= start < last for start in row) for first, last in pairwise(groups))
        levels.append(level.with_sizes(sizes))
    kinds: list[Workers] = []
    for first, last in pairwise(ends) if cluster.kinds else ():
        kind, *others = _list_kinds(cluster, first, last)
        if others:
            raise PlanError(f"a worker of the ranks {first} to {last - 1} was asked for, but these differ")
        kinds.append(kind)
    return replace(cluster, levels=tuple(levels), kinds=tuple(kinds))


def may_be_worker(cluster: Cluster, first: int, last: int) -> bool:
    """Returns whether the ranks first <= i < last may be one worker, see `of_workers`."""
    is_in_parts = any(_is_in_parts(cluster, number, first, last) for number in range(1, len(cluster.levels)))
    return not is_in_parts and len(_list_kinds(cluster, first, last)) == 1


def _is_in_parts(cluster: Cluster, level: int, first: int, last: int) -> bool:
    starts = cluster.starts(level)
    return any(first < start < last for start in starts) and not {first, last} <= set(starts)


def _list_kinds(cluster: Cluster, first: int, last: int) -> list[Workers]:
    kinds = dict.fromkeys((cluster.devices[w], cluster.speeds[w], cluster.memories[w]) for w in range(first, last))
    return [Workers(1, *kind) for kind in kinds]

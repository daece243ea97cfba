"""Every plan, one after the other: the oracle of the dynamic program, and for small models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

from pipedream.core.errors import PlanError
from pipedream.core.plan.depth import noam
from pipedream.core.plan.plan import Plan
from pipedream.planner.dynamic_program.recurrence import rank
from pipedream.planner.tables.search_space import Space

__all__ = ["every_plan", "exhaustive", "fits", "peak_bytes", "ranked"]


def every_plan(space: Space, *, orders: Iterable[tuple[int, ...]] = (), recompute: str = "never") -> Iterator[Plan]:
    """Yields every plan of the space on at most all workers, at the paper's depth, also what the memory does not fit.

    All chains of its places are tried, by what is in them and not by what the space says of their order.

    Args:
        space: whose profile and cluster.
        orders: of all workers, whose last ones a plan takes; unless given the cluster's own.
        recompute: 'auto' yields a plan once for each choice of stages that do, 'always' with all of them.
    """
    workers = space.cluster.workers
    lines = [*orders] or [tuple(range(workers))]
    choices = {"never": (False,), "auto": (False, True), "always": (True,)}[recompute]
    chains: list[tuple[int, ...]] = [()]
    for stages in range(1, workers + 1):
        for replicas in product(range(1, workers + 1), repeat=stages):
            if sum(replicas) > workers:
                continue
            for cuts in chains:
                for again in product(choices, repeat=stages):
                    for line in lines:
                        order = line[workers - sum(replicas) :]
                        taken = () if space.cluster.is_flat or order == tuple(range(len(order))) else order
                        yield space.plan(cuts, replicas, order=taken, recompute=again)
        chains = [(*cuts, cut) for cuts in chains for cut in space.positions[1:-1] if _rises(space, (*cuts, cut))]


def _rises(space: Space, cuts: tuple[int, ...]) -> bool:
    held = [space.downsets[cut] for cut in cuts]
    return all(before != behind and not before & ~behind for before, behind in pairwise(held))


def exhaustive(
    space: Space,
    among: Callable[[Plan], bool] = lambda plan: True,
    *,
    orders: Iterable[tuple[int, ...]] = (),
    recompute: str = "never",
) -> Plan:
    """Finds what `Pipelines` finds, with the same ties, by trying every plan of those that `among` keeps.

    Raises:
        PlanError: none fits.
    """
    fitting = ranked(space, among, orders=orders, recompute=recompute)
    if not fitting:
        raise PlanError("none of the plans fits the memory; give more of it, or more workers")
    return fitting[0]


def ranked(
    space: Space,
    among: Callable[[Plan], bool] = lambda plan: True,
    *,
    orders: Iterable[tuple[int, ...]] = (),
    recompute: str = "never",
) -> list[Plan]:
    """Returns all plans that fit (`fits`) and that `among` keeps, the best first."""
    need = cache(partial(_need, space))
    every = every_plan(space, orders=orders, recompute=recompute)
    return sorted((plan for plan in every if among(plan) and _fits(space, plan, need)), key=rank)


def fits(space: Space, plan: Plan) -> bool:
    """Tells whether each stage fits the smallest of its workers, as a search counts it: with the least of messages
    (`Space.need_bytes`), and where an update delay does not yet ask for more depth."""
    return _fits(space, plan, partial(_need, space))


def peak_bytes(space: Space, plan: Plan) -> int:
    """Returns the least need of a plan's fullest worker, as a search counts it."""
    return max(_needs(space, plan, partial(_need, space)))


def _fits(space: Space, plan: Plan, need: Callable[..., int]) -> bool:
    for s, need_bytes in enumerate(_needs(space, plan, need)):
        memories = [memory for w in plan.workers_of(s) if (memory := space.cluster.memories[w]) is not None]
        if memories and need_bytes > min(memories):
            return False
    return True


def _needs(space: Space, plan: Plan, need: Callable[..., int]) -> list[int]:
    rows = zip(space.ends(plan), plan.stages, noam(plan.replicas), plan.update_delay, strict=True)
    return [
        need(*ends, held, update_delay, stage.recompute, stage.replicas) for ends, stage, held, update_delay in rows
    ]


def _need(space: Space, *how: Any) -> int:
    return int(space.need_bytes(*how))

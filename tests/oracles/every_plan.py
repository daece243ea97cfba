"""Every plan of a small space, one by one: the oracle that tests the dynamic program."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pipedream as pd
from pipedream.core.plan.depth import noam
from pipedream.planner.dynamic_program.recurrence import tie_break_key
from pipedream.planner.tables.search_space import SearchSpace


def every_plan(
    space: SearchSpace, *, orders: Iterable[tuple[int, ...]] = (), recompute: str = "never"
) -> Iterator[pd.Plan]:
    """Yields every plan at the paper's depth, on any number of workers, even if it does not fit the memory.

    Args:
        orders: orders of all workers, of which a plan takes the last ones; (): the cluster's own.
        recompute: 'auto' yields each choice of stages that recompute.
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
                        worker_order = () if space.cluster.is_flat or order == tuple(range(len(order))) else order
                        yield space.build_plan(cuts, replicas, order=worker_order, recompute=again)
        chains = [(*cuts, cut) for cuts in chains for cut in space.positions[1:-1] if _rises(space, (*cuts, cut))]


def _rises(space: SearchSpace, cuts: tuple[int, ...]) -> bool:
    sets = [space.downsets[cut] for cut in cuts]
    return all(before != after and not before & ~after for before, after in pairwise(sets))


def exhaustive(space: SearchSpace, *among: Callable[[pd.Plan], bool], **how: Any) -> pd.Plan:
    """Finds what `DynamicProgram` finds, with the same ties, by trying every plan; arguments are those of `ranked`."""
    fitting = ranked(space, *among, **how)
    if not fitting:
        raise pd.errors.PlanError("none of the plans fits the memory; give more of it, or more workers")
    return fitting[0]


def ranked(
    space: SearchSpace,
    among: Callable[[pd.Plan], bool] = lambda plan: True,
    *,
    orders: Iterable[tuple[int, ...]] = (),
    recompute: str = "never",
) -> list[pd.Plan]:
    """Returns all plans that fit and that `among` accepts, the best first."""
    need = cache(partial(_need, space))
    every = every_plan(space, orders=orders, recompute=recompute)
    return sorted((plan for plan in every if among(plan) and _fits(space, plan, need)), key=tie_break_key)


def peak_bytes(space: SearchSpace, plan: pd.Plan) -> int:
    """Returns the need of a plan's fullest worker, as a search counts it."""
    return max(_needs(space, plan, partial(_need, space)))


def _fits(space: SearchSpace, plan: pd.Plan, need: Callable[..., int]) -> bool:
    for s, need_bytes in enumerate(_needs(space, plan, need)):
        memories = [memory for w in plan.workers_of(s) if (memory := space.cluster.memories[w]) is not None]
        if memories and need_bytes > min(memories):
            return False
    return True


def _needs(space: SearchSpace, plan: pd.Plan, need: Callable[..., int]) -> list[int]:
    rows = zip(space.ends(plan), plan.stages, noam(plan.replicas), plan.update_delay, strict=True)
    return [need(*ends, in_flight, delay, stage.recompute, stage.replicas) for ends, stage, in_flight, delay in rows]


def _need(space: SearchSpace, *how: Any) -> int:
    return int(space.need_bytes(*how))


def best_plans(space: SearchSpace, **how: Any) -> tuple[pd.Plan | None, pd.Plan | None]:
    """Returns the best plan that fits as a search counts it, and the best with all its messages; None where there is
    none."""
    plans = ranked(space, **how)
    fitting = (full for plan in plans if (full := space.with_bytes(plan)).first_stage_over_memory is None)
    return (space.with_bytes(plans[0]) if plans else None), next(fitting, None)

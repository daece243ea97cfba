"""Memory for messages: only a whole plan determines it, so a search keeps some free until its plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TypeVar

from pipedream.core.errors import PlanError, ShortageError
from pipedream.core.plan.plan import Plan
from pipedream.core.units import format_bytes, shorten
from pipedream.planner.tables.search_space import SearchSpace

_Space = TypeVar("_Space", bound=SearchSpace)

_STEPS = 4  # of the bisection for the least memory to keep free; each is a search


def search_with_message_memory(
    space: _Space,
    search: Callable[[_Space], Plan],
    narrower_searches: Sequence[Callable[[_Space], Plan]],
    limit_s: float = inf,
) -> Plan:
    """Returns the plan of a search, whose messages fit too: only a whole plan determines their memory.

    If they do not fit, some memory is kept free for them on every stage, and the narrower searches are tried too. The
    bound is still that of the first search.

    Args:
        limit_s: seconds per minibatch above which a plan need not fit.

    Raises:
        ShortageError: nothing fits; names a plan that would fit with a little more memory.
    """
    try:
        least = search(space)
        if not space.cluster.is_limited or least.bound_s > limit_s:
            return least
        least = space.with_bytes(least)
        if least.first_stage_over_memory is None:
            return least
        plans = [*_spare_memory(space, search, least)]
        for narrower in narrower_searches:
            fitting_s = (plan.period_s for plan in plans if plan.first_stage_over_memory is None)
            plans += _spare_memory(space, narrower, rival_s=min(fitting_s, default=inf))
    except ShortageError as error:
        more = _describe_sufficient(space, (search, *narrower_searches), error.need_bytes)
        raise error.reworded(f"{error}{more}") from None
    fitting = [plan for plan in plans if plan.first_stage_over_memory is None]
    if not fitting:  # the caller refuses it, naming what it needs
        return min((least, *plans), key=_count_missing_bytes)
    best = min(fitting, key=lambda plan: (plan.period_s, plan.slowest_stage_s))
    return replace(best, bound_s=min(least.bound_s, best.slowest_stage_s))


def _spare_memory(
    space: _Space, search: Callable[[_Space], Plan], first: Plan | None = None, rival_s: float = inf
) -> Iterator[Plan]:
    """Yields plans with more and more memory kept free for messages until one fits, then less.

    Args:
        first: without any, if it is known.
        rival_s: seconds per minibatch of a plan that fits; none is sought that cannot take less.
    """

    def search_sparing(spare_bytes: int) -> Plan | None:
        try:
            plan = space.with_bytes(search(replace(space, spare_bytes=spare_bytes)))
        except PlanError:
            return None
        free = f"; {format_bytes(spare_bytes)} of a worker's memory were kept free for messages"
        return replace(plan, note=f"{plan.note}{free if spare_bytes else ''}")

    too_little, enough, plan = 0, 0, first or search_sparing(0)
    while plan is not None and plan.first_stage_over_memory is not None:
        if plan.bound_s >= rival_s:
            return
        yield plan
        # At least doubled, so that it ends: another plan may need more memory for its messages.
        too_little, enough = enough, enough + max(enough, _count_missing_bytes(plan))
        plan = search_sparing(enough)
    if plan is not None:
        yield plan
    for _ in range(_STEPS if enough else 0):  # with less kept free, a faster plan may fit
        middle = (too_little + enough) // 2
        plan = search_sparing(middle)
        if plan is not None:
            yield plan
        if plan is not None and plan.first_stage_over_memory is not None:
            too_little = middle
        else:
            enough = middle


def _count_missing_bytes(plan: Plan) -> int:
    limits = [site.memory_bytes for site in plan.costs.sites]
    return max(stage.peak_bytes - (limit or stage.peak_bytes) for stage, limit in zip(plan.stages, limits, strict=True))


def _describe_sufficient(space: _Space, searches: Iterable[Callable[[_Space], Plan]], need_bytes: int) -> str:
    """Returns a plan that would fit with a little more memory, in words; '' if there is none."""

    def enlarged(memory_bytes: int | None) -> int | None:
        return None if memory_bytes is None else max(memory_bytes, need_bytes)

    larger = replace(space, cluster=space.cluster.with_memory(enlarged))
    rows: list[tuple[int, Plan]] = []
    for search in searches:
        with suppress(PlanError):
            plan = larger.with_bytes(search(larger))
            sites = zip(plan.stages, plan.costs.sites, strict=True)
            rows.append((max(stage.peak_bytes for stage, site in sites if site.memory_bytes is not None), plan))
    if not rows:
        return ""
    most, plan = min(rows, key=lambda row: row[0])
    return f"; the plan {shorten(plan.config, 60)} would fit {format_bytes(most)} ({most} bytes)"

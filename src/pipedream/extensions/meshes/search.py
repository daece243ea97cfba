"""The search for cuts, replicas and meshes together (`program`).

The program that bounds from below is solved first. If its plan takes no longer than the bound and fits, it is optimal.
If not, the exact program is solved, or where that is too large the one that bounds from above; the plan's bound then
says how far from optimal it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import Mesh
from pipedream.extensions.meshes.program import MeshPeriods, MeshProgram
from pipedream.extensions.meshes.space import MeshSpace, StageChoice
from pipedream.planner.arrays import Tables
from pipedream.planner.cycles import shorten_cycle
from pipedream.planner.dynamic_program.recurrence import Shortage, refuse
from pipedream.planner.search import parse_counts
from pipedream.planner.spare_memory import search_with_message_memory
from pipedream.planner.tables.search_space import SearchSpace, apply_depth, with_positions, with_slower_links

_MAX_WORK = 3e8
"""Comparisons of costs in the exact program; above this it is only bounded."""

_STEPS = 12  # of the bisection over the period
_CLOSE, _COARSE = 1.005, 1.05  # a bound that near is enough; while memory for messages is sought

_EQUAL = 1 + 1e-12  # sums of seconds in another order


@dataclass(frozen=True, eq=False)
class MeshSearch:
    """The searches of one space for plans whose stages have replicas and meshes of their own.

    Attributes:
        cycle: all replica counts divide it; 0: any, if the plan can be proved (`planner.cycles`).
    """

    space: MeshSpace
    all_ranks: bool = False
    cuts: tuple[int, ...] | None = None
    cycle: int = 0

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        meshes: Sequence[Mesh],
        *,
        all_ranks: bool = False,
        cuts: tuple[int, ...] | None = None,
        **space: Any,
    ) -> MeshSearch:
        """Returns the searches of a profile that knows a rank of each mesh, on a cluster of ranks.

        Args:
            cuts: the layers at which stages begin; None: any.
            space: the space that `SearchSpace.of` made.
        """
        base = SearchSpace.of(profile, cluster, **space)
        if cuts is not None:
            base = with_positions(base, (0, *cuts, len(profile.layers)))
        return cls(_drop_beaten(MeshSpace.over(base, meshes), all_ranks), all_ranks, cuts)

    def best(
        self, shape: str | tuple[int, ...], in_flight: str | tuple[int, ...] = "noam", link_factor: float = 1.0
    ) -> Plan:
        """Returns the plan with the fastest slowest stage, at a depth.

        Args:
            shape: 'any', 'pipeline' or the replicas of each stage.
            link_factor: as in a `SearchVariant`.

        Raises:
            PlanError: nothing fits, or there are too few ranks or layers.
        """
        search = partial(self._search_provable if shape in ("any", "pipeline") else self._search, shape=shape)
        if link_factor != 1:
            slowed = with_slower_links(self.space, link_factor)
            choices = slowed.choices_of(search(slowed))
            return apply_depth(
                self.space, self.space.plan_of(choices, f"as if links were {link_factor:g} times slower"), in_flight
            )
        return apply_depth(self.space, search_with_message_memory(self.space, search, ()), in_flight)

    def _search_provable(self, space: MeshSpace, shape: str | tuple[int, ...]) -> Plan:
        def search(cycle: int) -> Plan | None:
            with suppress(PlanError):
                return replace(self, cycle=cycle)._search(space, shape)
            return None

        return shorten_cycle(self._search(space, shape), space.cluster.workers, search, tried=1)

    def _make_program(self, space: MeshSpace, how: str, shape: str | tuple[int, ...]) -> Any:
        counts = None if shape in ("any", "pipeline") else parse_counts(shape)
        return (MeshPeriods if how == "below" else MeshProgram)(
            space, how, counts, self.all_ranks, shape != "pipeline", self.cuts is not None, self.cycle
        )

    def _search(self, space: MeshSpace, shape: str | tuple[int, ...]) -> Plan:
        program = partial(self._make_program, space, shape=shape)
        names = ", ".join(str(mesh) for mesh in space.meshes)
        kinds = f"plans whose stages have replicas and meshes ({names}) of their own, on consecutive ranks"
        # The bound where memory for messages is not counted yet, if the exact program is too large.
        bounds = space.shared_tables.setdefault(f"bounds, with {space.cluster.memories}", Tables())
        key = shape, self.cycle
        below = program(how="below")
        if space.spare_bytes and key in bounds:
            return self._search_large(below, shape, kinds, bounds[key], [])
        relaxed = below.best()
        if relaxed is None:
            refuse(_find_shortage(below, kinds), kinds)
        bound_s, choices = relaxed
        plan = space.plan_of(choices)
        if fits_rank_memory(space, choices) and plan.slowest_stage_s <= bound_s * _EQUAL:
            return _add_note(plan, kinds, plan.slowest_stage_s, is_exact=not space.spare_bytes)
        exact = program(how="exact")
        if not exact.exceeds(_MAX_WORK):
            answer = exact.best()
            if answer is None:
                refuse(_find_shortage(exact, kinds), kinds)
            return _add_note(space.plan_of(answer[1]), kinds, answer[0], is_exact=not space.spare_bytes)
        if space.cluster.is_limited and not space.spare_bytes:
            bounds[key] = bound_s
        return self._search_large(below, shape, kinds, bound_s, [plan] if fits_rank_memory(space, choices) else [])

    def _search_large(
        self, below: MeshPeriods, shape: str | tuple[int, ...], kinds: str, bound_s: float, plans: list[Plan]
    ) -> Plan:
        space = below.space
        program = partial(self._make_program, space, shape=shape)
        # One that fits with more memory kept free.
        plans_by_shape = space.shared_tables.setdefault(f"plans, with {space.cluster.memories}", Tables())
        fitting = plans_by_shape.setdefault((shape, self.cycle), {})
        plans = [*plans, *(plan for spare_bytes, plan in fitting.items() if spare_bytes >= space.spare_bytes)]
        if shape in ("any", "pipeline") and space.cluster.is_limited:
            bound_s, more = _bisect(below, bound_s, plans)
            plans = [*plans, *more]
        elif (above := program(how="above").best()) is not None:
            plans.append(space.plan_of(above[1]))
        if not plans:
            refuse(_find_shortage(program(how="above"), kinds), kinds)
        best = fitting[space.spare_bytes] = min(plans, key=lambda plan: plan.slowest_stage_s)
        return _add_note(best, kinds, min(bound_s, best.slowest_stage_s), is_exact=False)


def _bisect(below: MeshPeriods, bound_s: float, plans: list[Plan]) -> tuple[float, list[Plan]]:
    """A higher bound, and plans between it and the best that is known."""
    high_s, nearer = min((plan.slowest_stage_s for plan in plans), default=np.inf), list[Plan]()
    for _ in range(_STEPS):
        if high_s <= bound_s * (_COARSE if below.space.spare_bytes else _CLOSE):
            break
        middle_s = 1.5 * bound_s if np.isinf(high_s) else (bound_s + high_s) / 2
        choices = below.within(middle_s)
        if choices is None:
            bound_s = middle_s
        else:
            nearer.append(below.space.plan_of(choices))
            high_s = middle_s
    if not plans and not nearer and (choices := below.within(np.inf)) is not None:
        nearer.append(below.space.plan_of(choices))
    return bound_s, nearer


def _add_note(plan: Plan, kinds: str, bound_s: float, *, is_exact: bool) -> Plan:
    note = f"{'optimal' if is_exact else 'best found'} among {kinds}"
    return replace(plan, note=note, bound_s=min(bound_s, plan.slowest_stage_s))


def fits_rank_memory(space: MeshSpace, choices: Sequence[StageChoice]) -> bool:
    """Returns whether each stage fits its smallest rank, with the fewest possible messages."""
    return all(limit is None or need <= limit for need, limit in _compute_needs(space, choices))


def _compute_needs(space: MeshSpace, choices: Sequence[StageChoice]) -> list[tuple[int, int | None]]:
    """The need and the memory of a rank of each stage."""
    plan = space.plan_of(choices)
    after = [*accumulate(reversed(plan.replicas))][::-1]
    needs = []
    for choice, workers, delay, rank_space, site in zip(
        choices, after, plan.update_delay, space.of_stages(plan), plan.costs.sites, strict=True
    ):
        in_flight = (workers - 1) // choice.replicas + 1
        need = int(
            rank_space.need_bytes(choice.first, choice.last, in_flight, delay, choice.recompute, choice.replicas)
        )
        needs.append((need + (space.spare_bytes if len(choices) > 1 else 0), site.memory_bytes))
    return needs


def _find_shortage(program: MeshProgram, kinds: str) -> Shortage:
    """Returns the shortage of the plan whose fullest rank needs least; raises PlanError if no plan has the shape."""
    least = program.least_bytes()
    if least is None:
        space = program.space
        raise PlanError(
            f"{kinds} were asked for, {'-'.join(map(str, program.counts or ())) or 'of at least two stages'}; the "
            f"model's layers can be cut at {len(space.positions) - 2} places, and the cluster has "
            f"{space.cluster.workers} ranks; ask for fewer stages or give more ranks"
        )
    needs = _compute_needs(program.space, least[1])
    fullest = max(range(len(needs)), key=lambda s: needs[s][0])
    first, last = (program.space.downsets[at].bit_count() for at in least[1][fullest][:2])
    limits = [limit for _, limit in needs if limit is not None]
    return Shortage(max(int(least[0]), needs[fullest][0]), min(limits, default=0), first, last)


def _drop_beaten(space: MeshSpace, all_ranks: bool) -> MeshSpace:
    """Returns the space without the meshes that another one beats, or equals, in the seconds and bytes of every stage.

    A mesh of fewer ranks beats one of more only where ranks are alike and may be idle. This is exact.
    """
    may_be_smaller = space.cluster.is_flat and not all_ranks
    costs = {mesh: _compute_costs(space, mesh) for mesh in space.meshes}

    def beats(mesh: Mesh, other: Mesh) -> bool:
        if mesh.size > other.size or (mesh.size < other.size and not may_be_smaller):
            return False
        return all(bool((a <= b).all()) for a, b in zip(costs[mesh], costs[other], strict=True))

    unbeaten: list[Mesh] = []
    for mesh in sorted(space.meshes, key=lambda mesh: mesh.size):
        if not any(beats(other, mesh) for other in unbeaten):
            unbeaten = [other for other in unbeaten if not beats(mesh, other)] + [mesh]
    return replace(space, meshes=tuple(mesh for mesh in space.meshes if mesh in unbeaten))


def _compute_costs(space: MeshSpace, mesh: Mesh) -> list[Any]:
    """Arrays over all stages that seconds and bytes of a plan grow with."""
    rank_space, places = space.of_rank(mesh), np.array(space.positions)
    chosen = np.nonzero(space.precedes)
    first, last = places[chosen[0]], places[chosen[1]]
    none = np.zeros(first.shape, dtype=int)
    edges = rank_space.bytes_of(first, last)
    sizes = rank_space.sizes(first, last)
    updates = [rank_space.update_s(first, last, delay, (none, none)) for delay in (0, 1)]
    kept_bytes = [
        sizes.parameter_bytes,
        sizes.trained_bytes,
        sizes.optimizer_bytes,
        sizes.activation_bytes,
        sizes.input_bytes,
        sizes.prefetched_bytes,
        sizes.temporary_bytes,
        sizes.temporary_bytes - sizes.freed_before_peak_bytes,
        sizes.largest_parameter_bytes,
        sizes.update_temporary_bytes,
    ]
    # A boundary between two meshes depends on the bytes of all their ranks, too.
    crossing = rank_space.crossing[places]
    return [*rank_space.passes_s(first, last), *updates, *edges, crossing, crossing * mesh.size, *kept_bytes]

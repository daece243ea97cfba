"""What is searched: places where a graph may be cut, and what lies between two of them as a stage, from sums.

A place is a downset of the graph (`lattice`). Places 0 to n are the layers before each index, in the graph's order;
behind them come those downsets that this order does not pass. The cost of a stage is a function of (first place, last
place, replicas) and its memory one of (first, last, in_flight, update delay); a search needs nothing else but `positions`, the
places that it may use, and `precede`, which pairs of them make a stage.

Seconds are added exactly (as integers over a common power of two) and rounded once. So stages that cost
the same compare equal, wherever they stand in the model, and ties are broken by rule, not by rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan import depth as depths
from pipedream.core.plan.memory import (
    Peers,
    StageMemory,
    StageSizes,
    part_bytes,
    peers_of,
    stage_bytes,
    stage_memory,
)
from pipedream.core.plan.plan import Plan, Stage
from pipedream.core.plan.site import Site
from pipedream.core.schedule.occupancy import StageOccupancy
from pipedream.core.units import format_bytes
from pipedream.planner.cuts.cut_places import places
from pipedream.planner.cuts.downsets import Lattice, bits, rows
from pipedream.planner.tables.method_occupancy import MethodOccupancy, OccupancyRule, VersionsRule, stash
from pipedream.planner.tables.profile_tables import by_size, exact, input_bytes, sums
from pipedream.planner.tables.working_peaks import Peaks, PlaceTables

__all__ = ["Index", "Space"]

Index = Any
"""A place, or a numpy array of them: each cost is one formula, for one stage or for all at once."""


@dataclass(frozen=True, eq=False)
class Space:
    """A profile, a cluster and a way to train: what everything between two places would cost as a stage.

    Attributes:
        profile, cluster: as given.
        versions: versions of the weights alive at once, from the count in flight and the update delay.
        update_delay: of the replicated stages of a pipeline; others have none (`Plan.update_delay`).
        microbatches: parts of a minibatch; activations in flight and inputs are those of one part.
        scale: seconds are integers over this power of two.
        forward, backward: seconds of all layers before a place, times `scale`; the loss is part of the last
            layer's backward.
        parameters, optimizer: bytes of all layers before a place; the optimizer's state is shared out by
            parameter bytes.
        peaks: what stages keep, and need while they work.
        crossing: bytes that cross a cut at a place; at 0 the model's input, at n its output.
        downsets: the layers before each place, as sets of bits.
        positions: the places where a stage may begin or end, those of fewer layers first; 0 and n among them.
        is_whole: no plan on any places is faster than the best on these.
        holds: what the method holds of what is admitted; None: all of it, in so many `versions`.
        spare_bytes: of a worker's memory that a search leaves free in stages with neighbours.
    """

    profile: Profile
    cluster: Cluster
    versions: VersionsRule
    update_delay: int
    microbatches: int
    scale: int
    forward: Any
    backward: Any
    parameters: Any
    optimizer: Any
    peaks: Peaks
    crossing: Any
    downsets: tuple[int, ...]
    positions: tuple[int, ...]
    is_whole: bool = True
    holds: MethodOccupancy | None = None
    spare_bytes: int = 0

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        *,
        versions: VersionsRule = stash,
        update_delay: int = 0,
        microbatches: int = 1,
        holds: MethodOccupancy | None = None,
        downsets: Iterable[int] | None = None,
    ) -> Space:
        """Returns the space of a profile on a cluster.

        Args:
            downsets: to cut at; all that a best plan may need, or good ones where there are too many of them.

        Raises:
            PlanError: fewer than one microbatch, or an update delay that is neither 0 nor 1.
        """
        if update_delay not in (0, 1):
            raise PlanError(
                f"update delay {update_delay} was asked for; give 0 (the paper's) or 1 (updates behind the next forward)"
            )
        if microbatches < 1:
            raise PlanError(f"a minibatch is split into at least 1 microbatch, found {microbatches}; give 1 or more")
        layers, count = profile.layers, len(profile.layers)
        lattice = Lattice.of(profile.graph)
        is_whole = False
        if downsets is None:
            downsets, is_whole = places(lattice, profile, cluster)
        prefixes = {(1 << i) - 1: i for i in range(count + 1)}
        others = [found for found in sorted(downsets, key=by_size) if found not in prefixes]
        known = prefixes | {found: i for i, found in enumerate(others, count + 1)}
        positions = tuple(known[found] for found in sorted({0, *downsets, lattice.everything}, key=by_size))

        steps = [(list(bits(found & ~before)), list(bits(before & ~found))) for before, found in pairwise([0, *others])]
        forward = [layer.forward_s.as_integer_ratio() for layer in layers]
        backward = [layer.backward_s.as_integer_ratio() for layer in layers]
        loss = profile.loss_s.as_integer_ratio()
        scale = max(below for _, below in (*forward, *backward, loss))
        backward_parts = exact(backward, scale)
        backward_parts[-1] += loss[0] * (scale // loss[1])
        parameters = sums([layer.parameter_bytes for layer in layers], steps)
        crossing = lattice.crossing_bytes(tuple(known), [layer.output_bytes for layer in layers])
        crossing[0] = input_bytes(profile)
        crossing[count] = sum(layers[i].output_bytes for i in range(count) if not lattice.consumers[i])
        return cls(
            profile,
            cluster,
            versions,
            update_delay,
            microbatches,
            scale,
            np.array(sums(exact(forward, scale), steps), dtype=object),
            np.array(sums(backward_parts, steps), dtype=object),
            np.array(parameters),
            # Rounding the running share, and not each layer's, makes any cut's stages add up to the whole.
            np.array([profile.optimizer_bytes * held // max(parameters[count], 1) for held in parameters]),
            Peaks.of(
                profile,
                tuple(known),
                PlaceTables(
                    np.array(sums([layer.activation_bytes for layer in layers], steps)),
                    np.array(parameters),
                    crossing,
                ),
            ),
            crossing,
            tuple(known),
            positions,
            is_whole,
            holds,
        )

    @cached_property
    def precede(self) -> Any:
        """Which positions make a stage, as precede[from, to]: what is before the one is before the other too."""
        if max(self.positions) <= len(self.profile.layers):
            places = np.array(self.positions)
            return places[:, None] < places[None, :]
        inside = rows([self.downsets[place] for place in self.positions], len(self.profile.layers)).astype(np.float32)
        sizes = inside.sum(axis=1)
        return (inside @ inside.T >= sizes[:, None]) & (sizes[:, None] < sizes[None, :])

    def update_s(self, first: Index, last: Index, update_delay: int = 0) -> Any:
        """Returns the seconds of one update of a stage: its share of the optimizer's step, by parameter bytes.

        Stages that hold versions copy their weights first, where a forward that is in flight reads them: all but the
        one at the output, which has none in flight, unless it lags.
        """
        copy_s = self._copies(last, update_delay) * self._share(self.profile.copy_s, first, last)
        return self._share(self.profile.update_s, first, last) + copy_s

    def _copies(self, last: Index, update_delay: int) -> Any:
        return (self.held(2).versions > 1) & (bool(update_delay) | (np.asarray(last) != len(self.profile.layers)))

    def _share(self, seconds: float, first: Index, last: Index) -> Any:
        held = self.parameters[last] - self.parameters[first]
        return seconds * held / max(int(self.parameters[len(self.profile.layers)]), 1)

    def passes_s(self, first: Index, last: Index) -> tuple[Any, Any]:
        """Returns the seconds of forward and backward of a stage on one worker."""
        forward = (self.forward[last] - self.forward[first]) / self.scale
        backward = (self.backward[last] - self.backward[first]) / self.scale
        return forward, backward

    def period_s(self, passes_s: tuple[Any, Any], first: Index, last: Index, site: Site) -> Any:
        """Returns the seconds per minibatch of a stage on a site, its `passes_s` being known."""
        return site.period_s(*passes_s, self.update_s(first, last), *self.bytes_of(first, last))

    def bytes_of(self, first: Index, last: Index) -> tuple[Any, Any, Any]:
        """Returns the bytes of a stage's weights, and those of a pipeline's stage that cross before and behind it."""
        end = len(self.profile.layers)
        return (
            self.parameters[last] - self.parameters[first],
            np.where(np.asarray(first) == 0, 0, self.crossing[first]),
            np.where(np.asarray(last) == end, 0, self.crossing[last]),
        )

    def site(self, replicas: int) -> Site:
        """Returns the site of a stage that has neighbours, all links being like the slowest."""
        cluster = self.cluster
        flat = Cluster.flat(replicas + 2, cluster.bandwidth_bytes_per_s, cluster.latency_s, cluster.memory_bytes)
        return Site.of(flat, range(1, replicas + 1), 0, replicas + 1)

    def need_bytes(
        self,
        first: Index,
        last: Index,
        in_flight: int,
        update_delay: int = 0,
        recompute: bool = False,
        replicas: int = 1,
    ) -> Any:
        """Returns the least peak bytes of a worker of a stage that admits so many microbatches.

        How many messages it holds depends on its neighbours, which a search does not know: it has at least one on
        either side, and the one before it holds at least as much. The figures of a plan (`with_bytes`) are never below.
        """
        held = self.held(in_flight, update_delay, replicas)
        before = self.held(in_flight + 1, update_delay, replicas)  # at the paper's depth it admits one more
        peers = Peers(waiting=before.in_flight + 1, sums=replicas > 1)
        return stage_bytes(self.sizes(first, last), peers=peers, **self._how(held, update_delay, recompute, replicas))

    def memory(
        self,
        first: int,
        last: int,
        held: StageOccupancy,
        peers: Peers,
        update_delay: int = 0,
        recompute: bool = False,
        replicas: int = 1,
    ) -> StageMemory:
        """Returns what a worker of a stage holds at its worst moment, its neighbours being known."""
        return stage_memory(self.sizes(first, last), peers=peers, **self._how(held, update_delay, recompute, replicas))

    def sizes(self, first: Index, last: Index) -> StageSizes:
        """Returns what the layers of a stage need for one microbatch, the largest."""
        part = partial(part_bytes, parts=self.microbatches, samples=self.profile.batch)
        _, received, sent = self.bytes_of(first, last)
        return StageSizes(
            parameter_bytes=self.parameters[last] - self.parameters[first],
            optimizer_bytes=self.optimizer[last] - self.optimizer[first],
            activation_bytes=part(self.peaks.activation_bytes(first, last)),
            input_bytes=part(self.crossing[first]),
            received_bytes=part(received),
            loaded_bytes=np.where(np.asarray(first) == 0, self.crossing[0] * min(self.microbatches, 2), 0),
            sent_bytes=part(sent),
            working_bytes=part(self.peaks.working_bytes(first, last)),
            relief_bytes=part(self.peaks.relief_bytes(first, last)),
            largest_parameter_bytes=self.peaks.largest_parameter_bytes(first, last),
            update_working_bytes=self.peaks.update_working_bytes(first, last),
        )

    def _how(self, held: StageOccupancy, update_delay: int, recompute: bool, replicas: int) -> dict[str, Any]:
        return {
            "versions": held.versions,
            "in_flight": held.in_flight,
            "deferred": held.deferred,
            "per_update": -(-self.microbatches // replicas),
            "flushes": held.versions == 1,
            "update_delay": update_delay,
            "recompute": recompute,
            "kept_tensors": held.kept_tensors,
        }

    def held(self, in_flight: int, update_delay: int = 0, replicas: int = 1) -> StageOccupancy:
        """Returns what a stage holds of which its neighbours are not known (`planner.tables.method_occupancy`)."""
        return self._rule.of_stage(in_flight, update_delay, replicas)

    @cached_property
    def _rule(self) -> OccupancyRule:
        return OccupancyRule(self.versions, self.holds, self.microbatches)

    def stage(self, first: int, last: int, replicas: int = 1, recompute: bool = False, update_delay: int = 0) -> Stage:
        """Returns the stage between two places; what it holds at its worst is a matter of the whole plan."""
        key = first, last
        if key not in self._stages:
            self._stages[key] = self._stage(first, last)
        stage = replace(self._stages[key], replicas=replicas, recompute=recompute)
        return self._updating(stage, first, last, bool(self._copies(last, update_delay)))

    def _updating(self, stage: Stage, first: int, last: int, copies: bool) -> Stage:
        copy_s = float(self._share(self.profile.copy_s, first, last)) if copies else 0.0
        return replace(stage, update_s=float(self._share(self.profile.update_s, first, last)) + copy_s, copy_s=copy_s)

    @cached_property
    def _stages(self) -> dict[tuple[int, int], Stage]:
        return {}

    def _stage(self, first: int, last: int) -> Stage:
        before, behind = self.downsets[first], self.downsets[last]
        inside = [self.profile.layers[i] for i in bits(behind & ~before)]
        return Stage(
            before.bit_count(),
            behind.bit_count(),
            forward_s=(self.forward[last] - self.forward[first]) / self.scale,
            backward_s=(self.backward[last] - self.backward[first]) / self.scale,
            forward_fixed_s=sum(layer.forward_fixed_s for layer in inside),
            backward_fixed_s=sum(layer.backward_fixed_s for layer in inside),
            output_bytes=int(self.crossing[last]),
            activation_bytes=int(self.peaks.activation_bytes(first, last)),
            parameter_bytes=int(self.parameters[last] - self.parameters[first]),
            optimizer_bytes=int(self.optimizer[last] - self.optimizer[first]),
            names=tuple(self.profile.graph.layers[i].name for i in bits(behind & ~before)),
            working_bytes=int(self.peaks.working_bytes(first, last)),
            relief_bytes=int(self.peaks.relief_bytes(first, last)),
            largest_parameter_bytes=int(self.peaks.largest_parameter_bytes(first, last)),
            update_working_bytes=int(self.peaks.update_working_bytes(first, last)),
        )

    def plan(
        self,
        cuts: tuple[int, ...],
        replicas: tuple[int, ...] | None = None,
        note: str = "",
        *,
        order: tuple[int, ...] = (),
        recompute: tuple[bool, ...] = (),
    ) -> Plan:
        """Returns the plan of cuts at these places, at the paper's depth; cuts are not checked, memory is left out.

        Its layers stand stage by stage, in a stage as in the graph: an order in which they can run.

        Args:
            cuts: the places between the stages.
            replicas: workers of each stage; one each unless given.
            note: `Plan.note`.
            order: `Plan.order`.
            recompute: which stages keep their input alone; none unless given.
        """
        counts = replicas or (1,) * (len(cuts) + 1)
        delays_updates = tuple(self.update_delay if count > 1 and cuts else 0 for count in counts)
        in_flight = depths.noam(counts, delays_updates)
        again, spans = recompute or (False,) * len(counts), pairwise((0, *cuts, len(self.profile.layers)))
        rows = zip(spans, counts, again, delays_updates, strict=True)
        stages = tuple(self.stage(*span, count, redone, update_delay) for span, count, redone, update_delay in rows)
        model, batch = self.profile.model, self.profile.batch
        return Plan(stages, in_flight, self.cluster, delays_updates, model, batch, note=note, order=order)

    def at_depth(self, plan: Plan, depth: str | tuple[int, ...]) -> Plan:
        """Returns the plan at a depth, its peak bytes renewed and within the memory of a worker.

        Depth 'auto' is between 'noam' and 'full', as deep as fits each stage (`core.plan.depth.fitting`).

        Raises:
            PlanError: an unknown or ill-formed depth (`Plan.with_depth`), or a stage that does not fit.
        """
        if depth == "auto":
            low, high = self.at_depth(plan, "noam"), plan.with_depth("full")
            most = [self._most_in_flight(high, s) for s in range(len(high.stages))]
            while True:
                found = depths.fitting(low.in_flight, high.in_flight, tuple(most), plan.replicas)
                deep = self.with_bytes(plan.with_depth(found))
                if found == low.in_flight or deep.overfull is None:
                    return replace(deep, depth_mode="auto")
                most[0] = found[0] - 1  # messages of a deeper neighbour may be too many
        deep = self.with_bytes(plan.with_depth(depth))
        if (s := deep.overfull) is not None:
            stage, held, limit = deep.stages[s], deep.in_flight[s], self.memory_bytes(deep, s) or 0
            less = "--in-flight auto for the deepest that fits" if deep.depth_mode == "full" else "a smaller depth"
            raise PlanError(
                f"at depth {deep.depth_mode} stage {s} (layers {stage.first} to {stage.last - 1}) holds {held} "
                f"in flight and needs {format_bytes(stage.peak_bytes)}, a worker has {format_bytes(limit)}; ask for "
                f"{less}, cut it further, split minibatches into more microbatches or choose a schedule that holds "
                "fewer versions"
            )
        return deep

    def with_bytes(self, plan: Plan) -> Plan:
        """Returns the plan with the peak bytes of what its stages hold, and the copies that they make of it."""
        helds = self._rule.of_plan(plan)
        peers = peers_of(plan.replicas, [held.in_flight for held in helds])
        stages = []
        for span, stage, held, one, update_delay in zip(
            self.ends(plan), plan.stages, helds, peers, plan.update_delay, strict=True
        ):
            memory = self.memory(*span, held, one, update_delay, stage.recompute, stage.replicas)
            copies = held.versions > 1 and held.in_flight + update_delay > 1
            stages.append(replace(self._updating(stage, *span, copies), peak_bytes=memory.total_bytes, memory=memory))
        return replace(plan, stages=tuple(stages))

    def ends(self, plan: Plan) -> list[tuple[int, int]]:
        """Returns the first and the last place of each stage of a plan of this space."""
        known = {found: place for place, found in enumerate(self.downsets)}
        numbers = {layer.name: i for i, layer in enumerate(self.profile.graph.layers)}
        stages = (sum(1 << numbers[name] for name in stage.names) for stage in plan.stages)
        return list(pairwise(known[found] for found in (0, *accumulate(stages))))

    def _most_in_flight(self, plan: Plan, s: int) -> int:
        """Returns what a stage's memory has room for, up to what the plan has in flight."""
        again, limit = plan.stages[s].recompute, self.memory_bytes(plan, s)
        ends, held, count = self.ends(plan)[s], plan.in_flight[s], plan.replicas[s]
        peers = peers_of(plan.replicas, [one.in_flight for one in self._rule.of_plan(plan)])[s]
        while limit is not None and held > 1:
            holds = self.held(held, plan.update_delay[s], count)
            if self.memory(*ends, holds, peers, plan.update_delay[s], again, count).total_bytes <= limit:
                break
            held -= 1
        return held

    def memory_bytes(self, plan: Plan, s: int) -> int | None:
        """Returns the memory of the smallest worker of a stage."""
        return plan.sites[s].memory_bytes

"""The search space: what the layers between two cuts (`planner.tables.prefix_tables`) cost as a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.hardware.devices import pcie_bytes_per_s
from pipedream.core.model.profile import Profile
from pipedream.core.plan import depth as depths
from pipedream.core.plan.choices import DEFAULTS, Choices
from pipedream.core.plan.cost import Site, Terms
from pipedream.core.plan.memory import (
    MessageBuffers,
    StageMemory,
    StageSizes,
    hosted_copies_s,
    part_bytes,
    peers_of,
)
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage, TiedWeights, least_sum_s
from pipedream.core.schedule.lowering import explain_unproved
from pipedream.core.schedule.occupancy import STASHING, MethodOccupancy, StageOccupancy
from pipedream.core.schedule.stage_memory import StageBytes
from pipedream.core.units import format_bytes, format_rate
from pipedream.planner.arrays import BoolArray, Bytes, Cut, IntArray, Seconds, Span, Tables
from pipedream.planner.cuts import Lattice, bool_rows, searched_downsets
from pipedream.planner.tables.prefix_tables import PrefixTables

MAX_SLOWDOWN = 1.05
"""Of the passes of a stage whose activations are copied meanwhile."""

_Space = TypeVar("_Space", bound="SearchSpace")


@dataclass(frozen=True, eq=False)
class SearchSpace(PrefixTables):
    """A profile, a cluster and a way to train: what everything between two places would cost as a stage.

    Attributes:
        choices: what its plans trade, of which they move no activations yet.
        update_delay: the update delay of a pipeline's replicated stages.
        positions: the places where a stage may begin or end, those after fewer layers first.
        is_complete: no plan on any other places is faster than the best on these.
        occupancy: the microbatches and the versions of weights that stages hold.
        spare_bytes: memory that a search keeps free for messages.
        needs: what stages [from, to] between these positions need, whatever the links and the memory.
        shared_tables: what searches on these positions and links have in common, whatever the memory.
    """

    cluster: Cluster
    update_delay: int
    microbatches: int
    positions: tuple[int, ...]
    choices: Choices
    is_complete: bool = True
    occupancy: MethodOccupancy = STASHING
    spare_bytes: int = 0
    needs: Tables = field(default_factory=Tables)
    shared_tables: dict[str, Tables] = field(default_factory=dict)
    _stages: dict[tuple[int, int], Stage] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        *,
        choices: Choices = DEFAULTS,
        update_delay: int = 0,
        microbatches: int = 1,
        occupancy: MethodOccupancy = STASHING,
        downsets: Iterable[int] | None = None,
    ) -> SearchSpace:
        """Returns the space of a profile on a cluster.

        Args:
            downsets: None: all that a best plan may need, or good ones if there are too many.

        Raises:
            PlanError: fewer than one microbatch, or an update delay that is neither 0 nor 1.
        """
        if update_delay not in (0, 1):
            raise PlanError(
                f"update delay {update_delay} was asked for; give 0 (the paper's) or 1 (updates after the next forward)"
            )
        if microbatches < 1:
            raise PlanError(f"a minibatch was asked to be split into {microbatches} microbatches; give 1 or more")
        profile = profile.in_parts(microbatches).with_longer_backwards(choices.backward_share)
        lattice = Lattice.of(profile.graph)
        is_complete = False
        if downsets is None:
            downsets, is_complete = searched_downsets(lattice, profile, cluster)
        ordered = sorted({0, *downsets, lattice.everything}, key=lambda downset: (downset.bit_count(), downset))
        prefixes = {(1 << i) - 1 for i in range(len(profile.layers) + 1)}
        sums = PrefixTables.sum_up(profile, lattice, [downset for downset in ordered if downset not in prefixes])
        cuts = {downset: cut for cut, downset in enumerate(sums.downsets)}
        return cls(
            **vars(sums),
            cluster=cluster,
            update_delay=update_delay,
            microbatches=microbatches,
            positions=tuple(cuts[downset] for downset in ordered),
            choices=choices.of_values(8 * profile.value_bytes),
            is_complete=is_complete,
            occupancy=occupancy,
        )

    @cached_property
    def terms(self) -> Terms:
        """What the choices cost, as the mean over the model."""
        return self.choices.terms(self.profile)

    @cached_property
    def precedes(self) -> BoolArray:
        """Which positions make a stage, as [from, to]."""
        if max(self.positions) <= len(self.profile.layers):
            cuts = np.array(self.positions)
            in_order: BoolArray = cuts[:, None] < cuts[None, :]
            return in_order
        rows = bool_rows([self.downsets[cut] for cut in self.positions], len(self.profile.layers))
        inside = rows.astype(np.float32)
        sizes = inside.sum(axis=1)
        contained: BoolArray = (inside @ inside.T >= sizes[:, None]) & (sizes[:, None] < sizes[None, :])
        return contained

    def update_s(
        self, first: Cut, last: Cut, update_delay: int = 0, edges: tuple[Bytes, Bytes] | None = None
    ) -> Seconds:
        """Returns the seconds of one update of a stage: the fixed part of the optimizer's step, and its share
        of the rest, by bytes of trained parameters.

        With several versions, weights that a forward in flight still reads are copied first. At the output there is
        none, unless updates are delayed. With tied weights, the update waits for the sums over their holders. What the
        runtime adds to a stage counts here too.

        Args:
            edges: bytes received and sent on, if not those of `bytes_of`.
        """
        copy_s = self._needs_copies(last, update_delay) * self._share(self.profile.copy_s, first, last)
        update_s: Seconds = self._step_s(first, last) + copy_s
        added_s: Seconds = self.tied_s(first, last) if self._tied else 0.0
        if self.profile.runtime or self._launches:
            added_s = added_s + self.runtime_s(first, last, update_s, edges)
        return update_s + added_s

    def _step_s(self, first: Cut, last: Cut) -> Seconds:
        is_copied = self.choices.hosts_optimizers and self._on_gpus
        copies_s = hosted_copies_s(self.trained_bytes(first, last), self.cluster) if is_copied else 0.0
        return super()._step_s(first, last) + copies_s

    def tied_s(self, first: Cut, last: Cut) -> Seconds:
        """Returns the seconds by which sums over the holders of tied weights at least delay an update of a stage."""
        seconds: Seconds = 0.0
        for (count, _), tied in zip(self._tied, self.profile.tied, strict=True):
            members = count[last] - count[first]
            is_parted = (members > 0) & (members < len(tied.layers))
            seconds = seconds + (is_parted & tied.trained) * least_sum_s(self.cluster, tied.parameter_bytes)
        return seconds

    def runtime_s(self, first: Cut, last: Cut, update_s: Seconds, edges: tuple[Bytes, Bytes] | None = None) -> Seconds:
        runtime = self.choices.add_costs(self.profile.runtime)
        device_s = sum(self.passes_s(first, last)) + update_s if self._on_gpus else 0.0
        launch_s = self.launch.between(first, last) if self._launches else 0.0
        received, sent = edges or self.bytes_of(first, last)[1:]
        ends = np.asarray(first) == 0, np.asarray(last) == len(self.profile.layers)
        return runtime.stage_s(device_s, received, sent, *ends, launch_s)

    def _needs_copies(self, last: Cut, update_delay: int) -> bool | BoolArray:
        is_output = np.asarray(last) == len(self.profile.layers)
        copies: bool | BoolArray = (self.stage_occupancy(2).versions > 1) & (bool(update_delay) | ~is_output)
        return copies

    def period_s(self, passes_s: tuple[Seconds, Seconds], first: Cut, last: Cut, site: Site) -> Seconds:
        seconds: Seconds = site.period_s(*passes_s, self.update_s(first, last), *self.bytes_of(first, last))
        return seconds

    def need_bytes(
        self,
        first: Cut,
        last: Cut,
        in_flight: int,
        update_delay: int = 0,
        recompute: bool = False,
        replicas: int = 1,
        sizes: StageSizes | None = None,
    ) -> Bytes:
        """Returns a lower bound of the peak bytes of a worker with unknown neighbours: the fewest messages.

        Args:
            sizes: the stages' sizes, if they are known.
        """
        occupancy = self.stage_occupancy(in_flight, update_delay, replicas)
        before = self.stage_occupancy(in_flight + 1, update_delay, replicas)  # at the paper's depth it admits one more
        peers = MessageBuffers(waiting=before.in_flight + 1, sums=replicas > 1)
        span, per_update = (first, last), -(-self.microbatches // replicas)
        sizes = sizes or self.sizes(*span)

        def count(*, offload: bool) -> Bytes:
            terms = self._stage_bytes(span, occupancy, peers, sizes, recompute=recompute, offload=offload)
            need: Bytes = terms.peak_bytes(occupancy, per_update, update_delay)
            return need

        need, offloads = count(offload=False), may_offload(self, *span, recompute)
        return np.where(offloads, np.minimum(need, count(offload=True)), need) if offloads.any() else need

    def memory(self, span: tuple[int, int], stage: Stage, use: StageUse) -> StageMemory:
        """Returns the memory of one replica of a stage between two places, which recomputes or offloads as it says."""
        how = {"recompute": stage.recompute, "offload": stage.offload}
        terms = self._stage_bytes(span, use.occupancy, use.peers, self.sizes(*span), **how)
        return terms.peak(use.occupancy, -(-self.microbatches // stage.replicas), use.update_delay)

    def sizes(self, first: Cut, last: Cut) -> StageSizes:
        """Returns the sizes for the largest microbatch."""
        part = partial(part_bytes, parts=self.microbatches, samples=self.profile.batch)
        _, received, sent = self.bytes_of(first, last)
        gathered = self.peaks.gathered_bytes(first, last)
        return StageSizes(
            parameter_bytes=self.parameter_bytes(first, last),
            optimizer_bytes=self.optimizer_bytes(first, last),
            activation_bytes=part(self.peaks.activation_bytes(first, last)),
            input_bytes=part(self.crossing[first]),
            received_bytes=part(received),
            prefetched_bytes=np.where(np.asarray(first) == 0, self.crossing[0] * min(self.microbatches, 2), 0),
            sent_bytes=part(sent),
            kept_bytes=self.terms.memory.kept_samples * (received + sent) // self.profile.batch,
            temporary_bytes=part(self.peaks.temporary_bytes(first, last) - gathered) + gathered,
            freed_before_peak_bytes=part(self.peaks.freed_before_peak_bytes(first, last)),
            largest_parameter_bytes=self.peaks.largest_parameter_bytes(first, last),
            update_temporary_bytes=self.peaks.update_temporary_bytes(first, last, self.trained_bytes(first, last)),
            frozen_bytes=self.parameter_bytes(first, last) - self.trained_bytes(first, last),
        )

    def _stage_bytes(
        self, span: Span, occupancy: StageOccupancy, peers: MessageBuffers, sizes: StageSizes, **moves: bool
    ) -> StageBytes:
        matrix_bytes = self.matrix_bytes(occupancy.updates, *span)
        moves["on_gpus"] = self._on_gpus
        return StageBytes.of(sizes, occupancy, peers, self.terms, matrix_bytes=matrix_bytes, **moves)

    def stage_occupancy(self, in_flight: int, update_delay: int = 0, replicas: int = 1) -> StageOccupancy:
        return self.occupancy.of_stage(in_flight, update_delay, replicas, self.microbatches)

    def stage(self, first: int, last: int, replicas: int = 1, recompute: bool = False, update_delay: int = 0) -> Stage:
        key = first, last
        if key not in self._stages:
            self._stages[key] = self._build_stage(first, last)
        stage = replace(self._stages[key], replicas=replicas, recompute=recompute)
        return self._add_update(stage, first, last, bool(self._needs_copies(last, update_delay)))

    def _add_update(self, stage: Stage, first: int, last: int, copies: bool) -> Stage:
        copy_s = float(self._share(self.profile.copy_s, first, last)) if copies else 0.0
        return replace(stage, update_s=float(self._step_s(first, last)) + copy_s, copy_s=copy_s)

    def build_plan(
        self,
        cuts: tuple[int, ...],
        replicas: tuple[int, ...] | None = None,
        note: str = "",
        *,
        order: tuple[int, ...] = (),
        recompute: tuple[bool, ...] = (),
    ) -> Plan:
        """Returns the plan with these cuts, which are not checked, at the paper's depth, without its peak memory.

        Args:
            replicas: None: one each.
            recompute: (): none.
        """
        counts = replicas or (1,) * (len(cuts) + 1)
        delays_updates = tuple(self.update_delay if count > 1 and cuts else 0 for count in counts)
        in_flight = depths.noam(counts, delays_updates)
        spans = list(pairwise((0, *cuts, len(self.profile.layers))))
        rows = zip(spans, counts, recompute or (False,) * len(counts), delays_updates, strict=True)
        stages = tuple(self.stage(*span, count, redoes, update_delay) for span, count, redoes, update_delay in rows)
        return Plan(
            stages,
            in_flight,
            self.cluster,
            delays_updates,
            self.profile.model,
            self.profile.batch,
            note=note,
            worker_order=order,
            tied_weights=self.tied_weights(spans),
            graph=self.profile.graph if self.profile.graph.calls else None,
            runtime=self.profile.runtime,
            choices=self.choices.of_plan(counts),
        )

    def tied_weights(self, spans: Sequence[tuple[int, int]]) -> tuple[TiedWeights, ...]:
        """Returns the weights that several stages hold, for stages between these places."""
        weights = []
        for (count, _), tied in zip(self._tied, self.profile.tied, strict=True):
            holders = tuple(s for s, (first, last) in enumerate(spans) if count[last] > count[first])
            if len(holders) > 1 and tied.trained:
                weights.append(TiedWeights(tied.names, holders, tied.parameter_bytes))
        return tuple(weights)

    def with_bytes(self, plan: Plan) -> Plan:
        """Returns the plan with its peak bytes and the seconds of its weight copies; see `fit_by_offloading`."""
        return fit_by_offloading(self, plan) if self.choices.moves_activations else count_bytes(self, plan)

    def of_stages(self, plan: Plan) -> Sequence[SearchSpace]:
        """Returns the space that knows each stage's costs: this one, unless stages have meshes."""
        return (self,) * len(plan.stages)

    def ends(self, plan: Plan) -> list[tuple[int, int]]:
        cuts = {downset: cut for cut, downset in enumerate(self.downsets)}
        numbers = {layer.name: i for i, layer in enumerate(self.profile.graph.layers)}
        stages = (sum(1 << numbers[name] for name in stage.names) for stage in plan.stages)
        return list(pairwise(cuts[downset] for downset in (0, *accumulate(stages))))


def with_positions(space: _Space, positions: tuple[int, ...]) -> _Space:
    """Returns the space with other positions."""
    return replace(space, positions=positions, needs=Tables(), shared_tables={})


def with_slower_links(space: _Space, factor: float) -> _Space:
    """Returns the space on slower links."""
    return replace(space, cluster=space.cluster.with_slower_links(factor), shared_tables={})


def add_spare_bytes(space: SearchSpace, needs: IntArray) -> IntArray:
    """Returns the needs of stages [from, to] with the memory to keep free; a single stage sends no messages."""
    if not space.spare_bytes:
        return needs
    more: IntArray = needs + space.spare_bytes
    more[0, -1] = needs[0, -1]
    return more


class StageUse(NamedTuple):
    """What the bytes of a plan's stage depend on besides its layers."""

    occupancy: StageOccupancy
    peers: MessageBuffers
    update_delay: int


def list_uses(space: SearchSpace, plan: Plan) -> list[StageUse]:
    """Returns those of a plan's stages."""
    occupancies = space.occupancy.of_plan(plan)
    peers = peers_of(plan.replicas, [occupancy.in_flight for occupancy in occupancies])
    return list(map(StageUse, occupancies, peers, plan.update_delay))


def count_bytes(space: SearchSpace, plan: Plan) -> Plan:
    """Returns the plan, whose stages move what they do, with its peak bytes and the seconds of weight copies."""
    stages = []
    rows = zip(space.of_stages(plan), space.ends(plan), plan.stages, list_uses(space, plan), strict=True)
    for subspace, span, stage, use in rows:
        memory = subspace.memory(span, stage, use)
        copies = use.occupancy.versions > 1 and use.occupancy.in_flight + use.update_delay > 1
        stages.append(replace(subspace._add_update(stage, *span, copies), peak_bytes=memory.total_bytes, memory=memory))
    return replace(plan, stages=tuple(stages))


def fit_by_offloading(space: SearchSpace, plan: Plan) -> Plan:
    """Returns a plan with its peak bytes, whose stages offload their activations only where it does not fit otherwise.

    A stage whose copies would lengthen its passes never does (`may_offload`), so the plan may not fit. Where workers
    have several stages, all that may do.
    """
    places = list(zip(space.of_stages(plan), space.ends(plan), strict=True))
    may = [bool(may_offload(at, *span, stage.recompute)) for (at, span), stage in zip(places, plan.stages, strict=True)]
    offloads = [False] * len(plan.stages)
    while True:
        rows = zip(places, plan.stages, offloads, strict=True)
        stages = tuple(offload_stage(at, stage, *span, offload=offload) for (at, span), stage, offload in rows)
        moves = (space.choices if any(offloads) else DEFAULTS).activations
        choices = plan.choices.choosing(activations=moves)
        plan = count_bytes(space, replace(plan, stages=stages, choices=choices))
        limits = [site.memory_bytes for site in plan.costs.sites]
        more = [
            may[s] and not offloads[s] and limit is not None and (plan.is_shared or stage.peak_bytes > limit)
            for s, (stage, limit) in enumerate(zip(plan.stages, limits, strict=True))
        ]
        if plan.first_stage_over_memory is None or not any(more):
            return plan
        offloads = [old or new for old, new in zip(offloads, more, strict=True)]


def offload_stage(space: SearchSpace, stage: Stage, first: int, last: int, *, offload: bool) -> Stage:
    """Returns a stage that offloads its activations or keeps them; its passes last at least as long as the copies."""
    costs = space.stage(first, last)
    copy_s = offload * costs.activation_bytes / (space.cluster.host_bytes_per_s or math.inf)
    forward_s, backward_s = max(costs.forward_s, copy_s), max(costs.backward_s, copy_s)
    return replace(stage, offload=offload, forward_s=forward_s, backward_s=backward_s)


def may_offload(space: SearchSpace, first: Cut, last: Cut, recompute: bool = False) -> BoolArray:
    """Returns whether stages may offload their activations: their passes then take hardly longer."""
    cluster = space.cluster
    may_at_all = space.choices.moves_activations and not recompute
    if not may_at_all or cluster.host_bytes_per_s is None:
        return np.asarray(may_at_all)
    forward_s, backward_s = space.passes_s(first, last)
    copy_s = space.peaks.activation_bytes(first, last) / cluster.host_bytes_per_s
    longer_s = np.maximum(forward_s, copy_s) + np.maximum(backward_s, copy_s)
    return np.asarray(longer_s <= MAX_SLOWDOWN * (forward_s + backward_s))


def apply_depth(space: SearchSpace, plan: Plan, in_flight: str | tuple[int, ...]) -> Plan:
    """Returns the plan at a depth ('auto': as deep as memory allows), with its peak bytes.

    Raises:
        PlanError: an unknown or ill-formed depth (`Plan.with_depth`), a stage that does not fit, or a plan that repeats
            itself too seldom to run.
    """
    if why := explain_unproved(plan.placement):
        raise PlanError(why)
    if in_flight == "auto":
        low, high = apply_depth(space, plan, "noam"), plan.with_depth("full")
        most = [_find_most_in_flight(space, high, s) for s in range(len(high.stages))]
        while True:
            depth = depths.fit_counts(low.in_flight, high.in_flight, tuple(most), plan.replicas)
            deep = space.with_bytes(plan.with_depth(depth))
            if depth == low.in_flight or deep.first_stage_over_memory is None:
                return replace(deep, depth_mode="auto")
            most[0] = depth[0] - 1  # a deeper neighbour may send too many messages
    deep = space.with_bytes(plan.with_depth(in_flight))
    if (s := deep.first_stage_over_memory) is not None:
        stage, admitted, limit = deep.stages[s], deep.in_flight[s], deep.costs.sites[s].memory_bytes or 0
        subspace, span = space.of_stages(deep)[s], space.ends(deep)[s]
        moves = describe_copies(subspace, *span, stage.recompute)
        less = "--in-flight auto for the deepest that fits" if deep.depth_mode == "full" else "a smaller depth"

        def count(other: SearchSpace) -> int:
            repeats = other.choices.recomputing != subspace.choices.recomputing
            return _count_least(span, stage, list_uses(space, deep)[s], other, repeats=repeats)

        raise ShortageError(
            f"at depth {deep.depth_mode} stage {s} (layers {stage.first} to {stage.last - 1}) holds {admitted} "
            f"in flight and needs {format_bytes(stage.peak_bytes)}{moves}, a worker has {format_bytes(limit)}; ask for "
            f"{less}, cut it further, split minibatches into more microbatches or choose a schedule that holds "
            "fewer versions",
            stage.peak_bytes,
            stage.peak_bytes - limit,
            list_savings(subspace, count),
        )
    return deep


def list_savings(space: SearchSpace, count: Callable[[SearchSpace], int], **instead: str) -> dict[str, int]:
    """Returns the bytes that each further choice saves of those that `count` returns for a space, by its option.

    Only GPUs have a machine's memory besides theirs. `instead` has other texts than the choices suggest.
    """
    choices, cluster = space.choices, space.cluster
    texts = choices.list_smaller(on_gpus=space._on_gpus)
    texts |= {name: text for name, text in instead.items() if name in texts}
    rated = replace(cluster, host_bytes_per_s=cluster.host_bytes_per_s or pcie_bytes_per_s(cluster.devices))
    before, savings = count(space), {}
    for name, text in texts.items():
        other, saved_bytes = choices.choosing(**{name: text}), 0
        with suppress(PipelineError):  # of a method that does not work so
            saved_bytes = before - count(
                replace(space, choices=other, cluster=rated, needs=Tables(), shared_tables={}, _stages={})
            )
        chosen = other.named[name]
        moves = chosen.moves_activations or chosen.hosts_optimizers
        if saved_bytes > 0 and not (moves and cluster.host_bytes is not None and saved_bytes > cluster.host_bytes):
            savings[f"--{name.replace('_', '-')} {text}"] = saved_bytes
    return savings


def _count_least(span: tuple[int, int], stage: Stage, use: StageUse, other: SearchSpace, *, repeats: bool) -> int:
    """Returns the least that a stage needs under the choices of another space.

    Args:
        repeats: it may recompute, although it does not.
    """
    return min(
        other.memory(span, replace(stage, recompute=recompute, offload=offload), use).total_bytes
        for recompute in {stage.recompute, stage.recompute or repeats}
        for offload in {stage.offload and not recompute, bool(may_offload(other, *span, recompute))}
    )


def describe_copies(space: SearchSpace, first: int, last: int, recompute: bool = False) -> str:
    """Returns words for a stage that does not fit, if it does not offload because its copies would take too long."""
    rate = space.cluster.host_bytes_per_s
    if not space.choices.moves_activations or rate is None or recompute or may_offload(space, first, last):
        return ""
    return f" (offloading would make its passes over {MAX_SLOWDOWN - 1:.0%} longer at {format_rate(rate)})"


def _find_most_in_flight(space: SearchSpace, plan: Plan, s: int) -> int:
    """Returns as many microbatches as fit the memory of a stage's worker."""
    stage, use, limit = plan.stages[s], list_uses(space, plan)[s], plan.costs.sites[s].memory_bytes
    if limit is None:
        return plan.in_flight[s]
    subspace, span = space.of_stages(plan)[s], space.ends(plan)[s]
    ways = [replace(stage, offload=way) for way in {False, bool(may_offload(subspace, *span, stage.recompute))}]
    for admitted in range(plan.in_flight[s], 1, -1):
        use = use._replace(occupancy=space.stage_occupancy(admitted, use.update_delay, stage.replicas))
        if min(subspace.memory(span, way, use).total_bytes for way in ways) <= limit:
            return admitted
    return 1

"""The Plan: which layers form each stage, how many workers share it, how deep the pipeline is filled.

It includes predicted seconds and bytes, so that it can be simulated without the profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from pipedream.core.artifact import INLINE, Artifact
from pipedream.core.errors import PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.graph import LayerGraph
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan import depth
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.placement import Placement
from pipedream.core.plan.plan_costs import NO_GAP, PlanCosts
from pipedream.core.plan.ranks import Mesh, TensorLayout, meshes_of
from pipedream.core.plan.stage import Stage, TiedWeights, sum_peaks
from pipedream.core.tabular import Tabular, align
from pipedream.core.units import format_bytes, format_excess, format_number, format_seconds, shorten


@dataclass(frozen=True, repr=False)
class Plan(Tabular, Artifact):
    """Stages, their replicas, the depth, and the cluster they were planned for.

    Attributes:
        stages: in the order of the model, without gaps.
        in_flight: for each stage the forwards that a replica holds before its first backward.
        update_delay: for each stage, 0 (the update follows its backward) or 1 (the next forward comes between).
        model: its class, or ''.
        batch: samples in a minibatch.
        unit: of the stages' seconds and bytes: 'minibatch', or 'microbatch' for a plan without a profile.
        depth_mode: how in_flight was chosen: 'noam', 'full', 'auto' or 'hand'.
        note: the planner's words on how good the plan is.
        worker_order: the cluster's worker of each replica, stage by stage; () for 0, 1, 2 ... A worker may have several
            stages (chunks).
        bound_s: proven lower bound of `slowest_stage_s` over all plans that the note covers; 0 if nothing is proved.
        schedule: the method of the plan, or ''.
        microbatches: parts of a minibatch.
        tied_weights: weights that several stages hold.
        graph: the graph of a model that runs by its own forward, which locates its layers; None for a chain of modules.
        runtime: seconds that the runtime adds to the stages' seconds.

    Raises:
        ValueError: stages with a gap, vectors of the wrong length, or an order with unknown workers.
        PlanError: sums without replicas.
    """

    FORMAT = 1

    stages: tuple[Stage, ...]
    in_flight: tuple[int, ...]
    cluster: Cluster
    update_delay: tuple[int, ...] = ()
    model: str = ""
    batch: int = 1
    unit: str = "minibatch"
    depth_mode: str = "noam"
    note: str = ""
    worker_order: tuple[int, ...] = field(default=(), metadata={"json": "order"})
    bound_s: float = 0.0
    schedule: str = ""
    microbatches: int = 1
    tied_weights: tuple[TiedWeights, ...] = field(default=(), metadata={"json": "tied"})
    graph: LayerGraph | None = None
    runtime: RuntimeCosts = field(default_factory=RuntimeCosts)
    choices: Choices = field(default_factory=Choices, metadata=INLINE)

    def __post_init__(self) -> None:
        self.choices.check(self.replicas)
        if not self.stages:
            raise ValueError("a plan needs at least one stage, found none")
        if self.stages[0].first != 0:
            raise ValueError(f"the first stage must begin at layer 0, found {self.stages[0].first}")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.last != after.first:
                raise ValueError(f"a stage ends before layer {before.last}, the next begins at {after.first}")
        if not self.update_delay:
            object.__setattr__(self, "update_delay", (0,) * len(self.stages))
        if len(self.update_delay) != len(self.stages) or not set(self.update_delay) <= {0, 1}:
            raise ValueError(
                f"update_delay needs 0 or 1 for each of {len(self.stages)} stages, found {self.update_delay}"
            )
        if self.unit not in ("minibatch", "microbatch"):
            raise ValueError(f"unit is minibatch or microbatch, found {self.unit!r}")
        if self.depth_mode not in depth.DEPTH_MODES:
            raise ValueError(f"depth_mode is one of {', '.join(depth.DEPTH_MODES)}, found {self.depth_mode!r}")
        if self.workers > self.cluster.workers:
            raise ValueError(f"the stages take {self.workers} workers, the cluster has {self.cluster.workers}")
        _check_order(self)
        for stage, update_delay in zip(self.stages, self.update_delay, strict=True):
            if update_delay and (stage.replicas == 1 or len(self.stages) == 1):
                raise ValueError("update delay is 0 where a stage is not replicated, and in a one-stage plan")
        for tied in self.tied_weights:
            if len(tied.stages) < 2 or not 0 <= min(tied.stages) <= max(tied.stages) < len(self.stages):
                raise ValueError(
                    f"tied weights are held by two or more of {len(self.stages)} stages, found {tied.stages}"
                )
        try:
            depth.check_in_flight(self.in_flight, self.replicas, self.update_delay)
        except PlanError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        transfer_s: float = 0.0,
        update_s: float = 0.0,
        replicas: tuple[int, ...] | None = None,
        order: tuple[int, ...] = (),
    ) -> Plan:
        """Returns a plan of equal stages, for studies and pictures; seconds are of a microbatch, and of a message."""
        counts = replicas or (1,) * stages
        cluster = Cluster.flat(len(set(order)) or sum(counts), 1 / transfer_s if transfer_s else 1e30)
        rows = tuple(
            Stage(s, s + 1, counts[s], forward_s, backward_s, update_s, 1, 1, 1, names=(f"stage{s}",))
            for s in range(stages)
        )
        return cls(rows, depth.noam(counts), cluster, unit="microbatch", worker_order=order)

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def workers(self) -> int:
        return len(set(self.worker_order)) or sum(self.replicas)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Meshes of all stages, in model order."""
        return tuple(Mesh(stage.mesh) for stage in self.stages)

    @property
    def ranks(self) -> int:
        """The number of processes: ranks of all workers."""
        return sum(mesh.size for mesh in self.placement.meshes(self.meshes))

    @property
    def config(self) -> str:
        """The replica counts: ``2-1-1``, as in the papers; ``2x4-1x4`` where each worker has 4 ranks."""
        sizes = [mesh.size for mesh in self.meshes]
        return "-".join(f"{r}x{size}" if size > 1 else f"{r}" for r, size in zip(self.replicas, sizes, strict=True))

    def with_mesh(self, mesh: str) -> Self:
        """Returns the plan with a mesh of ranks for every worker.

        Args:
            mesh: one for all stages, or one for each, such as ``data:2/model:2/-``.

        Raises:
            PlanError: another number of meshes, or a worker has stages with different ones.
        """
        meshes = meshes_of(mesh, len(self.stages))
        self.placement.meshes(meshes)
        pairs = zip(self.stages, meshes, strict=True)
        return replace(self, stages=tuple(replace(stage, mesh=stage_mesh.text) for stage, stage_mesh in pairs))

    def with_layout(self, layout: TensorLayout | None) -> Self:
        """Returns the plan in which each stage has the rules that affect its mesh."""
        if layout is None:
            return replace(self, stages=tuple(replace(stage, layout="") for stage in self.stages))
        pairs = zip(self.stages, self.meshes, strict=True)
        return replace(self, stages=tuple(replace(stage, layout=layout.rules_on(mesh)) for stage, mesh in pairs))

    @property
    def placement(self) -> Placement:
        """One rank per worker, stage by stage or in the order of the cluster's workers."""
        if not self.worker_order:
            return Placement.replicated(self.replicas)
        ranks = {worker: rank for rank, worker in enumerate(sorted(set(self.worker_order)))}
        return Placement(tuple(tuple(ranks[w] for w in self.workers_of(s)) for s in range(len(self.stages))))

    @property
    def rate_factors(self) -> tuple[float, ...]:
        """Factor on each stage's learning rate: r_s / r_0 (PipeDream's released code and paper)."""
        return tuple(count / self.replicas[0] for count in self.replicas)

    def workers_of(self, stage: int) -> tuple[int, ...]:
        first = sum(self.replicas[:stage])
        positions = range(first, first + self.replicas[stage])
        return tuple(self.worker_order[worker] for worker in positions) if self.worker_order else tuple(positions)

    @property
    def is_shared(self) -> bool:
        return len(set(self.worker_order)) < len(self.worker_order)

    @property
    def worker_bytes(self) -> dict[int, int]:
        """Worker of the cluster -> upper bound of its peak bytes, the sum over its stages."""
        return {w: sum_peaks([self.stages[s] for s in stages]) for w, stages in self.costs.stages_by_worker.items()}

    @cached_property
    def costs(self) -> PlanCosts:
        """Predicted seconds of messages, sums and stages."""
        workers = tuple(self.workers_of(stage) for stage in range(len(self.stages)))
        terms = tuple(map(self.choices.terms, self.stages))
        runtime = self.choices.add_costs(self.runtime)
        return PlanCosts(self.stages, workers, self.cluster, self.tied_weights, runtime, terms)

    @property
    def slowest_stage_s(self) -> float:
        """Predicted seconds per unit of the slowest stage in a full pipeline, which the planner minimises."""
        return max(self.costs.periods_s)

    @property
    def period_s(self) -> float:
        """Predicted seconds per unit of the full pipeline (`PlanCosts.period_s`)."""
        return self.costs.period_s

    def on(self, cluster: Cluster) -> Self:
        """Returns the same stages on another cluster, without the proven bound.

        Raises:
            PlanError: the cluster has too few workers.
        """
        try:
            return replace(self, cluster=cluster, bound_s=0.0, note="")
        except ValueError as error:
            raise PlanError(
                f"the plan was moved to another cluster, but {error}; plan again for that cluster"
            ) from None

    @property
    def first_stage_over_memory(self) -> int | None:
        """The first stage whose worker has too little memory."""
        peaks, memories = self.worker_bytes, self.cluster.memories
        overfull = {w for w, peak in peaks.items() if (limit := memories[w]) is not None and peak > limit}
        return next((s for s in range(len(self.stages)) if overfull.intersection(self.workers_of(s))), None)

    @property
    def gap(self) -> float | None:
        """The relative amount by which the period may exceed the best plan's; None if nothing is proved.

        If a plan is faster than its bound, it was edited after planning.
        """
        gap = self.slowest_stage_s / self.bound_s - 1 if self.bound_s > 0 else -1.0
        return None if gap < -NO_GAP else max(gap, 0.0)

    def method(self, schedule: str | None = None, microbatches: int | None = None) -> tuple[str, int | None]:
        """Returns the given method and microbatches, else the plan's, else PipeDream. The plan's microbatches apply
        only to its own method.
        """
        if self.schedule and schedule in (None, self.schedule):
            return self.schedule, microbatches or self.microbatches
        return schedule or "pipedream", microbatches

    def with_depth(self, target: str | tuple[int, ...]) -> Self:
        """Returns the plan with another depth: 'noam', 'full', or in-flight counts.

        Raises:
            PlanError: an unknown word, or counts that are not legal (`depth.check_in_flight`).
        """
        if target == "noam":
            return replace(self, in_flight=depth.noam(self.replicas, self.update_delay), depth_mode="noam")
        if target == "full":
            period = self.slowest_stage_s
            slots = tuple(seconds / period if period else 0.0 for seconds in self.costs.round_trips_s)
            return replace(self, in_flight=depth.full(self.replicas, slots, self.update_delay), depth_mode="full")
        if target == "auto":
            raise PlanError(
                "depth auto was asked for an existing plan: it depends on the memory of a worker and needs the "
                "profile; plan again with in_flight='auto', or give noam, full or counts"
            )
        if isinstance(target, str):
            raise PlanError(f"depth {target!r} is not known; give noam, full, auto or counts such as 3,2,1")
        depth.check_in_flight(tuple(target), self.replicas, self.update_delay)
        return replace(self, in_flight=tuple(target), depth_mode="hand")

    def choosing(self, **texts: Any) -> Plan:
        """Returns the plan with some choices made otherwise, by their texts; see `with_choices`."""
        return with_choices(self, Choices.resolve(command=texts, plan=self.choices))

    def check_layers(self, layers: int) -> None:
        if self.stages[-1].last != layers:
            raise PlanError(
                f"the plan covers layers 0 to {self.stages[-1].last - 1}, the model has {layers} layers; "
                "plan again from this model's profile"
            )

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each stage, with the seconds and bytes of one `unit`."""
        times = {"compute_s": [stage.compute_s for stage in self.stages], "period_s": self.costs.periods_s}
        counts = {"in_flight": self.in_flight, "update_delay": self.update_delay, "rate_factor": self.rate_factors}
        return [
            {
                "stage": s,
                "layers": _describe_span(stage),
                "first": stage.first,
                "last": stage.last,
                "workers": stage.replicas,
                **{name: getattr(stage, name) for name in ("forward_s", "backward_s", "update_s")},
                **{name: float(column[s]) for name, column in times.items()},
                **{name: getattr(stage, name) for name in ("output_bytes", "parameter_bytes", "peak_bytes")},
                **{name: column[s] for name, column in counts.items()},
            }
            for s, stage in enumerate(self.stages)
        ]

    def __str__(self) -> str:
        return _format_plan(self)


def with_choices(plan: Plan, choices: Choices) -> Plan:
    """Returns a plan with other choices: if recomputation or moved activations are among them, of all its stages."""
    choices = choices.of_values(plan.choices.value_bits)
    return replace(plan, stages=choices.change_stages(plan.stages, plan.choices), choices=choices.stored)


def _check_order(plan: Plan) -> None:
    """Raises a `ValueError` if replicas of a stage share a worker, or workers do not exist."""
    if plan.worker_order and len(plan.worker_order) != sum(plan.replicas):
        raise ValueError(
            f"the order names a worker for each of {sum(plan.replicas)} replicas, found {plan.worker_order}"
        )
    if any(len(set(plan.workers_of(s))) != count for s, count in enumerate(plan.replicas)):
        raise ValueError(f"the replicas of a stage are on workers of their own, found {plan.worker_order}")
    if plan.worker_order and not 0 <= min(plan.worker_order) <= max(plan.worker_order) < plan.cluster.workers:
        raise ValueError(f"the order names workers below {plan.cluster.workers}, found {plan.worker_order}")


def _format_plan(plan: Plan) -> str:
    head = (
        f"Plan {plan.config}{f' of {plan.model}' if plan.model else ''}: {plan.workers} workers, depth "
        f"{plan.depth_mode}, {format_seconds(plan.period_s)} per {plan.unit} when full"
    )
    has_updates = any(stage.update_s for stage in plan.stages)
    columns: list[tuple[str, Callable[[int, Stage], str]]] = [
        ("workers", lambda s, stage: str(stage.replicas)),
        ("forward", lambda s, stage: format_seconds(stage.forward_s)),
        ("backward", lambda s, stage: format_seconds(stage.backward_s)),
        ("update", lambda s, stage: format_seconds(stage.update_s) if has_updates else "-"),
        ("sends", lambda s, stage: format_bytes(stage.output_bytes) if s < len(plan.stages) - 1 else "-"),
        ("weights", lambda s, stage: format_bytes(stage.parameter_bytes)),
        ("in flight", lambda s, stage: str(plan.in_flight[s])),
        ("peak", lambda s, stage: format_bytes(stage.peak_bytes) if stage.peak_bytes else "-"),
    ]
    legend = [f"in flight: microbatches at depth {plan.depth_mode}, {depth.DEPTH_MODES[plan.depth_mode]}"]
    if plan.microbatches == 1 and len(set(plan.rate_factors)) > 1:  # otherwise there is one rate
        columns.insert(-1, ("lr factor", lambda s, stage: format_number(plan.rate_factors[s])))
        legend.append("lr factor: on the learning rate, as an update covers a minibatch of each replica")
    if not has_updates:
        legend.append("update: no optimizer was profiled")
    if plan.cluster.kinds:
        devices = [dict.fromkeys(plan.cluster.devices[w] for w in plan.workers_of(s)) for s in range(len(plan.stages))]
        columns.append(("on", lambda s, stage: "+".join(devices[s])))
    if any(plan.update_delay):
        columns.insert(7, ("delay", lambda s, stage: str(plan.update_delay[s])))
        legend.append("delay: 1 if the next forward runs before the update")
    if max(plan.replicas) > 1:
        sync_s = plan.costs.sync_s
        columns.insert(4, ("all-reduce", lambda s, stage: format_seconds(sync_s[s]) if stage.replicas > 1 else "-"))
    if plan.microbatches > 1 and any(stage.fixed_s for stage in plan.stages):
        columns.insert(3, ("fixed", lambda s, stage: format_seconds(stage.fixed_s)))
        legend.append("fixed: of both passes, for each microbatch after the first, however small")
    if plan.ranks > plan.workers:
        meshes = [str(mesh) for mesh in plan.meshes]
        columns.insert(1, ("mesh", lambda s, stage: meshes[s]))
        legend.append("mesh: the ranks of each worker, - is one")
    rows = [["stage", "layers", *(name for name, _ in columns)]]
    for s, stage in enumerate(plan.stages):
        rows.append([str(s), _describe_span(stage), *(cell(s, stage) for _, cell in columns)])
    runtime, proof = str(plan.runtime or ""), "" if plan.gap is None else _describe_proof(plan, plan.gap)
    notes = filter(None, [*_describe_exchange(plan), runtime, plan.note, proof])
    return "\n".join([head, align(rows, "rlr"), "; ".join(legend), *notes])


def _describe_exchange(plan: Plan) -> list[str]:
    """Describes tied weights, approximations, and what is kept outside of the workers' memory."""
    lines = [
        f"tied: {tied}, {format_bytes(tied.parameter_bytes)}, summed at each update in {format_seconds(seconds)}"
        for tied, seconds in zip(plan.tied_weights, plan.costs.tied_sums_s, strict=True)
    ]
    return lines + plan.choices.describe(plan)


def _describe_proof(plan: Plan, gap: float) -> str:
    how = "optimal" if gap < NO_GAP else format_excess(gap)
    stage_s = plan.slowest_stage_s
    shared = "" if plan.period_s == stage_s else f"slowest stage {format_seconds(stage_s)}, "
    return f"{shared}proven bound {format_seconds(plan.bound_s)} per {plan.unit}: {how}"


def _describe_span(stage: Stage) -> str:
    if not stage.names:
        return f"{stage.first}..{stage.last - 1}"
    first, last = shorten(stage.names[0]), shorten(stage.names[-1])
    return first if len(stage.names) == 1 else f"{first} .. {last}"

"""Checks an edited plan."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from pipedream import planner, schedules
from pipedream.core.errors import PlanError
from pipedream.core.model.profile import Profile
from pipedream.core.plan.memory import hosted_copies_s, peers_of
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.stage import Stage
from pipedream.core.schedule.lowering import lower
from pipedream.core.schedule.occupancy import StageOccupancy, occupancy
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.stage_memory import StageBytes
from pipedream.core.units import format_bytes, format_number, format_seconds
from pipedream.planner import Score, SearchSpace
from pipedream.planner.tables.search_space import count_bytes, offload_stage
from pipedream.verifier import Proof, verify
from pipedream.workflows.methods import add_passes_on_copies, check_machines, occupancy_of, resolve_method, score

_SAME_FIGURE = 0.01  # relative; smaller differences between plan and profile are not reported
_COMPARED = (
    "forward_s",
    "backward_s",
    "update_s",
    "output_bytes",
    "activation_bytes",
    "parameter_bytes",
    "frozen_bytes",
    "optimizer_bytes",
)


@dataclass(frozen=True)
class Check:
    """The result of checking a valid plan.

    Attributes:
        plan: with the seconds of the profile, if there is one, and the bytes of its method.
        differences: between the plan and the profile.
        score: simulated seconds per minibatch, and idle time.
    """

    plan: Plan
    differences: tuple[str, ...]
    proof: Proof
    score: Score

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.plan.batch / self.score.period_s

    def __str__(self) -> str:
        plan = self.plan
        parts = f" with {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        lines = [
            str(replace(plan, note="")),
            "",
            *(f"differs: {line}" for line in self.differences),
            f"valid: {plan.schedule}{parts}, free of deadlock ({len(self.proof.totals)} runs proved)",
            f"predicted: {format_seconds(self.score.period_s)} per minibatch, "
            f"{format_number(self.samples_per_s)} samples/s, "
            f"bubble {self.score.bubble:.1%}",
        ]
        return "\n".join(lines)


def check_plan(
    plan: Plan, *, profile: Profile | None = None, schedule: str | None = None, microbatches: int | None = None
) -> Check:
    """Checks a plan. (Reading it has already refused gaps between stages and an illegal depth.)

    Args:
        profile: None trusts the plan's figures and omits the bytes of the model's input.
        schedule, microbatches: by default the plan's own.

    Raises:
        PlanError: the plan does not cover the model's layers, begins a stage where none can, does not fit the memory,
            or has too few figures to be checked without a profile.
        ScheduleError: the method does not work with the plan, or the program is not correct.
    """
    name, parts = resolve_method(plan, schedule, microbatches)
    built = schedules.build(name, plan, parts)
    if profile is None:
        _check_figures(plan)
    plan, differences = check_plan_memory(plan, built, profile)
    proof = verify(lower(replace(built, plan=plan)))
    return Check(plan, differences, proof, score(plan))


def check_plan_memory(plan: Plan, built: Schedule, profile: Profile | None) -> tuple[Plan, tuple[str, ...]]:
    """Checks that a plan fits its workers' memory under a method other than the one it was made for.

    Returns the plan for that method, and the differences between plan and profile.
    """
    pairs = zip(plan.stages, built.plan.stages, strict=True)  # a method may make stages recompute
    stages = tuple(replace(stage, recompute=rebuilt.recompute, offload=rebuilt.offload) for stage, rebuilt in pairs)
    plan = replace(plan, stages=stages, schedule=built.name, microbatches=built.microbatches)
    differences: tuple[str, ...] = ()
    if profile is None or plan.ranks > plan.workers:  # a rank's figures depend on where its mesh lies
        plan = _add_bytes(replace(plan, bound_s=0.0), built)  # the bound was proved for the plan before it was edited
    else:
        plan, differences = _plan_from_profile(plan, profile, built)
    _check_stage_memory(plan, occupancy(built))
    check_machines(plan, built)
    return add_passes_on_copies(replace(built, plan=plan)), differences


def _check_figures(plan: Plan) -> None:
    for s, stage in enumerate(plan.stages):
        if stage.names and len(stage.names) != stage.last - stage.first:
            raise PlanError(
                f"stage {s} of the plan has layers {stage.first} to {stage.last - 1} but {len(stage.names)} layer "
                "names: its boundary was moved, its figures were not; check it with the model's profile (--profile)"
            )
    if not any(stage.forward_s + stage.backward_s for stage in plan.stages):
        raise PlanError(
            "the stages of the plan have no times; check it with the model's profile (--profile), which has them"
        )


def _plan_from_profile(plan: Plan, profile: Profile, built: Schedule) -> tuple[Plan, tuple[str, ...]]:
    """Returns the plan with a profile's figures, and the differences."""
    layers = profile.graph.layers
    plan.check_layers(len(layers))
    unknown = {name for stage in plan.stages for name in stage.names} - {layer.name for layer in layers}
    if unknown:
        raise PlanError(
            f"the plan names the layer {min(unknown)!r}, but the profile of {profile.model} has no such layer; give "
            "the profile of the plan's model, or plan again from this profile"
        )
    profile = profile.without_tied_groups() if built.makes_same_updates else profile
    downsets = _find_downsets(plan, profile)
    space = SearchSpace.of(
        profile,
        plan.cluster,
        choices=plan.choices,
        microbatches=plan.microbatches,
        occupancy=occupancy_of(plan.schedule, plan.microbatches, built.updates.compensation),
        downsets=downsets,
    )
    indices = [space.downsets.index(downset) for downset in (0, *downsets)]
    rows, differences = [], []
    for s, (stage, span) in enumerate(zip(plan.stages, pairwise(indices), strict=True)):
        row = space.stage(*span, stage.replicas, stage.recompute)
        row = offload_stage(space, row, *span, offload=stage.offload)
        differences += [f"stage {s}, {line}" for line in _list_differences(stage, row)]
        rows.append(row)
    tied = space.tied_weights(list(pairwise(indices)))
    profiled = replace(
        plan,
        stages=tuple(rows),
        tied_weights=tied,
        batch=profile.batch,
        model=profile.model,
        unit="minibatch",
        bound_s=0.0,
    )
    return count_bytes(space, profiled), tuple(differences)


def _find_downsets(plan: Plan, profile: Profile) -> list[int]:
    """Returns the layers up to the end of each stage, a bit for each layer.

    They are the layers that the stages name, if these can run in that order, else those in the graph's order.
    """
    graph = profile.graph
    numbers = {layer.name: i for i, layer in enumerate(graph.layers)}
    by_name = list(accumulate(sum(1 << numbers[name] for name in stage.names) for stage in plan.stages))

    def is_closed(downset: int) -> bool:
        def has(layer: int) -> int:
            return downset >> layer & 1

        return all(has(a) >= has(b) for a, b in graph.edges) and all(len(set(map(has, tie))) == 1 for tie in graph.ties)

    if all(
        downset.bit_count() == stage.last and is_closed(downset)
        for downset, stage in zip(by_name, plan.stages, strict=True)
    ):
        return by_name
    planner.check_cuts(profile, tuple(stage.first for stage in plan.stages[1:]))
    return [(1 << stage.last) - 1 for stage in plan.stages]


def _list_differences(stage: Stage, row: Stage) -> list[str]:
    lines = []
    if stage.names and stage.names != row.names:
        lines.append(
            f"layers: the plan names {_join_names(stage.names)}, "
            f"but layers {row.first} to {row.last - 1} are {_join_names(row.names)}"
        )
    for name in _COMPARED:
        planned, profiled = getattr(stage, name), getattr(row, name)
        if abs(planned - profiled) > _SAME_FIGURE * max(planned, profiled):
            write_figure = format_seconds if name.endswith("_s") else format_bytes
            lines.append(f"{name}: {write_figure(planned)} in the plan, {write_figure(profiled)} in the profile")
    return lines


def _join_names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def _add_bytes(plan: Plan, built: Schedule) -> Plan:
    """Returns the plan with peak bytes from its own figures."""
    stages, usages, built = [], occupancy(built), replace(built, plan=plan)
    peers = peers_of(plan.replicas, [usage.in_flight for usage in usages])
    for s, (stage, usage) in enumerate(zip(plan.stages, usages, strict=True)):
        stage_bytes = StageBytes.of_rules(built, s, usage, peers[s])
        memory = stage_bytes.peak(usage, -(-built.microbatches // stage.replicas), plan.update_delay[s])
        stages.append(replace(stage, peak_bytes=memory.total_bytes, memory=memory))
    return replace(plan, stages=tuple(stages))


def _count_copies_s(plan: Plan, stage: Stage) -> float:
    is_copied = plan.costs.on_gpus and plan.choices.hosts_optimizers
    return float(hosted_copies_s(stage.trained_bytes, plan.cluster)) if is_copied else 0.0


def count_moved_state(plan: Plan, before: Plan, built: Schedule) -> Plan:
    """Returns a plan that keeps other things than `before`, or elsewhere, with its peaks and seconds.

    The rest of the peaks is that of `before`, such as the model's input. Raises a PlanError if a stage does not fit.
    """
    is_planned = before.method()[0] == built.name
    rows = zip(before.stages, _add_bytes(before, built).stages, _add_bytes(plan, built).stages, strict=True)
    stages = []
    for planned, counted, stage in rows:
        rest_bytes = is_planned * max(planned.peak_bytes - counted.peak_bytes, 0)
        copies_s, before_s = (_count_copies_s(timed, stage) for timed in (plan, before))
        memory = replace(stage.memory, message_bytes=stage.memory.message_bytes + rest_bytes)
        peak_bytes, update_s = stage.peak_bytes + rest_bytes, stage.update_s + copies_s - before_s
        stages.append(replace(stage, memory=memory, peak_bytes=peak_bytes, update_s=update_s))
    moved = replace(plan, stages=tuple(stages), bound_s=0.0)
    _check_stage_memory(replace(moved, schedule=built.name), occupancy(built))
    check_machines(moved, built)
    return moved


def _check_stage_memory(plan: Plan, usages: tuple[StageOccupancy, ...]) -> None:
    if (s := plan.first_stage_over_memory) is not None:
        stage, usage = plan.stages[s], usages[s]
        others = " in addition to the other stages of its worker" if plan.is_shared else ""
        raise PlanError(
            f"stage {s} of the plan (layers {stage.first} to {stage.last - 1}) holds {usage.in_flight} in flight and "
            f"{usage.versions} versions under {plan.schedule} and needs {format_bytes(stage.peak_bytes)}{others}, a "
            f"worker has {format_bytes(plan.costs.sites[s].memory_bytes or 0)}; {_advise_rotation(plan, s, usage)}move "
            "layers to another stage, use a smaller depth or more microbatches"
        )


def _advise_rotation(plan: Plan, s: int, usage: StageOccupancy) -> str:
    """Says what the bases of a stage take, if it has any, and which smaller form fits."""
    rules = () if usage.updates is None else usage.updates.compensation
    rotation = next((rule for rule in rules if rule.list_smaller_forms()), None)
    if rotation is None:
        return ""
    stage = plan.stages[s]
    (kept_bytes, _), memory_bytes = rotation.matrix_bytes(stage.matrices), plan.costs.sites[s].memory_bytes or 0
    for smaller in rotation.list_smaller_forms():
        need_bytes, _ = smaller.matrix_bytes(stage.matrices)
        if kept_bytes - need_bytes >= stage.peak_bytes - memory_bytes:
            fitting = f"{smaller} {format_bytes(need_bytes)}, which fits: ask for it, "
            return f"{rotation} keeps {format_bytes(kept_bytes)} there, {fitting}"
    return f"{rotation} keeps {format_bytes(kept_bytes)} there; "

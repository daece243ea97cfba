"""Planning: a profiled model partitioned into stages, by the planner that the request names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from pipedream import planner, schedules
from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.extensions import list_offers
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.hardware.devices import pcie_bytes_per_s
from pipedream.core.model.profile import Profile
from pipedream.core.plan import depth
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan
from pipedream.core.schedule.occupancy import fill_depth
from pipedream.core.units import format_bytes
from pipedream.options import keywords
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.workflows import methods
from pipedream.workflows.disturbance import find_doubt
from pipedream.workflows.exclusions import check_options
from pipedream.workflows.stage_search import StageSearch, compare_alone, make_candidate

_LEAST = "sparse:30,0.02"
"""Sums that send so little that any link is fast."""
_APPROXIMATIONS: tuple[dict[str, Any], ...] = (
    {"messages": "bfloat16"}, {"messages": "int8"}, {"messages": "int4"},
    {"sums": "powersgd:4"}, {"sums": "diloco:30"}, {"sums": _LEAST},
)  # fmt: skip
_RARE = "every:8"
_WORTH_SAYING = 0.1
"""Least share of the time that `_LEAST` must save to be named unasked."""
_MIN_GAIN = 0.02
"""Least share of the time that a coarser approximation must save."""


@keywords(PlanRequest)
def plan(profile: Profile, request: PlanRequest) -> Plan:
    """Partitions a profiled model into stages so that training is as fast as possible and each stage fits the memory.

    Args:
        request: the fields of `PlanRequest`.

    Raises:
        PlanError: nothing fits, the model or the cluster does not allow the shape, or options exclude each other.
    """
    return make_plan(profile, request)


def make_plan(profile: Profile, request: PlanRequest) -> Plan:
    """Plans as `plan` does."""
    if request.allow_approximate:
        return plan_and_compare(profile, request).plan
    profile, request = _fill_in_cluster(request, profile)
    return _strip_search_costs(_compare(profile, request)[0].plan, profile, request)


def plan_and_compare(profile: Profile, request: PlanRequest, names: Sequence[str] = ()) -> planner.Comparison:
    """Plans as `plan` does, and returns all that was compared.

    The schedule 'auto' finds the method, stages, microbatches and depth with the fewest simulated seconds per
    minibatch; a method that does not flush may update with a minibatch of each replica. Data parallelism and one worker
    are always among the candidates or the references: as PyTorch's DistributedDataParallel, with a minibatch for each
    worker, and at an equal global batch, with each minibatch divided among the workers.

    Args:
        request: 'auto' keeps microbatches, in_flight, shape and update_delay where they are given, and otherwise
            searches them.
        names: the methods that 'auto' compares; () compares all that are allowed.

    Raises:
        PlanError: no method works, or a name is not known. Also those of `plan`.
    """
    if request.allow_approximate:
        return _compare_approximations(profile, replace(request, allow_approximate=False), names)
    of_request, request = _fill_in_cluster(request, profile)
    comparison, profile, request = _compare(of_request, request, names)
    best_plan = _strip_search_costs(comparison.plan, profile, request)
    first, *rest = comparison.candidates
    if first.period_s is None:
        first = _simulate(first, comparison.plan)
    references = tuple(_list_references(profile, request, comparison.candidates))
    too_large = _find_too_large(profile, request, first)
    comparison = replace(comparison, plan=best_plan, candidates=(first, *rest), references=references)
    averaged = _find_averaged(profile, request, comparison)
    return replace(comparison, too_large=too_large, averaged=averaged, doubt=find_doubt(of_request))


def _compare(
    profile: Profile, request: PlanRequest, names: Sequence[str] = ()
) -> tuple[planner.Comparison, Profile, PlanRequest]:
    """Returns the comparison, and the profile and request of what its plan's workers are: of a mesh, a rank each."""
    for offer in list_offers("planning"):
        if offer.takes(request):
            comparison, profile, request = offer.compare(profile, request, names)
            return comparison, profile, request
    if request.mesh:
        raise PlanError(f"mesh={request.mesh!r} was asked for, but no extension here plans meshes; leave it out")
    with suggest_on_shortage(profile, request):
        return plan_once(profile, request, names), profile, request


def _compare_approximations(profile: Profile, request: PlanRequest, names: Sequence[str]) -> planner.Comparison:
    """Returns the comparison with the fastest plan; if that plan approximates, with the exact comparison too."""
    check_options(vars(request) | {"allow_approximate": True})
    exact = best = plan_and_compare(profile, request, names)
    for approximation in _APPROXIMATIONS:
        try:
            other = plan_and_compare(profile, replace(request, **approximation), names)
        except PlanError:  # such as a rank above the matrices'
            continue
        seconds = [comparison.candidates[0].period_s or inf for comparison in (other, best)]
        if seconds[0] < (1 - _MIN_GAIN) * seconds[1]:
            best = other
    return best if best is exact else replace(best, exact=exact)


@contextmanager
def suggest_on_shortage(profile: Profile, request: PlanRequest) -> Iterator[None]:
    """Context that adds to a shortage of memory what would save some."""
    try:
        yield
    except ShortageError as error:
        advice = [text for offer in list_offers("advice") for text in offer.advise(profile, request)]
        raise error.reworded("; ".join([str(error), *_describe_savings(request, error), *advice])) from None


def _describe_savings(request: PlanRequest, error: ShortageError) -> Iterator[str]:
    """Yields what further choices would save of what is missing, if the method and the other options allow them."""
    savings = [
        f"{option} saves {format_bytes(size)}" for option, size in error.savings.items() if _accepts(request, option)
    ]
    if savings:
        yield f"{format_bytes(error.missing_bytes)} are missing: with the same cuts {', '.join(savings)}"


def _accepts(request: PlanRequest, option: str) -> bool:
    name, value = option.removeprefix("--").replace("-", "_").split()
    change: dict[str, Any] = {name: value}
    try:
        check_options(vars(replace(request, **change)))
        if name == "recompute" and request.schedule != AUTO and schedules.stage_order_of(request.schedule) is None:
            plan = Plan.uniform(2)
            stages = tuple(replace(stage, recompute=True) for stage in plan.stages)
            schedules.build(request.schedule, replace(plan, stages=stages))
    except PipelineError:
        return False
    return True


def _strip_search_costs(plan: Plan, profile: Profile, request: PlanRequest) -> Plan:
    """Returns the plan with all choices of the request; a search's plan may lack those of a method that replicates."""
    choices = _choose(profile, request, plan.replicas).choosing(activations=plan.choices.activations)
    plan = replace(plan, choices=choices)
    methods.check_machines(plan)
    return plan


def _choose(profile: Profile, request: PlanRequest, replicas: Sequence[int]) -> Choices:
    return request.choices.of_values(8 * profile.value_bytes).of_plan(replicas)


def _fill_in_cluster(request: PlanRequest, profile: Profile) -> tuple[Profile, PlanRequest]:
    """Checks the options; returns profile and request with a cluster, and with the costs of messages and sums."""
    check_options(vars(request))
    Profile.check_is(profile)
    cluster = request.cluster
    if cluster is None:
        from pipedream.services.probe.probe import detect_cluster  # loads torch

        cluster, message = detect_cluster("cuda" if profile.device.startswith("cuda") else "cpu")
        if message:
            print(message, flush=True)
    gpus = sorted({device for device in cluster.devices if not device.startswith("cpu")})
    if gpus and profile.device.startswith("cpu"):
        warnings.warn(
            f"the workers have {', '.join(gpus)}, but the profile was measured on {profile.device}: the plan is one "
            f"for CPUs; profile on such a GPU (--device cuda), or from a datasheet (--device meta --as {gpus[0]})",
            stacklevel=4,
        )
    request.choices.check_profile(profile)
    return profile, _add_copy_rate(replace(request, cluster=cluster))


def _add_copy_rate(request: PlanRequest) -> PlanRequest:
    """Returns the request with the rate of copies between GPUs and machines, if its choices need it: a datasheet's,
    unless it was measured.
    """
    cluster, choices = request.workers_and_links, request.choices
    on_gpus = not cluster.on_cpus
    if cluster.host_bytes_per_s or not (choices.moves_activations or (choices.hosts_optimizers and on_gpus)):
        return request
    return replace(request, cluster=replace(cluster, host_bytes_per_s=pcie_bytes_per_s(cluster.devices)))


def plan_once(
    profile: Profile,
    request: PlanRequest,
    names: Sequence[str] = (),
    score_plan: Callable[[Plan], planner.Score] = methods.score_if_quick,
    rival_s: float = inf,
) -> planner.Comparison:
    """Plans without a mesh, by the planner that the request names; activations move only where that saves seconds."""
    check_options(vars(request))
    compare_by_planner = partial(_compare_by_planner, profile, names, score_plan, rival_s)
    if not request.choices.moves_activations:
        return compare_by_planner(request)
    comparisons = []
    with suppress(PlanError):
        comparisons.append(compare_by_planner(replace(request, activations="")))
    try:
        comparisons.append(compare_by_planner(request))
    except PlanError:
        if not comparisons:
            raise
    return min(comparisons, key=lambda comparison: comparison.candidates[0].period_s or comparison.plan.period_s)


def _compare_by_planner(
    profile: Profile,
    names: Sequence[str],
    score_plan: Callable[[Plan], planner.Score],
    rival_s: float,
    request: PlanRequest,
) -> planner.Comparison:
    if request.microbatches is not None and 1 < profile.batch < request.microbatches:
        raise PlanError(
            f"{request.microbatches} microbatches were asked for, but a minibatch has {profile.batch} samples; ask for "
            "at most as many, or profile larger minibatches"
        )
    for offer in list_offers("strategy"):
        if offer.takes(request):
            comparison: planner.Comparison = offer.compare(profile, request, names)
            return comparison
    if schedules.properties_of(request.schedule).same_updates:
        profile = profile.without_tied_groups()
    if schedules.stage_order_of(request.schedule) is not None:
        return compare_alone(_lay_out_stages(profile, request), request)
    return StageSearch(profile, request).compare(score_plan, rival_s)


def _simulate(candidate: planner.Candidate, plan: Plan) -> planner.Candidate:
    try:
        return planner.with_score(candidate, methods.score_if_quick(plan))
    except PipelineError as error:
        return replace(candidate, why=str(error))


def _find_too_large(profile: Profile, request: PlanRequest, chosen: planner.Candidate) -> planner.Candidate | None:
    """Returns the best plan of one search without memory limits, if it is faster than the chosen one."""
    cluster, automatic = request.workers_and_links, request.shape in ("any", "pipeline") and request.cuts is None
    searched = automatic and request.schedule != AUTO and request.strategy == "simulate" and not chosen.is_meshed
    if set(cluster.memories) == {None} or not searched:
        return None
    unlimited = replace(request, cluster=cluster.without_memory_limits(), strategy="search")
    plan = plan_once(profile, unlimited).plan
    candidate = _simulate(make_candidate(plan, str(request.shape)), plan)
    is_over = replace(plan, cluster=cluster).first_stage_over_memory is not None
    return candidate if is_over and candidate.seconds < chosen.seconds else None


def _find_averaged(
    profile: Profile, request: PlanRequest, comparison: planner.Comparison
) -> tuple[str, planner.Candidate] | None:
    """Returns replicas of the whole model with sparse averages, if they fit and take far less time than all else."""
    cluster, choices = request.workers_and_links, request.choices
    if cluster.workers == 1 or choices.approximations or comparison.candidates[0].is_meshed:
        return None
    with suppress(PlanError):
        candidate = _simulate_request(
            profile, PlanRequest(cluster, shape="data-parallel", **choices.words | {"sums": _LEAST})
        )
        others = min(row.seconds for row in (*comparison.candidates, *comparison.references))
        return (_LEAST, candidate) if candidate.seconds < (1 - _WORTH_SAYING) * others else None
    return None


def _list_references(
    profile: Profile, request: PlanRequest, candidates: Sequence[planner.Candidate]
) -> Iterator[planner.Candidate]:
    """Yields data parallelism, with a minibatch for each worker, several, and a part of one; and one worker."""
    listed = {(row.schedule, row.microbatches, row.config) for row in candidates if row.period_s is not None}
    cluster = request.workers_and_links
    workers, choices = cluster.workers, request.choices.exact
    split = [("1f1b", workers, "data-parallel")] if 1 < workers <= profile.batch else []
    if workers > 1:
        yield from _accumulate(profile, PlanRequest(cluster, shape="data-parallel", **choices.words | {"sums": _RARE}))
    for schedule, m, shape in [("pipedream", 1, "data-parallel"), *split, ("pipedream", 1, "1")]:
        config = str(workers) if shape == "data-parallel" else shape
        if (schedule, m, config) in listed:
            continue
        listed.add((schedule, m, config))
        parts = m if m > 1 else None
        reference = PlanRequest(cluster, schedule=schedule, microbatches=parts, shape=shape, **choices.words)
        try:  # without a word on what else would fit
            yield _simulate_request(profile, reference)
        except PlanError as error:
            yield planner.Candidate(schedule, m, "noam", 0, shape, why=str(error))


def _simulate_request(profile: Profile, request: PlanRequest) -> planner.Candidate:
    """Returns the row of what a request plans. Raises a `PlanError` if nothing fits."""
    plan = _strip_search_costs(plan_once(profile, request).plan, profile, request)
    return _simulate(make_candidate(plan, str(request.shape)), plan)


def _accumulate(profile: Profile, request: PlanRequest) -> Iterator[planner.Candidate]:
    """Yields data parallelism that sums its gradients after several minibatches, if it fits."""
    with suppress(PlanError):
        candidate = _simulate_request(profile, request)  # sums of weights take as long as those of gradients
        count = int(_RARE.partition(":")[2])
        yield replace(candidate, accumulated=count, samples_per_update=count * (candidate.samples_per_update or 0))


def _lay_out_stages(profile: Profile, request: PlanRequest) -> Plan:
    """Plans for a method of `schedules.STAGE_ORDERS`, on all workers of a cluster, which must be equally fast.

    Such methods give all workers the same number of stages, so stages should be equal: they are the planner's straight
    pipeline on as many workers as stages, over the cluster's slowest links.

    Args:
        profile: `Profile.without_tied_groups`, since these methods may hold a weight in several stages.

    Raises:
        PlanError: the model has too few cut points, workers differ in speed, or stages do not fit their memory.
        ScheduleError: the method does not work with these workers, microbatches or chunks.
    """
    schedule, chunks, cluster = request.schedule, request.chunks, request.workers_and_links
    schedules.check_chunks(schedule, chunks)
    layout = schedules.stage_order_of(schedule)
    assert layout is not None, f"{schedule} has one stage a worker"
    if len(set(cluster.speeds)) > 1:
        raise PlanError(
            f"schedule {schedule!r} was asked for workers that are not equally fast; its stages are laid out for equal "
            "ones. Plan for another method, or partition by hand and name the workers in the plan's order"
        )
    p = cluster.workers
    order = layout.order(p, chunks or layout.chunks or 1)
    count = layout.stages(p, chunks)
    line = Cluster.flat(count, cluster.bandwidth_bytes_per_s, cluster.latency_s)
    choices = request.choices.without_recomputation
    one_version = fill_depth(lambda in_flight, update_delay: 1)
    straight = planner.PlanSearch.of(profile, line, choices=choices, occupancy=one_version).best("straight")
    recompute = all(request.choices.recomputing)
    stages = tuple(replace(stage, replicas=layout.replicas, recompute=recompute) for stage in straight.stages)
    note = f"fastest straight cut into {count} stages, {len(order) // p} on each of {p} workers: {layout.words}"
    plan = replace(
        straight,
        stages=stages,
        in_flight=depth.noam((layout.replicas,) * count),
        update_delay=(0,) * count,
        cluster=cluster,
        worker_order=order,
        bound_s=0.0,
        choices=_choose(profile, request, (layout.replicas,) * count),
    )
    built = schedules.build(schedule, plan, request.microbatches)
    plan, m = built.plan, built.microbatches  # the method may let stages recompute
    if 1 < profile.batch < m:
        raise PlanError(
            f"schedule {schedule!r} on {p} workers splits a minibatch into {m} microbatches, but one has "
            f"{profile.batch} samples; profile larger minibatches, or ask for fewer microbatches"
        )
    plan = replace(plan, schedule=built.name, microbatches=m, note=note)
    space = methods.space_of(profile, cluster, choices, schedule, m)
    plan = space.with_bytes(plan)
    methods.check_worker_memory(plan, space)
    methods.check_machines(plan, built)
    return methods.add_passes_on_copies(replace(built, plan=plan))

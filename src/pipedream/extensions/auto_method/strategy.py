"""Chooses the method, the stages, the microbatches and the depth, by simulating many ways to train.

A plan's own seconds ignore filling, draining and exposed communication.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipedream import planner
from pipedream.core.errors import PipelineError, PlanError, ShortageError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.choices import Choices
from pipedream.core.plan.plan import Plan
from pipedream.core.progress import progress
from pipedream.core.schedule.occupancy import MethodProperties
from pipedream.core.units import format_seconds
from pipedream.plan_request import AUTO, PlanRequest
from pipedream.planner import Candidate, PlanSearch, SearchVariant
from pipedream.planner.tables.search_space import apply_depth
from pipedream.workflows.methods import score, select_methods, space_of

NAMES = ()
MAX_MICROBATCHES = 64  # each power of two is another plan and simulation for every method and shape


@dataclass(frozen=True, eq=False)
class _Alternatives:
    profile: Profile
    cluster: Cluster
    request: PlanRequest
    methods: Mapping[str, MethodProperties]
    choices: Choices
    _profiles: dict[tuple[object, int], Profile] = field(default_factory=dict, init=False)
    _searches: dict[tuple[object, ...], PlanSearch] = field(default_factory=dict, init=False)
    _plans: dict[tuple[object, ...], Plan] = field(default_factory=dict, init=False)

    def all(self) -> Iterator[tuple[Candidate, SearchVariant, str | tuple[int, ...]]]:
        request = self.request
        shapes = planner.list_finalists(request.shape, self.profile, self.cluster.workers, request.all_workers)
        powers = range(min(self.profile.batch, MAX_MICROBATCHES).bit_length())
        splits = [1 << power for power in powers] if request.microbatches is None else [request.microbatches]
        for name, method in self.methods.items():
            depths = [request.in_flight] if request.in_flight != "noam" or not method.uses_depth else ["noam", "auto"]
            delays = (0, 1) if method.delays_updates else (0,)
            if method.delays_updates and request.update_delay:
                delays = (request.update_delay,)
            for shape in shapes:
                for m in splits if method.splits_minibatch else [1]:
                    for in_flight in depths:
                        mode = in_flight if isinstance(in_flight, str) else "hand"
                        for update_delay in delays:
                            yield Candidate(name, m, mode, update_delay, str(shape)), shape, in_flight

    def plan_candidate(self, candidate: Candidate, finalist: SearchVariant, in_flight: str | tuple[int, ...]) -> Plan:
        """Raises PlanError if no plan fits, or if the candidate's delay or depth changes nothing."""
        profile = self._split_profile(self.methods[candidate.schedule].same_updates, candidate.microbatches)
        unlimited = self._plan_unlimited(profile, finalist, candidate.update_delay)
        if candidate.update_delay and not any(unlimited.update_delay):
            raise PlanError("no stage delays its updates")
        if self.methods[candidate.schedule].flushes and max(unlimited.replicas) > candidate.microbatches:
            raise PlanError("fewer microbatches than replicas")
        method = candidate.schedule, candidate.microbatches
        space = space_of(profile, self.cluster, self.choices, *method, update_delay=candidate.update_delay)
        try:  # the best plan without limits may fit as it is
            planned = apply_depth(space, replace(unlimited, cluster=self.cluster), "noam")
        except PlanError:
            search = PlanSearch(space, self.request.all_workers)
            planned = search.best(finalist.shape, link_factor=finalist.link_factor)
        noam = planned.in_flight
        planned = apply_depth(space, planned, in_flight)
        if in_flight == "auto" and self.request.in_flight == "noam" and planned.in_flight == noam:
            raise PlanError("no deeper than the paper's depth")
        # The bound holds for other updates.
        return replace(planned, schedule=candidate.schedule, microbatches=candidate.microbatches, bound_s=0.0)

    def _split_profile(self, same_updates: bool, microbatches: int) -> Profile:
        graph = self.profile.graph
        ties = graph.inseparable if same_updates else graph.ties
        key = ties, min(microbatches, self.profile.parts)  # for more parts `in_parts` returns the same
        if key not in self._profiles:
            profile = self.profile if ties == graph.ties else self.profile.without_tied_groups()
            self._profiles[key] = profile.in_parts(microbatches)
        return self._profiles[key]

    def _plan_unlimited(self, profile: Profile, finalist: SearchVariant, update_delay: int) -> Plan:
        key = id(profile), update_delay  # `_profiles` keeps it, so no other gets its id
        if key not in self._searches:
            choices = self.choices if all(self.choices.recomputing) else self.choices.without_recomputation
            self._searches[key] = PlanSearch.of(
                profile,
                self.cluster.without_memory_limits(),
                choices=choices,  # memory is not limited
                update_delay=update_delay,
                all_workers=self.request.all_workers,
            )
        if (*key, finalist) not in self._plans:
            self._plans[*key, finalist] = self._searches[key].best(finalist.shape, link_factor=finalist.link_factor)
        return self._plans[*key, finalist]


def takes(request: PlanRequest) -> bool:
    """Returns whether a request leaves the method to the planner."""
    return request.schedule == AUTO


def compare(profile: Profile, request: PlanRequest, names: Sequence[str] = ()) -> planner.Comparison:
    """Finds the way to train with the fewest simulated seconds per minibatch.

    Ties go to fewer bytes on the fullest worker, then to the order of the methods, the finalists, the microbatches, the
    depths and the update delays.

    Args:
        request: the shape 'any' tries those of `list_finalists`, among them pipelines with equal replicas, like
            PipeDream-2BW's planner (ICML 2021, section 3.3); 'pipeline' leaves out plans of one stage; any other shape
            is the only one. Without microbatches, powers of two up to the samples of a minibatch, 64 at most. The depth
            'noam' also tries 'auto' with methods that can be deeper, an update delay of 0 also 1 with methods that can
            delay updates.
        names: the methods to compare; () compares all that are allowed.

    Raises:
        ShortageError: no candidate works, and memory is missing for some (with the least that is).
        PlanError: no candidate works (with the reason for the first). Or a method splits the backward, of which a
            profile has only the sum.
    """
    methods = select_methods(names, allow_asynchronous=request.allow_asynchronous)
    if halves := [name for name, method in methods.items() if method.splits_backward]:
        raise PlanError(
            f"schedule auto was asked to compare {', '.join(halves)}, but a profile does not have the seconds of the "
            "halves of a backward; name that schedule alone, and see 'pipedream simulate --weight-s'"
        )
    cluster = request.workers_and_links
    alternatives = _Alternatives(profile, cluster, request, methods, request.choices)
    with progress("planning", sum(1 for _ in alternatives.all())) as advance:
        planned, refused, shortages = _plan_all(alternatives, advance)
    try:
        comparison = planner.compare_by_simulation(planned, score, refused)
    except PlanError as error:
        text = f"no method works with what was asked on {cluster.workers} workers; "
        if not shortages:
            raise PlanError(f"{text}{error}") from None
        candidate, shortage = min(shortages, key=lambda row: row[1].need_bytes)
        text += f"{len(refused)} ways were tried, the nearest, {candidate}: {shortage}"
        raise shortage.reworded(text) from None
    note = _write_note([candidate for candidate in comparison.candidates if candidate.period_s is not None])
    best = comparison.candidates[0]
    if len(best.replicas) > 1 and not methods[best.schedule].flushes:  # a plan of one stage delays nothing
        note += "; its gradients are stale, so it may learn differently from a single process"
    if profile.batch == 1 and request.microbatches is None:
        note += "; a minibatch of one sample cannot be split"
    return replace(comparison, plan=replace(comparison.plan, note=note))


def _plan_all(
    alternatives: _Alternatives, advance: Callable[[], None]
) -> tuple[list[tuple[Candidate, Plan]], list[Candidate], list[tuple[Candidate, ShortageError]]]:
    """Returns the plans, only the first of equal ones; the candidates without a plan; those that lack memory."""
    planned: list[tuple[Candidate, Plan]] = []
    refused: list[Candidate] = []
    shortages: list[tuple[Candidate, ShortageError]] = []
    keys = set()
    for candidate, finalist, in_flight in alternatives.all():
        advance()
        try:
            plan = alternatives.plan_candidate(candidate, finalist, in_flight)
        except PipelineError as error:
            refused.append(replace(candidate, why=str(error)))
            if isinstance(error, ShortageError):
                shortages.append((candidate, error))
            continue
        key = (plan.schedule, plan.microbatches, plan.stages, plan.in_flight, plan.update_delay, plan.worker_order)
        if key in keys:
            continue
        keys.add(key)
        planned.append((planner.candidate_from_plan(candidate, plan, alternatives.methods[candidate.schedule]), plan))
    return planned, refused, shortages


def _write_note(simulated: Sequence[Candidate]) -> str:
    fastest: dict[str, Candidate] = {}  # of each method
    for candidate in simulated:
        fastest.setdefault(candidate.schedule, candidate)
    best, *others = (f"{candidate}: {format_seconds(candidate.period_s or 0)}" for candidate in fastest.values())
    return "; ".join([f"auto: {best} per minibatch simulated, the least of {len(simulated)} ways", *others])

"""Chooses the method, the stages, the microbatches and the depth, by simulating many ways to train.

A plan's own seconds ignore filling, draining and exposed communication. The simulation and the methods are passed in:
planning knows neither schedules nor a clock.

Candidates are tried by increasing *bound*, seconds per minibatch that a candidate cannot beat, until the next bound is
above the best simulated time. With f, b the forward and backward of a minibatch at a stage, u its update with the part
of the all-reduce that the last backward cannot hide, r its replicas and m microbatches, the bound of a flushing method
is the maximum over stages s of its own work and update, with what the runtime adds to them, and of

    sum over t < s of (f_t + b_t) / m  +  ceil(m / r_s) / m (f_s + b_s)  +  u_0

because stage 0 updates after the last microbatch has come back from s, and runs no forward of the next minibatch
before. The bound of any other method is the compute of its slowest stage, (f + b + u) / r (`Site.compute_s`), with
what the runtime adds; if its updates are delayed, without the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any

from pipedream.core.display import Tabular
from pipedream.core.errors import PipelineError, PlanError
from pipedream.core.hardware.cluster import Cluster
from pipedream.core.model.profile import Profile
from pipedream.core.plan.plan import Plan
from pipedream.core.progress import progress
from pipedream.core.schedule.properties import MethodProperties
from pipedream.core.units import format_bytes, format_number, format_seconds
from pipedream.planner.search import parse_counts, plan
from pipedream.planner.tables.method_occupancy import MethodOccupancy
from pipedream.planner.tables.search_space import SearchSpace

__all__ = ["Candidate", "Comparison", "Score", "choose"]

_FEW_WORKERS = 8  # with more, only numbers of stages that leave no worker idle are tried
_MOST_MICROBATCHES = 64
_TIE = 1e-9  # relative: closer periods are equal


@dataclass(frozen=True)
class Score:
    """The result of a simulation: seconds per minibatch in the steady state, and the fraction of idle time."""

    period_s: float
    bubble: float


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what is known about it.

    Attributes:
        depth_mode: 'noam', 'full' or 'auto'; 'hand' if a count was given for each stage.
        shape: as requested.
        config: of the plan; '' if there is none.
        bound_s: of the seconds per minibatch.
        period_s, bubble: simulated; None if the bound ruled the candidate out.
        peak_bytes: of the fullest worker.
        why: it was not simulated; '' if it was.
    """

    schedule: str
    microbatches: int
    depth_mode: str
    update_delay: int
    shape: str
    config: str = ""
    bound_s: float = 0.0
    period_s: float | None = None
    bubble: float | None = None
    peak_bytes: int = 0
    why: str = ""

    def __str__(self) -> str:
        parts = f", m = {self.microbatches}" if self.microbatches > 1 else ""
        return (
            f"{self.schedule} on {self.config or self.shape}{parts}, {self.depth_mode}"
            f"{', update delay 1' if self.update_delay else ''}"
        )


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """The best plan, and all candidates: the simulated ones first, by increasing period."""

    plan: Plan
    candidates: tuple[Candidate, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each candidate."""
        return [asdict(one) for one in self.candidates]

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.candidates)} candidates, the best is {self.candidates[0]}>"

    def __str__(self) -> str:
        head = (
            f"{'method':<24}  {'plan':<12}  {'m':>4}  {'depth':<5}  {'delay':>5}  {'minibatch':>10}  {'samples/s':>9}  "
            f"{'bubble':>6}  {'peak':>9}"
        )
        rows = [
            f"{one.schedule:<24}  {one.config:<12}  {one.microbatches:>4}  {one.depth_mode:<5}  {one.update_delay:>5}  "
            f"{format_seconds(one.period_s):>10}  "
            f"{format_number(self.plan.batch / one.period_s if one.period_s else inf):>9}  "
            f"{one.bubble or 0.0:>6.1%}  {format_bytes(one.peak_bytes):>9}"
            for one in self.candidates
            if one.period_s is not None
        ]
        rest = [one for one in self.candidates if one.period_s is None]
        slow = sum(bool(one.config) for one in rest)
        tail = [f"{slow} more cannot be faster than the first"] if slow else []
        tail += [f"{len(rest) - slow} more cannot be used (no plan, or too little memory)"] if len(rest) > slow else []
        return "\n".join([head, *rows, *tail])


@dataclass(frozen=True, eq=False)
class _Alternatives:
    profile: Profile
    cluster: Cluster
    methods: Mapping[str, MethodProperties]
    occupancy: Callable[[str, int], MethodOccupancy]
    shapes: tuple[str, ...]
    microbatches: int | None
    in_flight: str | tuple[int, ...]
    update_delay: int
    all_workers: bool
    recompute: str

    def all(self) -> Iterator[tuple[Candidate, str | tuple[int, ...]]]:
        splits = _splits(self.profile.batch) if self.microbatches is None else [self.microbatches]
        for name, method in self.methods.items():
            depths = [self.in_flight] if self.in_flight != "noam" or not method.uses_depth else ["noam", "auto"]
            delays = (0, 1) if method.delays_updates else (0,)
            if method.delays_updates and self.update_delay:
                delays = (self.update_delay,)
            for shape in self.shapes:
                for m in splits if method.splits_minibatch else [1]:
                    for in_flight in depths:
                        mode = in_flight if isinstance(in_flight, str) else "hand"
                        for update_delay in delays:
                            yield Candidate(name, m, mode, update_delay, shape), in_flight

    def plan(self, way: Candidate, in_flight: str | tuple[int, ...]) -> Plan:
        """Raises PlanError if no plan fits, or if it equals that of another candidate."""
        occupancy = self.occupancy(way.schedule, way.microbatches)
        profile = self.profile.parted() if self.methods[way.schedule].same_updates else self.profile
        free = self._unlimited(profile, way.shape, way.update_delay)
        if way.update_delay and not any(free.update_delay):
            raise PlanError("no stage delays its updates")
        if self.methods[way.schedule].flushes and max(free.replicas) > way.microbatches:
            raise PlanError("fewer microbatches than replicas")
        space = SearchSpace.of(
            profile,
            self.cluster,
            update_delay=way.update_delay,
            microbatches=way.microbatches,
            occupancy=occupancy,
        )
        try:
            found = space.at_depth(replace(free, cluster=self.cluster), "noam")  # the best plan of all fits
        except PlanError:
            found = plan(
                profile,
                self.cluster,
                occupancy=occupancy,
                microbatches=way.microbatches,
                shape=way.shape,
                update_delay=way.update_delay,
                all_workers=self.all_workers,
                recompute=self.recompute,
            )
        noam = found.in_flight
        found = space.at_depth(found, in_flight)
        if in_flight == "auto" and self.in_flight == "noam" and found.in_flight == noam:
            raise PlanError("no deeper than the paper's depth")
        return replace(
            found, schedule=way.schedule, microbatches=way.microbatches, bound_s=0.0
        )  # the bound holds for other updates

    def _unlimited(self, profile: Profile, shape: str, update_delay: int) -> Plan:
        key = profile.graph.ties, shape, update_delay
        if key not in self._plans:
            again = "always" if self.recompute == "always" else "never"
            self._plans[key] = plan(
                profile,
                self.cluster.unlimited(),
                shape=shape,
                update_delay=update_delay,
                all_workers=self.all_workers,
                recompute=again,
            )
        return self._plans[key]

    @cached_property
    def _plans(self) -> dict[tuple[tuple[tuple[int, ...], ...], str, int], Plan]:
        return {}


def choose(
    profile: Profile,
    cluster: Cluster,
    methods: Mapping[str, MethodProperties],
    score: Callable[[Plan], Score],
    occupancy: Callable[[str, int], MethodOccupancy],
    *,
    shape: str | tuple[int, ...] = "any",
    microbatches: int | None = None,
    in_flight: str | tuple[int, ...] = "noam",
    update_delay: int = 0,
    all_workers: bool = False,
    recompute: str = "never",
) -> Comparison:
    """Finds the way to train with the fewest simulated seconds per minibatch.

    Ties go to fewer bytes on the fullest worker, then to the order of the methods.

    Args:
        methods: by name.
        score: simulates a plan with its method and microbatches; may raise a PipelineError.
        occupancy: (method, microbatches) -> what the stages of a plan hold.
        shape: 'any' tries the fastest plan, one stage on all workers or one, and pipelines of 2, 3, ... stages with
            equal replicas, like PipeDream-2BW's planner (ICML 2021, section 3.3); 'pipeline' leaves out plans of one
            stage; any other shape is the only one.
        microbatches: None tries powers of two up to the samples of a minibatch.
        in_flight: 'noam' also tries 'auto' with methods that can be deeper.
        update_delay: 0 also tries 1 with methods that can delay updates.
        all_workers, recompute: see `plan`.

    Raises:
        PlanError: no candidate works (with the reason for the first). Or a method splits the backward, of which a
            profile has only the sum.
    """
    if halves := [name for name, method in methods.items() if method.splits_backward]:
        raise PlanError(
            f"schedule auto was asked to compare {', '.join(halves)}, but a profile does not have the seconds of the "
            "halves of a backward; name that schedule alone, and see 'pipedream simulate --weight-s'"
        )
    shapes = _shapes(shape, cluster, all_workers)
    ways = _Alternatives(
        profile, cluster, methods, occupancy, shapes, microbatches, in_flight, update_delay, all_workers, recompute
    )
    with progress("planning", sum(1 for _ in ways.all())) as advance:
        planned, refused = _plan_all(ways, advance)
    simulated: list[tuple[float, int, int, Candidate, Plan]] = []
    least_s = inf
    slower: list[Candidate] = []
    for number, way, found in sorted(planned, key=lambda row: (row[1].bound_s, row[0])):
        if way.bound_s > least_s * (1 + _TIE):
            slower.append(replace(way, why=f"cannot take less than {format_seconds(way.bound_s)}"))
            continue
        try:
            known_s = score(found)
        except PipelineError as error:
            refused.append(replace(way, config="", why=str(error)))
            continue
        least_s = min(least_s, known_s.period_s)
        way = replace(way, period_s=known_s.period_s, bubble=known_s.bubble)
        simulated.append((known_s.period_s, way.peak_bytes, number, way, found))
    if not simulated:
        raise PlanError(
            f"no method works with what was asked on {cluster.workers} workers; {len(refused)} ways were tried, the "
            f"first, {refused[0]}: {refused[0].why}"
        )
    simulated.sort(key=lambda row: (max(row[0], least_s * (1 + _TIE)), row[1:3]))
    candidates = (*(row[3] for row in simulated), *slower, *refused)
    note = _note(candidates, len(simulated))
    if not methods[candidates[0].schedule].flushes:
        note += "; its gradients are late, so it may learn differently from a single process"
    if profile.batch == 1 and microbatches is None:
        note += "; a minibatch of one sample cannot be split; for a graph.txt, give the minibatch size (--batch)"
    return Comparison(replace(simulated[0][4], note=note), candidates)


def _plan_all(
    ways: _Alternatives, advance: Callable[[], None]
) -> tuple[list[tuple[int, Candidate, Plan]], list[Candidate]]:
    """Of equal plans only the first is kept."""
    planned: list[tuple[int, Candidate, Plan]] = []
    refused: list[Candidate] = []
    seen = set()
    for way, in_flight in ways.all():
        advance()
        try:
            found = ways.plan(way, in_flight)
        except PipelineError as error:
            refused.append(replace(way, why=str(error)))
            continue
        key = (way.schedule, way.microbatches, found.stages, found.in_flight, found.update_delay, found.order)
        if key in seen:
            continue
        seen.add(key)
        peak_bytes = max(stage.peak_bytes for stage in found.stages)
        known = replace(
            way, config=found.config, bound_s=_bound_s(found, ways.methods[way.schedule].flushes), peak_bytes=peak_bytes
        )
        planned.append((len(planned), known, found))
    return planned, refused


def _shapes(shape: str | tuple[int, ...], cluster: Cluster, all_workers: bool) -> tuple[str, ...]:
    if shape not in ("any", "pipeline"):
        return (shape if isinstance(shape, str) else "-".join(map(str, parse_counts(shape))),)
    workers = cluster.workers
    every = workers <= _FEW_WORKERS and not all_workers
    equal = [
        "-".join([str(workers // stages)] * stages)
        for stages in range(2, workers + 1)
        if every or workers % stages == 0
    ]
    single = ["data-parallel", *([] if all_workers or workers == 1 else ["1"])] if shape == "any" else []
    return (str(shape), *single, *equal)


def _splits(batch: int) -> list[int]:
    return [1 << power for power in range(min(batch, _MOST_MICROBATCHES).bit_length())]


def _bound_s(plan: Plan, flushes: bool) -> float:
    """The lower bound of the module docstring."""
    m, stages, sites = plan.microbatches, plan.stages, plan.sites
    passes = [(stage.forward_s + stage.redone_s) / site.speed for stage, site in zip(stages, sites, strict=True)]
    if not flushes:
        return max(
            float(
                site.compute_s(
                    stage.forward_s,
                    stage.redone_s,
                    stage.update_s + added_s,
                    0 if update_delay else stage.parameter_bytes,
                )
            )
            for stage, site, added_s, update_delay in zip(stages, sites, plan.added_s, plan.update_delay, strict=True)
        )
    ends = [
        (stage.update_s + tied_s) / site.speed + float(site.sum_s(stage.parameter_bytes, stage.redone_s / m))
        for stage, site, tied_s in zip(stages, sites, plan.tied_s, strict=True)
    ]
    own = [-(-m // r) / m * seconds for r, seconds in zip(plan.replicas, passes, strict=True)]
    ahead = accumulate((seconds / m for seconds in passes[:-1]), initial=0.0)
    added = [seconds / site.speed for seconds, site in zip(plan.runtime_s, sites, strict=True)]
    alone = map(sum, zip(own, ends, added, strict=True))
    return max(max(a + b for a, b in zip(ahead, own, strict=True)) + ends[0], *alone)


def _note(candidates: Sequence[Candidate], simulated: int) -> str:
    best = candidates[0]
    assert best.period_s is not None
    lines = [f"auto: {best}: {format_seconds(best.period_s)} per minibatch simulated, the least of {simulated} ways"]
    named = {best.schedule}
    for one in candidates[1:simulated]:
        if one.schedule not in named and one.period_s is not None:
            named.add(one.schedule)
            lines.append(f"{one}: {format_seconds(one.period_s)}")
    return "; ".join(lines)

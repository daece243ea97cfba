"""Ways to train, compared by their simulated seconds per minibatch.

Candidates are simulated by increasing *bound*, the seconds per minibatch that they cannot beat. One is left out if its
bound is above the best simulated time of its rivals: pipelines, one worker, or data parallelism on any workers.

At a stage, f and b are the forward and backward of a minibatch, in microbatches with their fixed seconds, u is its
update with the part of the all-reduce that the last backward cannot hide, and r its replicas. There are m microbatches,
and c is the seconds of an activation and its gradient over the fastest link between two stages. The bound of a flushing
method is the maximum over stages s of two terms. The first is the stage's own work and update, with the all-reduce or
with what the runtime adds, which may hide the all-reduce. The second is

    sum over t < s of ((f_t + b_t) / m + c_t)  +  ceil(m / r_s) / m (f_s + b_s)  +  u_0

because stage 0 updates after the last microbatch has come back from s, and runs no forward of the next minibatch
before. A method that splits the backward has only the first term. The bound of a method that does not flush is the
compute of its slowest stage, (f + b + u) / r (`Site.compute_s`), with the all-reduce or with what the runtime adds. If
its updates are delayed, the all-reduce does not count. If it has the plan's depth, a replica of s holds at most
in_flight_s microbatches, plus one for an update delay, from forward to the end of backward, so it takes at least

    m / (r_s in_flight_s)  (sum over t >= s of (f_t + b_t) / m  +  sum over s <= t < p - 1 of c_t)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, repeat
from math import inf
from operator import add
from typing import Any

from pipedream.core.errors import PipelineError, PlanError
from pipedream.core.model.runtime_costs import RuntimeCosts
from pipedream.core.plan.plan import Plan
from pipedream.core.plan.ranks import meshes_of
from pipedream.core.schedule.occupancy import MethodProperties
from pipedream.core.tabular import Tabular
from pipedream.core.units import format_bytes, format_number, format_seconds, shorten

KINDS = ("pipeline", "data", "tensor", "mixed")
"""Kinds of plans: by stages, replicas, meshes of ranks, or several of these. A single rank uses none."""

_TIE = 1e-9  # relative: closer periods are equal
_FEW_ROWS = 8
MEASURED_SHARE = 0.98
"""A simulation that does not span whole rounds may measure up to 1% less than a round takes."""


@dataclass(frozen=True)
class Score:
    """The result of a simulation.

    Attributes:
        period_s: seconds per minibatch in the steady state.
        bubble: the fraction of idle time.
        samples_per_update: those of the stage with the most replicas, if these differ.
    """

    period_s: float
    bubble: float
    samples_per_update: int


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what is known about it.

    Attributes:
        depth_mode: 'noam', 'full' or 'auto'; 'hand' if a count was given for each stage.
        shape: as requested.
        config: the plan's configuration; '' if there is none.
        least_s: lower bound of `period_s`.
        period_s, bubble: simulated; None if it was not simulated.
        samples_per_update: those of the stage with the most replicas, if these differ; None if it was not simulated.
        peak_bytes: peak of the fullest worker.
        fixed_s: the part of `period_s` that smaller microbatches do not shorten, at the worker with the most of it.
        why: the reason why it was not simulated; '' if it was.
        mesh: the mesh of all workers, or one for each stage, such as ``data:2/-``; '' for single ranks.
        accumulated: minibatches that each replica takes before the replicas sum their gradients.
    """

    schedule: str
    microbatches: int
    depth_mode: str
    update_delay: int
    shape: str
    config: str = ""
    least_s: float = 0.0
    period_s: float | None = None
    bubble: float | None = None
    samples_per_update: int | None = None
    peak_bytes: int = 0
    why: str = ""
    mesh: str = ""
    fixed_s: float = 0.0
    accumulated: int = 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of each stage; () without a plan."""
        return tuple(int(part.partition("x")[0]) for part in self.config.split("-")) if self.config else ()

    @property
    def seconds(self) -> float:
        """`period_s`, or infinite."""
        return inf if self.period_s is None else self.period_s

    @property
    def is_data_parallel(self) -> bool:
        return len(self.replicas) == 1 and self.replicas != (1,) and not self.is_meshed

    @property
    def is_meshed(self) -> bool:
        return any(mesh.dimensions for mesh in meshes_of(self.mesh))

    @property
    def kind(self) -> str:
        """One of `KINDS`: stages, replicas, ranks of a mesh, or several of them; '' if there is no plan."""
        uses = [len(self.replicas) > 1, max(self.replicas, default=1) > 1, self.is_meshed]
        if not self.config:
            return ""
        return "mixed" if sum(uses) > 1 else dict(zip(uses, KINDS, strict=False)).get(True, "one rank")

    @property
    def words(self) -> str:
        """The plan in words, without its method."""
        on = f" on the mesh {', '.join(dict.fromkeys(self.mesh.split('/')))}" if self.is_meshed else ""
        if self.replicas == (1,):
            return f"one worker{on}"
        if len(self.replicas) == 1:
            shared = f", accumulating {self.accumulated}" if self.accumulated > 1 else ""
            shared = ", sharing each minibatch" if self.microbatches > 1 else shared
            return f"data parallelism {shorten(self.config)}{on}" if on else f"DDP on {self.config} workers{shared}"
        if set(self.replicas) == {1} and not on:
            return f"a straight pipeline of {len(self.replicas)} stages"
        return f"the pipeline {shorten(self.config)}{on}"

    def __str__(self) -> str:
        parts = f", m = {self.microbatches}" if self.microbatches > 1 else ""
        return (
            f"{self.schedule} on {self.config or self.shape}{f' ({self.mesh})' if self.mesh else ''}{parts}, "
            f"{self.depth_mode}"
            f"{', update delay 1' if self.update_delay else ''}"
        )


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """The best plan, and what it was compared with.

    Attributes:
        candidates: plans that could be chosen: the simulated ones first, by increasing period.
        references: plans that could not, because another shape or method was asked for, or because it has another
            number of samples per update.
        exact: the same without approximation, if the plan approximates them because it was allowed to.
        too_large: a faster plan that does not fit the memory.
        averaged: the text of `sums`, and the row, of copies that average their weights, where these take far less time.
        doubt: why the seconds of the profile decide nothing; '' if they do.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    references: tuple[Candidate, ...] = ()
    exact: Comparison | None = None
    too_large: Candidate | None = None
    averaged: tuple[str, Candidate] | None = None
    doubt: str = ""

    @property
    def verdict(self) -> str:
        """The way to use, in a sentence."""
        if self.doubt:
            return f"none, as {self.doubt}"
        if self.exact is None:
            return self._recommend() + self._describe_averaged()
        how = self.plan.choices.approximations
        return f"{self._recommend()} (approximate: {how}); without approximation {self.exact.verdict}"

    def _recommend(self) -> str:
        """Compares the plan with the references that have its method, or as many samples per update."""
        chosen = self.candidates[0]
        if chosen.period_s is None:
            return f"use {chosen.words} as planned; it was not simulated: {chosen.why}"
        rivals = [
            reference
            for reference in self.references
            if reference.samples_per_update == chosen.samples_per_update
            or (reference.schedule == chosen.schedule and reference.accumulated == 1)
        ]
        best = min((chosen, *rivals), key=lambda candidate: candidate.seconds)
        best = best if best.seconds < chosen.seconds * (1 - _TIE) else chosen
        method = "" if len(best.replicas) == 1 else f" with {best.schedule}"
        if best is chosen and not self.plan.choices.sums.is_exact:
            method += f" with sums={self.plan.choices.sums} (approximate)"
        others = self._describe_others(best)
        if (large := self.too_large) is not None and large.seconds < best.seconds * (1 - _TIE):
            others += f"; {large.words} would take {format_seconds(large.seconds)}{self._format_update(large)}, but "
            others += f"does not fit: its fullest worker needs {format_bytes(large.peak_bytes)}"
        return f"use {best.words}{method}: {self._format_seconds(best)}{others}"

    def _describe_averaged(self) -> str:
        if self.averaged is None:
            return ""
        sums, candidate = self.averaged
        return (
            f"; if replicas may differ between averages (approximate), sums={sums} on {candidate.config} workers takes "
            f"{format_seconds(candidate.seconds)}"
        )

    def fastest_in_words(self) -> str:
        """Says how the plan was chosen."""
        best = self.candidates[0]
        count = sum(bool(candidate.config) for candidate in self.candidates)  # some were compared by their bound only
        fastest = f"the fastest of {count} plans" if count > 1 else "the only plan compared"
        return f"{fastest}, {self._format_seconds(best)}{self._describe_others(best)}"

    def kinds(self) -> dict[str, Candidate | None]:
        """Returns the fastest candidate of each of `KINDS`; None if there is none."""
        fastest = {candidate.kind: candidate for candidate in reversed(self.candidates)}
        return {kind: fastest.get(kind) for kind in KINDS}

    def kinds_in_words(self) -> str:
        """Says why the plan is of its kind: the seconds of the best of each."""
        chosen = self.candidates[0]
        others = "; ".join(
            f"{kind}: no plan" if candidate is None else f"{kind}: {candidate.words}, {_describe_seconds(candidate)}"
            for kind, candidate in self.kinds().items()
            if candidate is not chosen
        )
        fastest = f"{chosen.words} is the fastest of all kinds that fit, {_describe_seconds(chosen)}"
        return f"{chosen.kind}, because {fastest} ({others})"

    def _format_seconds(self, candidate: Candidate) -> str:
        samples = f" of {self.plan.batch} samples" if self.plan.batch > 1 else ""
        return f"{format_seconds(candidate.seconds)} per minibatch{samples}{self._format_update(candidate)}"

    def _format_update(self, candidate: Candidate) -> str:
        return f" ({candidate.samples_per_update} samples per update)" if self.plan.batch > 1 else ""

    def _describe_others(self, best: Candidate) -> str:
        shown, parts = {(best.config, best.samples_per_update)}, [""]
        for candidate in (self.candidates[0], *self._pick_best_of_kinds(), *self.references):
            if candidate.period_s is not None and (candidate.config, candidate.samples_per_update) not in shown:
                shown.add((candidate.config, candidate.samples_per_update))
                parts.append(
                    f"{candidate.words} takes {format_seconds(candidate.period_s)}{self._format_update(candidate)}"
                )
        return "; ".join(parts)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each candidate, then for each reference."""
        return [asdict(candidate) for candidate in (*self.candidates, *self.references)]

    def keep_best(self) -> Comparison:
        """Returns the best candidates only, with data parallelism and one worker, or why they cannot be used."""
        best = {*self.candidates[:1], *self._pick_best_of_kinds()}
        shown = [candidate for candidate in self.candidates if candidate in best or candidate.period_s is not None]
        shown = [candidate for number, candidate in enumerate(shown) if candidate in best or number < _FEW_ROWS]
        references = (replace(reference, why=reference.why.partition(";")[0]) for reference in self.references)
        return replace(self, candidates=tuple(shown), references=tuple(references))

    def _pick_best_of_kinds(self) -> list[Candidate]:
        """Returns the best pipeline, the best data parallelism, and one worker."""
        kinds = [
            lambda candidate: len(candidate.replicas) > 1,
            lambda candidate: candidate.is_data_parallel,
            lambda candidate: candidate.replicas == (1,),
        ]
        best = (next(filter(kind, self.candidates), None) for kind in kinds)
        return [candidate for candidate in best if candidate is not None]

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.candidates)} candidates, the best is {self.candidates[0]}>"

    def __str__(self) -> str:
        shown = [candidate for candidate in (*self.candidates, *self.references) if candidate.period_s is not None]
        columns = self._list_columns(shown)
        head = "  ".join(f"{name:{spec}}" for name, spec, _ in columns)
        rows, reference_rows = (
            [
                "  ".join([*(f"{cell(first):{spec}}" for _, spec, cell in columns), *_name_equals(first, equals)])
                for first, *equals in _group_equals(candidates)
            ]
            for candidates in (self.candidates, self.references)
        )
        unsimulated = [candidate for candidate in self.candidates if candidate.period_s is None]
        slower_count = sum(bool(candidate.config) for candidate in unsimulated)
        names = {"1": "one worker", "data-parallel": f"DDP on {self.plan.cluster.workers} workers"}
        footer = [
            f"{names[reference.shape]}: {reference.why}" for reference in self.references if reference.period_s is None
        ]
        footer += [f"{slower_count} more cannot be faster than the best of their kind"] if slower_count else []
        reasons = Counter(candidate.why for candidate in unsimulated if not candidate.config)
        footer += [f"{count} more cannot be used: {why}" for why, count in reasons.most_common(_FEW_ROWS)]
        return "\n".join([head, *rows, *(["for comparison:", *reference_rows] if reference_rows else []), *footer])

    def _list_columns(self, shown: Sequence[Candidate]) -> list[tuple[str, str, Callable[[Candidate], Any]]]:
        """Returns name, format and cell of each column."""
        width = max([12, *(len(_format_plan(candidate)) for candidate in shown if candidate.is_meshed)])
        columns: list[tuple[str, str, Callable[[Candidate], Any]]] = [
            ("method", "<24", lambda candidate: candidate.schedule),
            ("plan", f"<{width}", _format_plan),
            ("m", ">4", lambda candidate: candidate.microbatches),
            ("depth", "<5", lambda candidate: candidate.depth_mode),
            ("delay", ">5", lambda candidate: candidate.update_delay),
            ("minibatch", ">10", lambda candidate: format_seconds(candidate.period_s or 0.0)),
            ("samples/s", ">9", lambda c: format_number(self.plan.batch / c.period_s if c.period_s else inf)),
            ("samples/update", ">14", lambda candidate: candidate.samples_per_update or 0),
            ("bubble", ">6", lambda candidate: f"{max(candidate.bubble or 0.0, 0.0):.1%}"),
            ("peak", ">9", lambda candidate: format_bytes(candidate.peak_bytes)),
        ]
        ways = {(c.schedule, c.config, c.mesh, c.microbatches, c.depth_mode, c.update_delay) for c in shown}
        if len(ways) < len(shown):
            columns.append(("search", "", lambda candidate: candidate.shape))
        if any(candidate.fixed_s for candidate in shown):
            columns.insert(6, ("fixed", ">9", lambda candidate: format_seconds(candidate.fixed_s)))
        return columns


def _group_equals(candidates: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    """Returns the simulated candidates, those together that are the same plan under several methods or searches."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        if candidate.period_s is not None:
            figures = candidate.period_s, candidate.bubble, candidate.samples_per_update, candidate.peak_bytes
            groups.setdefault((candidate.config, candidate.mesh, candidate.microbatches, *figures), []).append(
                candidate
            )
    return groups.values()


def _name_equals(first: Candidate, equals: Iterable[Candidate]) -> list[str]:
    names = dict.fromkeys(candidate.schedule for candidate in equals if candidate.schedule != first.schedule)
    return [f"also: {', '.join(names)}"] if names else []


def compare_by_simulation(
    planned: Iterable[tuple[Candidate, Plan]],
    score: Callable[[Plan], Score],
    refused: Iterable[Candidate] = (),
    rival_s: float = inf,
) -> Comparison:
    """Simulates what may be the fastest, and compares it.

    Ties go to fewer bytes on the fullest worker, then to what comes first.

    Args:
        planned: candidates with their bounds, and their plans.
        score: simulates a plan with its method and microbatches; may raise a PipelineError.
        refused: candidates without a plan.
        rival_s: seconds per minibatch of a plan that was simulated elsewhere. If no candidate can be as fast, none is
            simulated, and the first says why.

    Raises:
        PlanError: no candidate works.
    """
    simulated: list[tuple[float, int, int, Candidate, Plan]] = []
    slower: list[tuple[Candidate, Plan]] = []
    refused, fastest_s = list(refused), {"pipeline": rival_s}
    for number, (candidate, plan) in sorted(enumerate(planned), key=lambda row: (row[1][0].least_s, row[0])):
        rival_kind = candidate.kind if len(candidate.replicas) == 1 else "pipeline"
        if candidate.least_s > fastest_s.get(rival_kind, inf) * (1 + _TIE):
            why = f"cannot take less than {format_seconds(candidate.least_s)}"
            slower.append((replace(candidate, why=why), plan))
            continue
        try:
            result = score(plan)
        except PipelineError as error:
            refused.append(replace(candidate, config="", why=str(error)))
            continue
        fastest_s[rival_kind] = min(fastest_s.get(rival_kind, inf), result.period_s)
        simulated.append((result.period_s, candidate.peak_bytes, number, with_score(candidate, result), plan))
    unsimulated = (*(candidate for candidate, _ in slower), *refused)
    if not simulated and slower:
        return Comparison(slower[0][1], unsimulated)
    if not simulated:
        raise PlanError(f"{len(refused)} ways were tried, the first, {refused[0]}: {refused[0].why}")
    equal_s = min(row[0] for row in simulated) * (1 + _TIE)
    simulated.sort(key=lambda row: (max(row[0], equal_s), row[1:3]))
    return Comparison(simulated[0][4], (*(row[3] for row in simulated), *unsimulated))


def with_score(candidate: Candidate, score: Score) -> Candidate:
    """Returns the candidate with the result of its simulation."""
    return replace(candidate, why="", **vars(score))


def candidate_from_plan(candidate: Candidate, plan: Plan, method: MethodProperties) -> Candidate:
    """Returns the candidate with its plan's config, bound and bytes."""
    peak_bytes = max(stage.peak_bytes for stage in plan.stages)
    fixed_s = max(
        -(-plan.microbatches // site.replicas) * stage.fixed_s / site.speed
        for stage, site in zip(plan.stages, plan.costs.sites, strict=True)
    )
    return replace(
        candidate, config=plan.config, least_s=_compute_least_s(plan, method), peak_bytes=peak_bytes, fixed_s=fixed_s
    )


def _compute_least_s(plan: Plan, method: MethodProperties) -> float:
    """Returns the lower bound of the module docstring."""
    m, stages, sites = plan.microbatches, plan.stages, plan.costs.sites
    if plan.runtime.overlap_device:  # each op then hides a different part of what the runtime adds
        plan = replace(plan, runtime=RuntimeCosts())
    tied_sums, runtime, messages_s = plan.costs.tied_s, plan.costs.runtime_s, _list_message_seconds(plan)
    if not method.flushes:
        rows = zip(stages, sites, tied_sums, runtime, plan.update_delay, strict=True)
        trips_s = _list_round_trips(plan, messages_s) if method.uses_depth else []
        return max(
            *trips_s,
            *(
                ((stage.compute_s + (m - 1) * stage.fixed_s + extra_s) / site.speed + sum_s) / site.replicas
                for stage, site, tied_s, runtime_s, update_delay in rows
                for extra_s, sum_s in (
                    (tied_s, 0.0 if update_delay else float(site.sum_s(stage.trained_bytes, stage.redone_s))),
                    (runtime_s, 0.0),  # what the runtime adds may hide the sum, with its latency
                )
            ),
        )
    passes_s = [stage.forward_s + stage.redone_s + (m - 1) * stage.fixed_s for stage in stages]
    last_backward_s = [(stage.redone_s + (m - 1) * (stage.fixed_s - stage.forward_fixed_s)) / m for stage in stages]
    fastest = [max(plan.costs.cluster.speeds[worker] for worker in workers) for workers in plan.costs.stage_workers]

    def find_longest(seconds: Iterable[float], more_s: Iterable[float]) -> list[float]:
        # Of unequal replicas the fastest may have the most microbatches; the slowest has its share on average.
        return [
            max((-(-m // site.replicas) / m * a + b) / speed, (a / site.replicas + b) / site.speed)
            for a, b, site, speed in zip(seconds, more_s, sites, fastest, strict=True)
        ]

    work_s = find_longest(passes_s, repeat(0.0, len(stages)))
    # A later stage's gradients arrive after one forward and backward of each earlier stage, which recompute meanwhile.
    first_passes_s = (sum(stage.split_s(m)) / speed for stage, speed in zip(stages, fastest, strict=True))
    starts_s = accumulate((a + b for a, b in zip(first_passes_s, messages_s, strict=False)), initial=0.0)
    updates_s = [stage.update_s for stage in stages]
    with_ties_s: list[float] = list(map(add, updates_s, tied_sums))
    sums_s = [
        float(site.sum_s(stage.trained_bytes, backward_s))
        for stage, site, backward_s in zip(stages, sites, last_backward_s, strict=True)
    ]
    own_s: list[float] = [
        *map(add, find_longest(passes_s, with_ties_s), sums_s),
        *find_longest(map(add, passes_s, runtime), updates_s),
    ]
    if method.splits_backward:
        return max(own_s)
    end_s = with_ties_s[0] / fastest[0] + sums_s[0]
    return max(max(a + b for a, b in zip(starts_s, work_s, strict=True)) + end_s, *own_s)


def _list_message_seconds(plan: Plan) -> list[float]:
    """Returns, for each boundary, the least seconds of an activation and its gradient of a microbatch."""
    cluster, workers, boundaries_s = plan.costs.cluster, plan.costs.stage_workers, []
    levels = range(len(cluster.levels))
    for stage, sending, receiving in zip(plan.stages, workers, workers[1:], strict=False):
        sides = [
            [{cluster.component(level, worker) for worker in side} for side in (sending, receiving)] for level in levels
        ]
        crossed = [level for level, (senders, receivers) in enumerate(sides) if not senders & receivers]
        seconds = 0.0
        if crossed:
            size = stage.output_bytes * 2 * plan.costs.message_share / plan.microbatches
            bandwidth_bytes_per_s, latency_s = cluster.link(crossed[-1])
            seconds = size / bandwidth_bytes_per_s + 2 * latency_s
        boundaries_s.append(seconds)
    return boundaries_s


def _list_round_trips(plan: Plan, messages_s: Sequence[float]) -> list[float]:
    """Returns, for each stage, the least seconds per minibatch by the microbatches that it holds at once.

    Only the last stage cannot recompute while it waits for gradients.
    """
    m, speeds, trip_s, trips_s = plan.microbatches, plan.costs.cluster.speeds, 0.0, []
    for s in reversed(range(len(plan.stages))):
        forward_s, backward_s = plan.stages[s].split_s(m)
        passes_s = backward_s + forward_s * (1 + (plan.stages[s].recompute and s == len(plan.stages) - 1))
        trip_s += passes_s / max(speeds[worker] for worker in plan.costs.stage_workers[s]) + sum(messages_s[s : s + 1])
        trips_s.append(MEASURED_SHARE * m * trip_s / (plan.replicas[s] * (plan.in_flight[s] + plan.update_delay[s])))
    return trips_s


def _format_plan(candidate: Candidate) -> str:
    meshes = list(dict.fromkeys(candidate.mesh.split("/"))) if candidate.is_meshed else []
    accumulating = [f"acc. {candidate.accumulated}"] if candidate.accumulated > 1 else []
    return " ".join([shorten(candidate.config), *([shorten(" ".join(meshes))] if meshes else []), *accumulating])


def _describe_seconds(candidate: Candidate) -> str:
    least = f"at least {format_seconds(candidate.least_s)}"
    return least if candidate.period_s is None else format_seconds(candidate.period_s)

"""Proves a program before it runs: checks every rule on finite runs that represent all (docs/architecture.md).

One run is a single minibatch. The others have the warm-up, as many microbatches as the deepest ring and the oldest
version in use reach back, two periods, and a drain that begins at each residue of the period.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from pipedream.core.errors import ScheduleError
from pipedream.core.extensions import find_offer
from pipedream.core.garbage import pause_collection
from pipedream.core.schedule.op import Kind, Op, find_last_kind
from pipedream.core.schedule.program import Channel, Program
from pipedream.core.tabular import Tabular
from pipedream.verifier.unrolled import Unrolled, check_assumptions, unroll
from pipedream.verifier.waits import check_waits

_MAX_INSTRUCTIONS = 60_000  # of all runs that are checked, which limits the seconds of a proof


@dataclass(frozen=True, repr=False)
class Proof(Tabular):
    """The proof of a program.

    Attributes:
        microbatches: m, of a minibatch.
        residues: number of points of a period at which a drain may begin; not all are checked if replica counts have a
            large common multiple.
        peak_in_flight, peak_versions: for each rank, the most microbatches in flight, and sets of weights at once.
        stage_in_flight, stage_versions: the same for each of its stages, which need not peak together.
        staleness, mean_staleness: of each stage's gradients, in updates.
        remote_forwards: for each rank, the stages whose forwards there copy the weights; they count in its peaks.
    """

    schedule: str
    config: str
    microbatches: int
    totals: tuple[int, ...]
    residues: int
    stage_replicas: tuple[tuple[tuple[int, int], ...], ...]
    peak_in_flight: tuple[int, ...]
    peak_versions: tuple[int, ...]
    stage_in_flight: tuple[tuple[int, ...], ...]
    stage_versions: tuple[tuple[int, ...], ...]
    staleness: tuple[int, ...]
    mean_staleness: tuple[float, ...]
    remote_forwards: tuple[tuple[int, ...], ...] = ()

    @property
    def staleness_note(self) -> str:
        """Says how stale gradients are, and names a method without staleness; '' if none is stale."""
        most = max(self.staleness)
        words = f"gradients are stale by up to {most} update{'s' if most > 1 else ''}"
        return f"{self.schedule}: {words}; the schedule 1f1b trains as one process does" if most else ""

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each stage of each rank."""
        return [
            {
                "rank": rank,
                "stage": stage,
                "in_flight": self.stage_in_flight[rank][i],
                "versions": self.stage_versions[rank][i],
                "staleness": self.staleness[stage],
                "mean_staleness": self.mean_staleness[stage],
            }
            for rank, stage_replicas in enumerate(self.stage_replicas)
            for i, (stage, _) in enumerate(stage_replicas)
        ]

    def __str__(self) -> str:
        totals = ", ".join(map(str, self.totals[:6])) + (", ..." if len(self.totals) > 6 else "")
        drain_count = len(self.totals) - 1
        coverage = (
            "end at every point of a period"
            if drain_count == self.residues
            else f"end at {drain_count} of the {self.residues} points of a period"
        )
        split = f", m = {self.microbatches}" if self.microbatches > 1 else ""
        # The mean is lower where an update holds several microbatches.
        has_means = any(abs(mean - late) > 1e-9 for mean, late in zip(self.mean_staleness, self.staleness, strict=True))
        rows = [
            f"Proof of {self.schedule}, plan {self.config}{split}: "
            "each op once and in order, no deadlock, versions kept",
            f"proved for runs of {totals} microbatches, which {coverage}",
            self._format_row("rank", "stages", "in flight", "versions", "staleness", "mean" if has_means else ""),
        ]
        for rank, stage_replicas in enumerate(self.stage_replicas):
            staleness = [self.staleness[stage] for stage, _ in stage_replicas]
            means = [f"{self.mean_staleness[stage]:.3g}" if has_means else "" for stage, _ in stage_replicas]
            names = [str(stage) for stage, _ in stage_replicas]
            several_stages = len(stage_replicas) > 1
            peaks = self.peak_in_flight[rank], self.peak_versions[rank]
            rows.append(
                self._format_row(rank, ",".join(names), *peaks, max(staleness), "" if several_stages else means[0])
            )
            if several_stages:
                counts_by_stage = zip(self.stage_in_flight[rank], self.stage_versions[rank], staleness, strict=True)
                lines = zip(names, counts_by_stage, means, strict=True)
                rows += [self._format_row("", f". {name}", *counts, mean) for name, counts, mean in lines]
            if self.remote_forwards and self.remote_forwards[rank]:
                rows.append(f"{'':>4}  + forwards of {', '.join(map(str, self.remote_forwards[rank]))} on copies")
        return "\n".join(rows)

    @staticmethod
    def _format_row(
        rank: object, stages: str, in_flight: object, versions: object, staleness: object, mean: str
    ) -> str:
        row = f"{rank:>4}  {stages:<8}  {in_flight:>9}  {versions:>8}  {staleness:>9}"
        return f"{row}  {mean:>5}" if mean else row


def verify(program: Program, *, lanes: Callable[[Channel], Hashable] | None = None) -> Proof:
    """Proves that a program keeps the rules and cannot deadlock.

    Args:
        lanes: channel -> what it shares with others in issue order, such as an NCCL communicator; None for a lane of
            its own.

    Raises:
        ScheduleError: a rule is broken; names the rank, the instruction and the rule.
        DeadlockError: ranks would wait for each other for ever; names the cycle.
    """
    totals, residues = _choose_totals(program)
    _check_reach(program, totals[-1])
    ranks = range(program.placement.workers)
    peaks = [[(0, 0)] * (1 + len(program.placement.stage_replicas(rank))) for rank in ranks]
    with pause_collection():
        for total in totals:
            run = unroll(program, total)
            check_assumptions(run)
            check_waits(run, lanes)
            for rank in ranks:
                pairs = zip(peaks[rank], _find_peaks(run, rank), strict=True)
                peaks[rank] = [(max(a, c), max(b, d)) for (a, b), (c, d) in pairs]
    return Proof(
        schedule=program.name,
        config=program.plan.config,
        microbatches=program.microbatches,
        totals=totals,
        residues=residues,
        stage_replicas=tuple(program.placement.stage_replicas(rank) for rank in range(program.placement.workers)),
        peak_in_flight=tuple(rank[0][0] for rank in peaks),
        peak_versions=tuple(rank[0][1] for rank in peaks),
        stage_in_flight=tuple(tuple(in_flight for in_flight, _ in rank[1:]) for rank in peaks),
        stage_versions=tuple(tuple(count for _, count in rank[1:]) for rank in peaks),
        staleness=tuple(_compute_staleness(program, stage, totals[-1]) for stage in range(program.placement.stages)),
        mean_staleness=tuple(
            program.weights.mean_staleness(stage) if program.trains else 0.0
            for stage in range(program.placement.stages)
        ),
        remote_forwards=tuple(
            tuple(stage for stage, _ in program.placement.passes_on_copies(rank, forward=True)) for rank in ranks
        ),
    )


def _choose_totals(program: Program) -> tuple[tuple[int, ...], int]:
    cycle, m = program.cycle, program.microbatches
    replicas = program.placement.replicas
    warmup = 1 + max(
        [item.index for rank in program.ranks for item in rank.warmup if item.kind is Kind.FORWARD], default=-1
    )
    reach = max([c.depth * lcm(replicas[c.source], replicas[c.target]) for c in program.channels], default=0)
    # The first version that is read late is made after the warm-up, and dropped as late after its last reader. How late
    # that is shows in a run of this length.
    steady = (ceil((2 * warmup + reach) / cycle) + 2) * cycle
    late_microbatches = max(
        _compute_staleness(program, stage, steady) * count for stage, count in enumerate(program.updates.per_update)
    )
    steady = (ceil((warmup + max(warmup, late_microbatches) + reach) / cycle) + 2) * cycle
    residues = cycle // m
    per_microbatch = max(1, sum(len(rank.period) for rank in program.ranks) // cycle)
    affordable = max(2, _MAX_INSTRUCTIONS // (steady * per_microbatch))  # at least the first residue and the last
    count = min(residues, affordable)
    chosen_residues = sorted({round(i * (residues - 1) / max(1, count - 1)) for i in range(count)})
    return (m, *(steady + residue * m for residue in chosen_residues)), residues


def _check_reach(program: Program, total: int) -> None:
    exists = program.exists(total)
    for rank, rank_program in enumerate(program.ranks):
        for item in (*rank_program.warmup, *rank_program.period):
            if not exists(item):
                raise ScheduleError(
                    f"program {program.name!r}: rank {rank} has the instruction {item}, but does not reach it within "
                    f"{total} microbatches; fix the schedule's order or its lowering"
                )


def _find_peaks(run: Unrolled, rank: int) -> list[tuple[int, int]]:
    """Returns the most microbatches in flight and versions at once, for a rank, then for each of its stages.

    A version exists until its last reader (`WeightRule.held_until`), and at least until the next update, which may
    reuse its storage. A kept prediction is a separate set.
    """
    program = run.program
    stage_replicas = program.placement.stage_replicas(rank)
    if not program.trains:
        return [
            (0, len(stage_replicas) + len(program.placement.passes_on_copies(rank, forward=True))),
            *[(0, 1)] * len(stage_replicas),
        ]
    all_pass_spans: list[tuple[int, int]] = []
    all_version_spans: list[tuple[int, int]] = []
    peaks: list[tuple[int, int]] = []
    last_kind = find_last_kind(program.kinds)
    for stage, replica in stage_replicas:
        version_spans = list(_find_version_spans(run, stage, replica))
        allowed = program.weights.versions(stage)
        versions, position = _find_peak(version_spans)
        if versions > allowed:
            raise run.error(
                rank,
                position,
                f"{versions} versions of stage {stage}'s weights exist at once, its weight rule "
                f"{program.weights.name!r} keeps {allowed}",
            )
        microbatches = range(replica, run.total, program.placement.replicas[stage])
        pass_spans = [
            (
                _find_start(run, stage, replica, k),
                # If only the backward is here, it is a span of one instruction.
                run.ops[Op(last_kind, stage, k, replica)][1] + program.placement.runs_backward_elsewhere(stage),
            )
            for k in (
                () if stage in program.fetched_gradients else microbatches
            )  # else all passes are on copies, below
        ]
        peaks.append((_find_peak(pass_spans)[0], versions))
        all_version_spans += version_spans
        all_pass_spans += pass_spans
    if program.placement.shares_weights:
        copied_passes = find_offer("copied_passes", f"{program.name!r} shares weights between ranks")
        for input_spans, weight_span in copied_passes.iterate_spans(run, rank):
            all_pass_spans += input_spans
            all_version_spans.append(weight_span)
    return [(_find_peak(all_pass_spans)[0], _find_peak(all_version_spans)[0]), *peaks]


def _find_start(run: Unrolled, stage: int, replica: int, k: int) -> int:
    """Returns the position of a microbatch's forward, or of its backward if only that runs on this rank."""
    kind = Kind.BACKWARD if run.program.placement.runs_backward_elsewhere(stage) else Kind.FORWARD
    return run.ops[Op(kind, stage, k, replica)][1]


def _find_version_spans(run: Unrolled, stage: int, replica: int) -> Iterable[tuple[int, int]]:
    program, ops = run.program, run.ops
    starts = [-1] + [
        ops[Op(Kind.UPDATE, stage, n, replica)][1] for n in range(1, program.updates.updates(stage, run.total) + 1)
    ]
    ends = [*starts[1:], len(run.streams[program.placement.ranks[stage][replica]])]
    last_kind = find_last_kind(program.kinds)
    if stage in program.fetched_gradients:  # the passes copy; their last reader's update follows them
        for k in range(run.total):
            version = program.weights.forward_version(stage, k)
            update = program.updates.update_of(stage, k)
            ends[version] = max(ends[version], starts[update])
        return zip(starts, ends, strict=True)
    prediction_until = program.weights.kept_until(stage)
    predictions: dict[int, tuple[int, int]] = {}
    for k in range(replica, run.total, program.placement.replicas[stage]):
        version = program.weights.forward_version(stage, k)
        backward_version = program.weights.backward_version(stage, k)
        begin, end = _find_start(run, stage, replica, k), ops[Op(last_kind, stage, k, replica)][1]
        if prediction_until is None:
            ends[version] = max(ends[version], end if program.weights.held_until is Kind.BACKWARD else begin)
        else:  # only the first forward reads the version
            first, _ = predictions.get(version, (begin, begin))
            predictions[version] = first, begin + 1 if prediction_until is Kind.FORWARD else end
            ends[version] = max(ends[version], first)
        if prediction_until is not Kind.BACKWARD:  # else the backward reads the prediction, too
            ends[backward_version] = max(ends[backward_version], end)
    return (*zip(starts, ends, strict=True), *predictions.values())


def _find_peak(spans: list[tuple[int, int]]) -> tuple[int, int]:
    """Returns the most half-open spans that overlap, and where."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    peak = peak_position = count = 0
    for position, change in changes:
        count += change
        if count > peak:
            peak, peak_position = count, position
    return peak, max(peak_position, 0)  # the first version begins at -1, before any instruction


def _compute_staleness(program: Program, stage: int, total: int) -> int:
    if not program.trains:
        return 0
    updates, weights = program.updates, program.weights
    return max(updates.update_of(stage, k) - 1 - weights.forward_version(stage, k) for k in range(total))

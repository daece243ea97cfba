"""Verify, then run: every rule is checked on finite runs that represent all (docs/architecture.md).

One run is a single minibatch. The others have the warm-up, as many microbatches as the deepest ring and the oldest
version in use reach back, two periods, and a drain that begins at each residue of the period.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

from pipedream.core.display import Tabular
from pipedream.core.errors import ScheduleError
from pipedream.core.schedule.op import Kind, Op, find_last_kind
from pipedream.core.schedule.program import Channel, Program
from pipedream.verifier.unrolled import Unrolled, check_assumptions, remote_spans, unroll
from pipedream.verifier.waits import check_waits

_MOST_INSTRUCTIONS = 60_000


@dataclass(frozen=True, repr=False)
class Proof(Tabular):
    """The proof of a program.

    Attributes:
        microbatches: m, of a minibatch.
        residues: at which a drain may begin; not all are checked if replica counts have a large common multiple.
        peak_in_flight, peak_versions: for each rank, the most microbatches in flight and sets of weights alive.
        stage_in_flight, stage_versions: the same for each of its stages, which need not peak together.
        staleness, mean_staleness: staleness of each stage's gradients, in updates.
        remote_forwards: for each rank, the stages whose forwards alone it runs; they count in its peaks.
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
    def lateness(self) -> str:
        """Says how late gradients are, and which method trains as one process does; '' where they are in time."""
        late = max(self.staleness)
        words = f"gradients are up to {late} update{'s' if late > 1 else ''} late"
        return f"{self.schedule}: {words}; the schedule 1f1b trains as one process does" if late else ""

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
        shown = ", ".join(map(str, self.totals[:6])) + (", ..." if len(self.totals) > 6 else "")
        ends = len(self.totals) - 1
        covered = (
            "end at every point of a period"
            if ends == self.residues
            else f"end at {ends} of the {self.residues} points of a period"
        )
        split = f", m = {self.microbatches}" if self.microbatches > 1 else ""
        # Updates that hold several microbatches divide the delay.
        differ = any(abs(mean - late) > 1e-9 for mean, late in zip(self.mean_staleness, self.staleness, strict=True))
        rows = [
            f"Proof of {self.schedule}, plan {self.config}{split}: "
            "each op once and in order, no deadlock, versions kept",
            f"proved for runs of {shown} microbatches, which {covered}",
            self._format_row("rank", "stages", "in flight", "versions", "staleness", "mean" if differ else ""),
        ]
        for rank, stage_replicas in enumerate(self.stage_replicas):
            late = [self.staleness[stage] for stage, _ in stage_replicas]
            means = [f"{self.mean_staleness[stage]:.3g}" if differ else "" for stage, _ in stage_replicas]
            names = [str(stage) for stage, _ in stage_replicas]
            several = len(stage_replicas) > 1
            peaks = self.peak_in_flight[rank], self.peak_versions[rank]
            rows.append(self._format_row(rank, ",".join(names), *peaks, max(late), "" if several else means[0]))
            if several:
                each = zip(self.stage_in_flight[rank], self.stage_versions[rank], late, strict=True)
                lines = zip(names, each, means, strict=True)
                rows += [self._format_row("", f". {name}", *counts, mean) for name, counts, mean in lines]
            if self.remote_forwards and self.remote_forwards[rank]:
                rows.append(f"{'':>4}  + forwards of {', '.join(map(str, self.remote_forwards[rank]))} of other ranks")
        return "\n".join(rows)

    @staticmethod
    def _format_row(rank: object, stages: str, in_flight: object, versions: object, late: object, mean: str) -> str:
        row = f"{rank:>4}  {stages:<8}  {in_flight:>9}  {versions:>8}  {late:>9}"
        return f"{row}  {mean:>5}" if mean else row


def verify(program: Program, *, lanes: Callable[[Channel], Hashable] | None = None) -> Proof:
    """Proves that a program keeps the rules and cannot deadlock.

    Args:
        lanes: from a channel to what it shares with others in issue order, such as an NCCL communicator;
            None gives each channel its own.

    Raises:
        ScheduleError: a rule is broken; names the rank, the instruction and the rule.
        DeadlockError: ranks would wait for each other for ever; names the cycle.
    """
    totals, residues = _choose_totals(program)
    _check_reach(program, totals[-1])
    ranks = range(program.placement.workers)
    most = [[(0, 0)] * (1 + len(program.placement.stage_replicas(rank))) for rank in ranks]
    for total in totals:
        run = unroll(program, total)
        check_assumptions(run)
        check_waits(run, lanes)
        for rank in ranks:
            pairs = zip(most[rank], _find_peaks(run, rank), strict=True)
            most[rank] = [(max(a, c), max(b, d)) for (a, b), (c, d) in pairs]
    return Proof(
        schedule=program.name,
        config=program.plan.config,
        microbatches=program.microbatches,
        totals=totals,
        residues=residues,
        stage_replicas=tuple(program.placement.stage_replicas(rank) for rank in range(program.placement.workers)),
        peak_in_flight=tuple(rank[0][0] for rank in most),
        peak_versions=tuple(rank[0][1] for rank in most),
        stage_in_flight=tuple(tuple(in_flight for in_flight, _ in rank[1:]) for rank in most),
        stage_versions=tuple(tuple(count for _, count in rank[1:]) for rank in most),
        staleness=tuple(_compute_staleness(program, stage, totals[-1]) for stage in range(program.placement.stages)),
        mean_staleness=tuple(
            0.0 if len(program.kinds) == 1 else program.weights.mean_staleness(stage)
            for stage in range(program.placement.stages)
        ),
        remote_forwards=tuple(tuple(stage for stage, _ in program.placement.remote_forwards(rank)) for rank in ranks),
    )


def _choose_totals(program: Program) -> tuple[tuple[int, ...], int]:
    cycle, m = program.cycle, program.microbatches
    replicas = program.placement.replicas
    warmup = 1 + max(
        [item.index for rank in program.ranks for item in rank.warmup if item.kind is Kind.FORWARD], default=-1
    )
    reach = max([c.depth * lcm(replicas[c.source], replicas[c.target]) for c in program.channels], default=0)
    # The first version read late is made after the warm-up, and dropped equally long after its last reader.
    settled = (ceil((2 * warmup + reach) / cycle) + 2) * cycle
    late = max(
        _compute_staleness(program, stage, settled) * count for stage, count in enumerate(program.updates.per_update)
    )
    settled = (ceil((warmup + max(warmup, late) + reach) / cycle) + 2) * cycle
    residues = cycle // m
    per_microbatch = max(1, sum(len(rank.period) for rank in program.ranks) // cycle)
    affordable = max(2, _MOST_INSTRUCTIONS // (settled * per_microbatch))
    count = min(residues, affordable)
    chosen = sorted({round(i * (residues - 1) / max(1, count - 1)) for i in range(count)})
    return (m, *(settled + residue * m for residue in chosen)), residues


def _check_reach(program: Program, total: int) -> None:
    exists = program.exists(total)
    for rank, mine in enumerate(program.ranks):
        for item in (*mine.warmup, *mine.period):
            if not exists(item):
                raise ScheduleError(
                    f"program {program.name!r}: rank {rank} has the instruction {item}, but does not reach it within "
                    f"{total} microbatches; fix the schedule's order or its lowering"
                )


def _find_peaks(run: Unrolled, rank: int) -> list[tuple[int, int]]:
    """Returns the most microbatches in flight and versions alive, for a rank and then for each of its stages.

    A version lives to its last reader (`WeightRule.held_until`), and at least until the next update, which may reuse
    its storage. A kept prediction is a set of its own.
    """
    program = run.program
    stage_replicas = program.placement.stage_replicas(rank)
    if len(program.kinds) == 1:
        return [
            (0, len(stage_replicas) + len(program.placement.remote_forwards(rank))),
            *[(0, 1)] * len(stage_replicas),
        ]
    in_flight: list[tuple[int, int]] = []
    alive: list[tuple[int, int]] = []
    peaks: list[tuple[int, int]] = []
    last = find_last_kind(program.kinds)
    for stage, replica in stage_replicas:
        lives = list(_find_lives(run, stage, replica))
        allowed = program.weights.versions(stage)
        versions, position = _find_peak(lives)
        if versions > allowed:
            raise run.error(
                rank,
                position,
                f"{versions} versions of stage {stage}'s weights are alive, its weight rule "
                f"{program.weights.name!r} keeps {allowed}",
            )
        open_ = [
            (
                _find_begin(run, stage, replica, k),
                run.ops[Op(last, stage, k, replica)][1] + program.placement.is_remote(stage),
            )
            for k in range(replica, run.total, program.placement.replicas[stage])
        ]
        peaks.append((_find_peak(open_)[0], versions))
        alive += lives
        in_flight += open_
    for kept, fetched in remote_spans(run, rank):
        in_flight += kept
        alive.append(fetched)
    return [(_find_peak(in_flight)[0], _find_peak(alive)[0]), *peaks]


def _find_begin(run: Unrolled, stage: int, replica: int, k: int) -> int:
    """The microbatch's forward, or its backward if only that runs here."""
    kind = Kind.BACKWARD if run.program.placement.is_remote(stage) else Kind.FORWARD
    return run.ops[Op(kind, stage, k, replica)][1]


def _find_lives(run: Unrolled, stage: int, replica: int) -> Iterable[tuple[int, int]]:
    program, ops = run.program, run.ops
    starts = [-1] + [
        ops[Op(Kind.UPDATE, stage, n, replica)][1] for n in range(1, program.updates.updates(stage, run.total) + 1)
    ]
    dies = [*starts[1:], len(run.streams[program.placement.ranks[stage][replica]])]
    last = find_last_kind(program.kinds)
    until = program.weights.kept_until(stage)
    predictions: dict[int, tuple[int, int]] = {}
    for k in range(replica, run.total, program.placement.replicas[stage]):
        first = program.weights.forward_version(stage, k)
        second = program.weights.backward_version(stage, k)
        begin, end = _find_begin(run, stage, replica, k), ops[Op(last, stage, k, replica)][1]
        if until is None:
            dies[first] = max(dies[first], end if program.weights.held_until is Kind.BACKWARD else begin)
        else:  # the first forward alone reads the version
            made_at, _ = predictions.get(first, (begin, begin))
            predictions[first] = made_at, begin + 1 if until is Kind.FORWARD else end
            dies[first] = max(dies[first], made_at)
        if until is not Kind.BACKWARD:
            dies[second] = max(dies[second], end)
    return (*zip(starts, dies, strict=True), *predictions.values())


def _find_peak(spans: list[tuple[int, int]]) -> tuple[int, int]:
    """The most half-open spans that overlap, and where."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    most = where = count = 0
    for position, change in changes:
        count += change
        if count > most:
            most, where = count, position
    return most, max(where, 0)


def _compute_staleness(program: Program, stage: int, total: int) -> int:
    if len(program.kinds) == 1:
        return 0
    updates, weights = program.updates, program.weights
    return max(updates.update_of(stage, k) - 1 - weights.forward_version(stage, k) for k in range(total))

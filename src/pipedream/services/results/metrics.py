"""Metrics of a timeline, simulated or measured: bubble, throughput, in flight, versions, staleness, bytes.

Gaps between spans are allowed.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pipedream.core.artifact import Artifact
from pipedream.core.schedule.timeline import WORK, Span, Timeline
from pipedream.core.tabular import Tabular, align
from pipedream.core.units import format_bytes, format_number, format_seconds

_ENDS = ("B", "W")  # the op with which a stage finishes a microbatch


@dataclass(frozen=True)
class RankMetrics:
    """The work of one rank; None where unknown.

    Attributes:
        busy_s: computing.
        wait_s: waiting for a message or an all-reduce.
        send_s: sending a message.
        peak_in_flight: most microbatches between forward and backward, over its stages; 0 for a run of forwards.
        peak_versions: most weight versions alive at once.
        staleness: the most of any gradient, in updates.
    """

    busy_s: float
    wait_s: float
    send_s: float
    peak_in_flight: int
    peak_versions: int | None = None
    staleness: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, repr=False)
class Metrics(Tabular, Artifact):
    """The metrics of a run, or of a window of it.

    Attributes:
        makespan_s: makespan of the run or the window.
        bubble: idle fraction of the workers' time: 1 - busy / (workers x makespan).
        throughput_per_s: microbatches per second.
        per_rank: peaks are those of the whole run.
    """

    FORMAT = 1

    name: str
    source: str
    makespan_s: float
    bubble: float
    throughput_per_s: float
    samples_per_s: float
    per_rank: tuple[RankMetrics, ...]

    @property
    def busy_shares(self) -> tuple[float, ...]:
        """Each rank's fraction of the time."""
        return tuple(row.busy_s / self.makespan_s if self.makespan_s else 0.0 for row in self.per_rank)

    def rows(self) -> list[dict[str, Any]]:
        return [{"rank": rank} | asdict(row) for rank, row in enumerate(self.per_rank)]

    def __str__(self) -> str:
        head = (
            f"{self.name}, {self.source}: {format_seconds(self.makespan_s)}, bubble {self.bubble:.1%}, "
            f"{format_number(self.throughput_per_s)} microbatches/s, {format_number(self.samples_per_s)} samples/s"
        )
        rows: list[tuple[str, ...]] = [
            ("rank", "busy", "share", "waits", "sends", "in flight", "versions", "staleness", "peak")
        ]
        for rank, (row, share) in enumerate(zip(self.per_rank, self.busy_shares, strict=True)):
            peak = "-" if row.peak_bytes is None else format_bytes(row.peak_bytes)
            busy, waits, sends = map(format_seconds, (row.busy_s, row.wait_s, row.send_s))
            counts = map(format_number, (row.peak_in_flight, row.peak_versions, row.staleness))
            rows.append((str(rank), busy, f"{share:.1%}", waits, sends, *counts, peak))
        return f"{head}\n{align(rows, 'r')}"


def run_metrics(timeline: Timeline) -> Metrics:
    """Returns the metrics of a whole run, including warm-up and drain."""
    start_s = min((span.start_s for span in timeline.spans), default=0.0)
    makespan_s = timeline.makespan_s
    rate = timeline.microbatches / makespan_s if makespan_s else 0.0
    return _measure(timeline, start_s, start_s + makespan_s, rate)


def steady_metrics(timeline: Timeline, *, skip: int = 0) -> Metrics:
    """Returns the metrics of a run without warm-up and drain (`steady_window`).

    Throughput counts the microbatches between the ends of the input stage's first and last backwards in the window.

    Raises:
        ValueError: the run is too short.
    """
    start_s, end_s = steady_window(timeline, skip=skip)
    ends = sorted(
        span.end_s
        for span in timeline.spans
        if span.stage == 0 and span.kind in _ENDS and start_s <= span.end_s <= end_s
    )
    covered_s = ends[-1] - ends[0] if ends else 0.0
    finished = sum(end > ends[0] for end in ends)
    return _measure(timeline, start_s, end_s, finished / covered_s if covered_s else 0.0)


def steady_window(timeline: Timeline, *, skip: int = 0) -> tuple[float, float]:
    """Returns start and end of a run's steady part, in seconds.

    It begins when every worker of the input stage has finished its first backward (the pipeline is full), and ends when
    the first of them finishes its last forward (it begins to drain).

    Args:
        skip: further backwards of the input stage to leave out, if replicas or messages take longer to become regular.

    Raises:
        ValueError: the run is too short, or has no backwards.
    """
    first_backward: dict[int, float] = {}
    last_forward: dict[int, float] = {}
    ends = []
    for span in timeline.spans:
        if span.stage == 0 and span.kind == "F":
            last_forward[span.rank] = max(span.end_s, last_forward.get(span.rank, span.end_s))
        elif span.stage == 0 and span.kind in _ENDS:
            first_backward[span.rank] = min(span.end_s, first_backward.get(span.rank, span.end_s))
            ends.append(span.end_s)
    ends.sort()
    full_s = max(first_backward.values(), default=0.0)
    start_s = max(ends[skip], full_s) if skip < len(ends) else float("inf")
    end_s = min(last_forward.values(), default=0.0)
    if start_s >= end_s:
        raise ValueError(
            f"a steady part beyond {skip + 1} backwards of the input stage was asked for, but this run of "
            f"{timeline.microbatches} microbatches drains earlier; run more microbatches or skip fewer"
        )
    return start_s, end_s


def in_flight(timeline: Timeline, rank: int) -> int:
    """Returns the most microbatches of a rank between forward and backward, over its stages.

    A split backward ends with its weight gradient. A run of forwards only has none. If the backward is on another rank,
    that rank holds one microbatch while it runs; the rank of the forward holds a minibatch's until its next minibatch
    there, because the timeline does not show when they are fetched.
    """
    return _count_in_flight(timeline.of_rank(rank), timeline, _find_apart(timeline))


def staleness(timeline: Timeline, stage: int) -> int:
    """Returns the greatest staleness of a stage's gradients, in updates.

    The first gradients of a run are never staler than the steady state's.

    Raises:
        ValueError: the timeline has no gradient versions of this stage.
    """
    of_gradients = [versions.staleness for versions in timeline.gradient_versions if versions.stage == stage]
    if not of_gradients:
        raise ValueError(
            f"staleness of stage {stage} was asked for, the timeline of {timeline.name} has no gradient versions of it"
        )
    return max(of_gradients)


def _measure(timeline: Timeline, start_s: float, end_s: float, throughput_per_s: float) -> Metrics:
    by_rank: list[list[Span]] = [[] for _ in range(timeline.workers)]
    for span in timeline.spans:
        by_rank[span.rank].append(span)
    stalest: dict[int, int] = {}
    for tag in timeline.gradient_versions:
        stalest[tag.stage] = max(tag.staleness, stalest.get(tag.stage, 0))
    apart = _find_apart(timeline)
    rows = []
    for rank, spans in enumerate(by_rank):
        stages = {span.stage for span in spans if span.kind in WORK}
        rows.append(
            RankMetrics(
                busy_s=_sum_seconds((s for s in spans if s.kind in WORK), start_s, end_s),
                wait_s=_sum_seconds((s for s in spans if s.kind == "wait"), start_s, end_s),
                send_s=_sum_seconds((s for s in spans if s.kind == "send"), start_s, end_s),
                peak_in_flight=_count_in_flight(spans, timeline, apart),
                peak_versions=timeline.peak_versions[rank] if timeline.peak_versions else None,
                staleness=max((stalest[s] for s in stages if s in stalest), default=None),
                peak_bytes=timeline.peak_bytes[rank] if timeline.peak_bytes and not timeline.shares_memory else None,
            )
        )
    length_s = end_s - start_s
    busy_s = sum(row.busy_s for row in rows)
    return Metrics(
        name=timeline.name,
        source=timeline.source,
        makespan_s=length_s,
        bubble=1 - busy_s / (timeline.workers * length_s) if length_s else 0.0,
        throughput_per_s=throughput_per_s,
        samples_per_s=throughput_per_s * timeline.batch / timeline.minibatch_microbatches,
        per_rank=tuple(rows),
    )


def _sum_seconds(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Seconds of a window covered by spans in order of their start; overlaps count once."""
    covered, reached = 0.0, start_s
    for span in spans:
        start, end = max(span.start_s, reached), min(span.end_s, end_s)
        if end > start:
            covered += end - start
            reached = end
    return covered


def _find_apart(timeline: Timeline) -> set[int]:
    """Stages whose backwards are not on the ranks of their forwards."""
    ranks: dict[int, tuple[set[int], set[int]]] = {}
    for span in timeline.spans:
        if span.kind in ("F", *_ENDS):
            ranks.setdefault(span.stage, (set(), set()))[span.kind in _ENDS].add(span.rank)
    return {stage for stage, (forwards, ends) in ranks.items() if ends and not forwards & ends}


def _count_in_flight(spans: Iterable[Span], timeline: Timeline, apart: Collection[int]) -> int:
    passes = [span for span in spans if span.kind in ("F", *_ENDS)]
    if not apart and {span.kind for span in passes} <= {"F"}:
        return 0
    count = peak = 0
    elsewhere: dict[tuple[int, int], int] = {}  # (stage, minibatch) -> microbatches whose backward is on another rank
    for _, kind, stage, index, _, _ in passes:
        if stage not in apart:
            count += 1 if kind == "F" else -1
        elif kind == "F":
            minibatch = index // timeline.minibatch_microbatches
            count += 1 - elsewhere.pop((stage, minibatch - 1), 0)
            elsewhere[stage, minibatch] = elsewhere.get((stage, minibatch), 0) + 1
        peak = max(peak, count + (stage in apart and kind != "F"))
    return peak

"""Bytes that a rank holds while a program runs, and the versions at which its gradients are computed.

Both depend only on the order of the rank's ops, so they are traced after the run.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pipedream.core.extensions import find_offer
from pipedream.core.plan.memory import peers_of
from pipedream.core.schedule.occupancy import occupancy_in
from pipedream.core.schedule.op import Kind
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.stage_memory import StageBytes
from pipedream.core.schedule.timeline import GradientVersions, Span
from pipedream.core.schedule.weights import WeightRule


def count_stage(program: Program, stage: int, in_flight: tuple[int, ...]) -> StageBytes:
    """Returns the bytes of a stage, given the most microbatches in flight at each."""
    usage = occupancy_in(program, stage, in_flight[stage])
    return StageBytes.of_rules(program, stage, usage, peers_of(program.plan.replicas, in_flight)[stage])


def count_during(stage_bytes: StageBytes) -> dict[tuple[str, bool], int]:
    """Returns the bytes that ops add, by their letters and whether there are sums of gradients."""
    return {
        (kind.value, sums): int(stage_bytes.during(kind, sums).total_bytes) for kind in Kind for sums in (False, True)
    }


class CopiedPasses:
    """Passes of a rank on copies of weights, which an extension may offer. This base class has none.

    Attributes:
        passes: the kinds and stages of such passes.
        peak_versions: the most copies at once.
    """

    passes: Collection[tuple[str, int]] = ()
    peak_versions = 0

    @property
    def held_bytes(self) -> int:
        """Between ops."""
        return 0

    def run(self, kind: str, stage: int, index: int) -> int:
        """Returns the most bytes of all these stages during a pass."""
        raise NotImplementedError


_new: Callable[..., Any] = tuple.__new__  # faster than calling the class


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank over a run.

    Attributes:
        memory: bytes at the start, and the most during each of its ops.
    """

    peak_versions: int
    gradient_versions: tuple[GradientVersions, ...]
    memory: tuple[int, ...]


class _StageTrace:
    """One replica of a stage: its versions, and the bytes of its microbatches in flight.

    A version exists while it is the newest, and while a later microbatch reads it (or one in flight, if versions are
    kept for the backward). A kept prediction exists from the first forward to the last pass that reads it.

    Attributes:
        read: version of each of its microbatches.
        readers: version -> microbatches that have yet to read it.
        newest, versions, peak: newest version; versions that exist now, and the most at once.
        order: its microbatches in the order of their gradients.
        in_flight, deferred: microbatches that wait for the second half of their backward count only as deferred.
        has_sums: there are gradients of its microbatches before an update.
    """

    def __init__(self, program: Program, stage: int, replica: int, total: int, in_flight: tuple[int, ...]) -> None:
        self.stride = program.placement.replicas[stage]
        self.runs_backward_elsewhere = program.placement.runs_backward_elsewhere(stage)
        self.read = [program.weights.forward_version(stage, k) for k in range(replica, total, self.stride)]
        self.readers = Counter(self.read)
        self.last_updates: dict[int, int] = {}  # version -> update of its last reader, if the passes copy it
        fetches_gradients = stage in program.fetched_gradients
        if fetches_gradients:
            self.last_updates = {v: program.updates.update_of(stage, k) for k, v in enumerate(self.read)}
        self.prediction_until = program.weights.kept_until(stage)
        self.held_until = program.weights.held_until
        self.forwarded = 0
        self.predicted: int | None = None
        self.newest = 0
        self.versions = self.peak = 1
        self.order = list(range(total)) if fetches_gradients else []
        self.in_flight = self.deferred = 0
        self.has_sums = False
        stage_bytes = count_stage(program, stage, in_flight)
        pieces = stage_bytes.fixed, stage_bytes.version, stage_bytes.waiting, stage_bytes.deferred, stage_bytes.sums
        fixed, self.version_bytes, self.waiting_bytes, self.deferred_bytes, self.sums_bytes = (
            int(piece.total_bytes) for piece in pieces
        )
        self.start_bytes = fixed + program.weights.buffers(stage) * self.version_bytes
        self.during = count_during(stage_bytes)

    @property
    def held_bytes(self) -> int:
        """Between ops."""
        return self._kept_bytes + self.has_sums * self.sums_bytes

    @property
    def _kept_bytes(self) -> int:
        """Besides gradients, which the bytes of ops contain."""
        passes_bytes = self.in_flight * self.waiting_bytes + self.deferred * self.deferred_bytes
        return self.start_bytes + (self.versions - 1) * self.version_bytes + passes_bytes

    def _count(self, letter: str) -> int:
        return self._kept_bytes + self.during[letter, self.has_sums]

    def forward(self, _: int) -> int:
        """Returns the most bytes during the next forward; the methods of other ops likewise."""
        self.in_flight += 1
        version = self.read[self.forwarded]
        self.forwarded += 1
        if self.prediction_until is not None and version != self.predicted:
            self.predicted = version
            self.versions += 1
            self.peak = max(self.peak, self.versions)
        most_bytes = self._count("F")
        if self.prediction_until is Kind.FORWARD:
            self.readers[version] -= 1
            self.versions -= not self.readers[version]
        elif self.held_until is Kind.FORWARD:
            self._release(version)
        return most_bytes

    def backward(self, index: int) -> int:
        self.in_flight += self.runs_backward_elsewhere
        most_bytes = self._count("B")
        self.in_flight -= 1
        self._end(index)
        return most_bytes

    def input_gradient(self, _: int) -> int:
        self.in_flight -= 1
        self.deferred += 1
        return self._count("I")

    def weight_gradient(self, index: int) -> int:
        most_bytes = self._count("W")
        self.deferred -= 1
        self._end(index)
        return most_bytes

    def _end(self, index: int) -> None:
        self.has_sums = True
        self.order.append(index)
        if self.held_until is Kind.BACKWARD:
            self._release(self.read[index // self.stride])

    def _release(self, version: int) -> None:
        remaining = self.readers[version] = self.readers[version] - 1
        if not remaining and (version != self.newest or self.prediction_until is not None):
            self.versions -= 1

    def update(self, index: int) -> int:
        if self.last_updates:
            readable = takewhile(lambda version: self.last_updates.get(version, 0) > index, range(index - 1, -1, -1))
            self.versions = 1 + len(list(readable))
            self.peak = max(self.peak, self.versions)
        elif self.held_until is not None and self.prediction_until is None and self.readers[self.newest]:
            self.versions += 1
            self.peak = max(self.peak, self.versions)
        self.newest = index
        self.has_sums = False
        return self._count("U")

    def gradients(self, program: Program, stage: int) -> list[GradientVersions]:
        rule, per_update, read, stride = program.weights, program.updates.per_update[stage], self.read, self.stride
        if type(rule).backward_version is WeightRule.backward_version:  # the version of the forward
            versions = ((k, read[k // stride], read[k // stride]) for k in self.order)
        else:
            versions = ((k, read[k // stride], rule.backward_version(stage, k)) for k in self.order)
        return [
            _new(GradientVersions, (stage, k, forward, backward, k // per_update)) for k, forward, backward in versions
        ]


_RUNS: dict[str, Callable[[_StageTrace, int], int]] = {
    "F": _StageTrace.forward,
    "B": _StageTrace.backward,
    "I": _StageTrace.input_gradient,
    "W": _StageTrace.weight_gradient,
    "U": _StageTrace.update,
}


def trace_memory(
    program: Program, rank: int, total: int, spans: Iterable[Span], in_flight: tuple[int, ...]
) -> MemoryTrace:
    """Returns the memory of a rank, from its spans in the order of its ops."""
    stages = {
        stage: _StageTrace(program, stage, replica, total, in_flight)
        for stage, replica in program.placement.stage_replicas(rank)
    }
    copied = CopiedPasses()
    if program.placement.shares_weights:
        offer = find_offer("copied_passes", f"{program.name!r} shares weights between ranks")
        copied = offer.CopiedPassesTrace(program, rank, total, in_flight)
    memory = [sum(trace.start_bytes for trace in stages.values()) + copied.held_bytes]
    has_several_stages = len(stages) > 1
    for _, kind, stage, index, _, _ in spans:
        if kind == "wait":
            continue
        if (kind, stage) in copied.passes:
            memory.append(copied.run(kind, stage, index) + sum(trace.held_bytes for trace in stages.values()))
            continue
        trace = stages[stage]
        run = _RUNS.get(kind) if program.trains else None
        most_bytes = trace.held_bytes if run is None else run(trace, index)
        if has_several_stages:
            most_bytes += sum(other.held_bytes for other in stages.values() if other is not trace)
        memory.append(most_bytes + copied.held_bytes if copied.passes else most_bytes)
    return MemoryTrace(
        peak_versions=sum(trace.peak for trace in stages.values()) + copied.peak_versions,
        gradient_versions=tuple(
            gradient for stage, trace in stages.items() for gradient in trace.gradients(program, stage)
        ),
        memory=tuple(memory),
    )

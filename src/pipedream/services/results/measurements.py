"""Collects a run's measurements from all ranks."""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipedream.core.artifact import decode, encode
from pipedream.core.errors import PipelineError
from pipedream.core.model.profile import StageCollectives
from pipedream.core.schedule.schedule import Schedule
from pipedream.core.schedule.timeline import GradientVersions, Span, Timeline
from pipedream.runtime.comm.process_group import gather_json
from pipedream.runtime.session.local_workers import LocalWorkers
from pipedream.services.results.memory import tensor_bytes
from pipedream.services.results.recorder import SpanRecorder

_log = logging.getLogger("pipedream")

_PINGS = 10
_PING_TAG = 1


class ClockOffset:
    """The difference of `time.perf_counter`, which counts from a machine's start, between this process and rank 0.

    It is measured at the start and at each `measure`, and interpolated between these, because clocks drift. Of several
    round trips to rank 0 the shortest is used; it bounds the error by half its length (Cristian 1989). A difference
    below this bound counts as 0: processes of one machine have the same clock.

    Args:
        group: gloo group of all ranks, each of which makes a ClockOffset; None in a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._measured: list[tuple[float, float]] = []
        self.measure(group)

    def measure(self, group: dist.ProcessGroup | None) -> None:
        """Measures the difference; every rank calls it."""
        self._measured.append((time.perf_counter(), 0.0 if group is None else _measure_offset_s(group)))

    def to_rank_0(self, seconds: Sequence[float]) -> list[float]:
        """Converts seconds of this process's clock to rank 0's."""
        times_s, offsets = zip(*self._measured, strict=True)
        moments: list[float] = (np.asarray(seconds) + np.interp(seconds, times_s, offsets)).tolist()
        return moments


def _measure_offset_s(group: dist.ProcessGroup) -> float:
    token = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank(group) == 0:
        for other in range(1, dist.get_world_size(group)):
            for _ in range(_PINGS):
                dist.recv(token, None, group, _PING_TAG, other)
                token[0] = time.perf_counter()
                dist.send(token, None, group, _PING_TAG, other)
        return 0.0
    trips: list[tuple[float, float]] = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        dist.send(token, None, group, _PING_TAG, 0)
        dist.recv(token, None, group, _PING_TAG, 0)
        end = time.perf_counter()
        trips.append((end - start, float(token) - (start + end) / 2))
    length_s, offset_s = min(trips)
    return offset_s if abs(offset_s) > length_s / 2 else 0.0


class Measurements:
    """What the workers of a session have measured; made with the session, whose workers have a `SpanRecorder`.

    Every rank makes it, and the same calls, except of `status` and `learning_rates`.

    Attributes:
        trained: phase -> (begin, end) in minibatches.
    """

    def __init__(self, workers_here: LocalWorkers) -> None:
        self._workers_here = workers_here
        recorders = [(worker.rank, worker.recorder) for worker in workers_here.workers]
        self._recorders = {rank: recorder for rank, recorder in recorders if isinstance(recorder, SpanRecorder)}
        self.trained = next(iter(self._recorders.values())).trained
        self._clock = ClockOffset(workers_here.group)

    def collect_timeline(self, batch: int, phase: int | None = None) -> Timeline:
        """Returns a phase's timeline by rank 0's clock, from the run's first span.

        Args:
            batch: samples in a minibatch.
            phase: by default the last one trained.

        Raises:
            PipelineError: the run has no such phase.
        """
        blueprint, group = self._workers_here.blueprint, self._workers_here.group
        programs = blueprint.programs
        if phase is None:
            phase = max(self.trained, default=blueprint.phase)
        if not 0 <= phase < len(programs):
            raise PipelineError(
                f"the timeline of phase {phase} was requested, but the run has phases 0 to {len(programs) - 1}"
            )
        program = programs[phase]
        self._clock.measure(group)
        rows: list[Any] = []
        peak_bytes, reserved_bytes = self._find_peaks(phase)
        for rank, recorder in self._recorders.items():
            versions, _ = recorder.peaks.get(phase, (1, None))
            spans, began_s = recorder.spans(phase), recorder.began_s
            starts, ends = (self._clock.to_rank_0(at) for at in ([s.start_s for s in spans], [s.end_s for s in spans]))
            rows.append(
                {
                    "rank": rank,
                    "began_s": None if began_s is None else self._clock.to_rank_0([began_s])[0],
                    "spans": [
                        [*span._replace(start_s=start, end_s=end)]
                        for span, start, end in zip(spans, starts, ends, strict=True)
                    ],
                    "gradient_versions": [list(row) for row in recorder.gradient_versions(phase)],
                    "peak_bytes": peak_bytes,
                    "reserved_bytes": reserved_bytes,
                    "versions": versions,
                }
            )
        part_by_rank = {part["rank"]: part for row in reversed(gather_json(rows, group)) for part in row}  # of a mesh
        parts = [part_by_rank[rank] for rank in sorted(part_by_rank)]
        start = min((part["began_s"] for part in parts if part["began_s"] is not None), default=0.0)
        all_spans = tuple(
            Span(rank, kind, stage, index, begin - start, end - start)
            for part in parts
            for rank, kind, stage, index, begin, end in part["spans"]
        )
        return Timeline(
            name=program.name,
            source="measured",
            workers=program.placement.workers,
            spans=all_spans,
            microbatches=self.trained.get(phase, (0, 0))[1] * program.microbatches,
            minibatch_microbatches=program.microbatches,
            batch=batch,
            gradient_versions=tuple(GradientVersions(*row) for part in parts for row in part["gradient_versions"]),
            peak_bytes=_require_all(part["peak_bytes"] for part in parts),
            reserved_bytes=_require_all(part["reserved_bytes"] for part in parts),
            shares_memory=len(self._recorders) > 1,
            peak_versions=tuple(part["versions"] for part in parts),
        )

    def _find_peaks(self, phase: int) -> tuple[int | None, int | None]:
        """Returns the peak of the tensors' bytes, and of the reserved bytes, of all workers of this process."""
        peaks = [recorder.peaks[phase][1] for recorder in self._recorders.values() if phase in recorder.peaks]
        rises = [peak.rise_bytes for peak in peaks if peak.rise_bytes is not None]
        # What others' stages have in the host store counts at their homes.
        workers = self._workers_here.workers
        modules = (passes.module for worker in workers for passes in worker.stage_passes.values())
        tensors_bytes = tensor_bytes(*(worker.stage_states for worker in workers), *modules)
        return tensors_bytes + max(rises) if rises else None, max((peak.reserved_bytes for peak in peaks), default=None)

    def status(self, reader: str = "") -> dict[int, dict[str, float]]:
        """Returns rank -> busy share since the reader's last call and peak bytes; rank 0 has other processes' too."""
        workers_here = self._workers_here
        rows = {
            rank: {"busy_share": recorder.busy_share(reader), "peak_bytes": float(recorder.memory.reserved_bytes)}
            for rank, recorder in self._recorders.items()
        }
        if not workers_here.distributed:
            return rows
        store, key = dist.distributed_c10d._get_default_store(), f"pipedream/status/{reader}/"
        if workers_here.worker_rank != 0:
            store.set(f"{key}{workers_here.worker_rank}", json.dumps(rows[workers_here.worker_rank]))
            return rows
        for other in range(1, workers_here.program.placement.workers):
            if store.check([f"{key}{other}"]):
                rows[other] = json.loads(store.get(f"{key}{other}"))
        return rows

    def _gather_counts(self, counts: Mapping[int, int]) -> dict[int, int]:
        rows = reversed(gather_json(counts, self._workers_here.group))
        return {int(number): count for row in rows for number, count in row.items()}

    def count_sent_bytes(self) -> dict[int, int]:
        """Returns worker -> payload bytes that its first rank has sent."""
        workers = self._workers_here.workers
        return self._gather_counts(
            {worker.rank: sum(sender.sent_bytes for sender in worker.senders.values()) for worker in workers}
        )

    def count_skipped_updates(self) -> tuple[int, ...]:
        """Returns the number of skipped updates of each stage."""
        stage_states = self._workers_here.stage_states
        skipped = self._gather_counts({stage: state.optimizer.skipped for stage, state in stage_states})
        return tuple(skipped[stage] for stage in sorted(skipped))

    def collect_collectives(self) -> tuple[StageCollectives | None, ...]:
        """Returns each stage's collectives, after training; None for one on a single rank, or without an update."""
        workers_here = self._workers_here
        local_stages: dict[int, Any] = {}
        for worker in workers_here.workers:
            for stage, stage_state in worker.stage_states.items():
                division = stage_state.module.division
                if division.is_first and division.collectives:
                    program = workers_here.blueprint.programs[min(self.trained)]
                    needs_norms = worker.updates.decision.needs_norms
                    local_stages[stage] = encode(division.compare_collectives(program, needs_norms=needs_norms))
        by_stage: dict[int, StageCollectives] = {}
        for row in gather_json(local_stages, workers_here.group):
            for stage, data in row.items():
                by_stage.setdefault(int(stage), decode(StageCollectives, data, "collectives"))
        for stage, collectives in sorted(by_stage.items()) if workers_here.rank == 0 else ():
            if collectives.predicted is None:
                problem = collectives.problem
                _log.warning("stage %d cannot run without data to predict its collectives: %s", stage, problem)
        return tuple(by_stage.get(stage) for stage in range(workers_here.program.placement.stages))

    def learning_rates(self, schedule: Schedule) -> tuple[float, ...]:
        """Returns each stage's learning rate."""
        rate, rounds = self._workers_here.rate
        factor, staleness = schedule.updates.rate_factor, schedule.weights.mean_staleness
        return tuple(rate * factor(s, staleness(s), rounds) for s in range(len(schedule.plan.stages)))


def _require_all(sizes: Iterable[int | None]) -> tuple[int, ...]:
    """Returns the bytes of each rank, or () if one of them is unknown."""
    rows = list(sizes)
    return tuple(size for size in rows if size is not None) if None not in rows else ()

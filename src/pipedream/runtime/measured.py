"""Collects a run's measured spans, tags and peaks into one Timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pipedream.core.errors import PipelineError
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import GradientVersions, Span, Timeline
from pipedream.runtime.comm.process_group import gather_texts
from pipedream.runtime.results.recorder import peak_bytes
from pipedream.runtime.worker import Worker

__all__ = ["status", "timeline"]


def timeline(
    programs: Sequence[Program],
    phase: int,
    workers: Sequence[Worker],
    group: dist.ProcessGroup | None,
    device: torch.device,
    batch: int,
) -> Timeline:
    """Returns a phase's timeline on all ranks, from the run's first span; every rank calls it.

    Args:
        workers: of this process.
        group: None in a single process.
        batch: samples in a minibatch.

    Raises:
        PipelineError: the run has no such phase.
    """
    if not 0 <= phase < len(programs):
        raise PipelineError(
            f"the timeline of phase {phase} was requested, but the run has phases 0 to {len(programs) - 1}"
        )
    program = programs[phase]
    rows: list[Any] = []
    for worker in workers:
        versions, most_bytes = worker.recorder.peaks.get(phase, (1, peak_bytes(device)))
        rows.append(
            {
                "rank": worker.rank,
                "began_s": worker.recorder.began_s,
                "spans": [list(span) for span in worker.recorder.spans(phase)],
                "gradient_versions": [list(row) for row in worker.recorder.gradient_versions(phase)],
                "peak_bytes": most_bytes,
                "versions": versions,
            }
        )
    parts = [part for text in gather_texts(json.dumps(rows), group) for part in json.loads(text)]
    parts.sort(key=lambda part: part["rank"])
    start = min((part["began_s"] for part in parts if part["began_s"] is not None), default=0.0)
    spans = tuple(
        Span(rank, kind, stage, index, begin - start, end - start)
        for part in parts
        for rank, kind, stage, index, begin, end in part["spans"]
    )
    return Timeline(
        name=program.name,
        source="measured",
        workers=program.placement.workers,
        spans=spans,
        microbatches=workers[0].trained.get(phase, (0, 0))[1] * program.microbatches,
        minibatch_microbatches=program.microbatches,
        batch=batch,
        gradient_versions=tuple(GradientVersions(*row) for part in parts for row in part["gradient_versions"]),
        peak_bytes=tuple(part["peak_bytes"] for part in parts),
        peak_versions=tuple(part["versions"] for part in parts),
    )


def status(
    workers: Sequence[Worker], count: int, device: torch.device, distributed: bool
) -> dict[int, dict[str, float]]:
    """Returns rank -> busy share since the last call and peak bytes; rank 0 has those of other processes too."""
    mine = {w.rank: {"busy_share": w.recorder.busy_share(), "peak_bytes": float(peak_bytes(device))} for w in workers}
    if not distributed:
        return mine
    store = dist.distributed_c10d._get_default_store()
    rank = workers[0].rank
    if rank != 0:
        store.set(f"pipedream/status/{rank}", json.dumps(mine[rank]))
        return mine
    for other in range(1, count):
        if store.check([f"pipedream/status/{other}"]):
            mine[other] = json.loads(store.get(f"pipedream/status/{other}"))
    return mine

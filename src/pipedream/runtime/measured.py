"""What was measured in a run: the workers' spans, tags and peaks as one Timeline."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.program import Program
from ..core.timeline import Span, Tag, Timeline
from .talk import gather_texts
from .worker import Worker

__all__ = ["peak_bytes", "timeline"]


def timeline(
    program: Program, workers: Sequence[Worker], group: dist.ProcessGroup | None, device: torch.device, batch: int
) -> Timeline:
    """Returns what ran when on all ranks, from the start of the first span; every rank calls it.

    Args:
        program: that was run.
        workers: of this process.
        group: gloo group of all ranks; None in a lone process.
        device: of the workers.
        batch: samples in a minibatch.
    """
    rows: list[Any] = []
    for worker in workers:
        rows.append(
            {
                "rank": worker.rank,
                "spans": [list(span) for span in worker.recorder.spans()],
                "tags": [list(tag) for tag in worker.recorder.tags],
                "peak_bytes": peak_bytes(device),
                "versions": max(seat.versions.peak for seat in worker.seats.values()),
            }
        )
    parts = [part for text in gather_texts(json.dumps(rows), group) for part in json.loads(text)]
    parts.sort(key=lambda part: part["rank"])
    start = min((span[4] for part in parts for span in part["spans"]), default=0.0)
    spans = tuple(
        Span(rank, kind, stage, index, begin - start, end - start)
        for part in parts
        for rank, kind, stage, index, begin, end in part["spans"]
    )
    lead = workers[0]
    return Timeline(
        name=program.schedule,
        source="measured",
        workers=program.placement.workers,
        spans=spans,
        microbatches=lead.done_minibatches * program.microbatches,
        minibatch_microbatches=program.microbatches,
        batch=batch,
        tags=tuple(Tag(*tag) for part in parts for tag in part["tags"]),
        peak_bytes=tuple(part["peak_bytes"] for part in parts),
        peak_versions=tuple(part["versions"] for part in parts),
    )


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process: of the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

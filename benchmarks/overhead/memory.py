"""One rank of the memory runs: trains with one variant, and prints what its processes held at most and in the end.

Started by run.py, which sets torch's variables. Prints a list of one object per rank.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stages import Shape, Waits, network
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import pipedream as pd

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import answer_request, gather, read_memory, restart_peak

optimizer = partial(torch.optim.SGD, lr=1e-3)
loss = functional.mse_loss


def measure(request: dict[str, Any]) -> list[Any]:
    """Makes each of the `runs` that the request asks for, one after the other."""
    return [_measure_run(**run) for run in request["runs"]]


def _measure_run(shape: dict[str, Any], variant: str, parts: list[int]) -> list[Any]:
    """Returns for each rank and part the row of what was measured.

    That is `rise_bytes`, by which the process grew at most, and `resident_bytes` and `objects` (Python's, that the
    collector tracks) at its end.

    Args:
        variant: 'torch' or a schedule.
        parts: minibatches between two looks.
    """
    run = _train_torch if variant == "torch" else partial(_train_ours, schedule=variant)
    rows = []
    stream = run(Shape(**shape), parts)
    next(stream)
    before = restart_peak()
    for _ in stream:
        highest = read_memory("VmHWM")
        now = restart_peak()
        rows.append({"rise_bytes": highest - before, "resident_bytes": now, "objects": len(gc.get_objects())})
        before = now
    return gather(rows)


def _train_ours(shape: Shape, parts: list[int], *, schedule: str) -> Iterator[None]:
    """Yields before the first minibatch, and after each part."""
    plan = pd.Plan.uniform(shape.stages, transfer_s=1e-4)
    microbatches = 1 if schedule == "pipedream" else shape.microbatches
    batch = shape.batch(microbatches)
    with pd.Pipeline(
        network(shape, Waits()),
        plan,
        schedule=schedule,
        microbatches=microbatches,
        loss=loss,
        optimizer=optimizer,
        sample=batch[0][:1],
        check=False,
    ) as pipeline:
        yield
        for minibatches in parts:
            for _ in pipeline.train([batch] * minibatches):
                pass
            yield


def _train_torch(shape: Shape, parts: list[int]) -> Iterator[None]:
    rank = dist.get_rank()
    layer = network(shape, Waits())[rank]
    schedule = Schedule1F1B(PipelineStage(layer, rank, shape.stages, torch.device("cpu")), shape.microbatches, loss)
    update = optimizer(layer.parameters())
    inputs, targets = shape.batch(shape.microbatches)
    yield
    for minibatches in parts:
        for _ in range(minibatches):
            update.zero_grad()
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets)
            update.step()
        yield


if __name__ == "__main__":
    answer_request(measure)

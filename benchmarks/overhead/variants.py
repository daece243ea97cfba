"""One rank of what is compared over several processes: each variant trains a segment on all ranks, in turns.

Started by run.py, which sets torch's variables.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stages import Shape, Waits, loss, network, optimizer
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipedream as pd

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import answer_request, gather, read_memory, restart_peak, take_turns

MESSAGE_S = 1e-4
"""One way, for the plan: depth full adds microbatches to hide messages."""

WARMUP = 2


@dataclass(frozen=True)
class Segment:
    """What a rank measured, per microbatch.

    Attributes:
        period_s: time of a minibatch, divided by its microbatches.
        cpu_s: of all threads of the process.
        forward_s, backward_s: mean of the sleeps; 0 for layers that compute.
    """

    period_s: float
    cpu_s: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Bench:
    """What all variants share.

    Attributes:
        group: process group of what is not this library's.
        segment: microbatches that a segment times, at least.
    """

    shape: Shape
    waits: Waits
    group: dist.ProcessGroup | None = None
    segment: int = 0

    def count(self, microbatches: int) -> int:
        """Returns the minibatches that a segment times."""
        return max(2, -(-self.segment // microbatches))


Running = tuple[Callable[[], object], int, int]
"""Trains a minibatch; microbatches of a minibatch; minibatches that warm up."""


@contextmanager
def open_pipeline(bench: Bench, schedule: str, depth: str = "noam") -> Iterator[tuple[pd.Pipeline, Any]]:
    """Yields a pipeline of this library, and its minibatch."""
    shape = bench.shape
    plan = pd.Plan.uniform(shape.stages, shape.forward_s, shape.backward_s, MESSAGE_S).with_depth(depth)
    microbatches = None if schedule == "pipedream" else shape.microbatches
    batch = shape.batch(microbatches or 1)
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "sample": batch[0], "check": False}
    model = network(shape, bench.waits)
    with pd.Pipeline(model, plan, schedule=schedule, microbatches=microbatches, **how) as pipeline:
        yield pipeline, batch


@contextmanager
def of_pipedream(bench: Bench, schedule: str, depth: str = "noam") -> Iterator[Running]:
    """A method of this library."""
    with open_pipeline(bench, schedule, depth) as (pipeline, batch):
        ahead = pipeline.plan.in_flight[0]
        splits = schedule != "pipedream"
        microbatches, warmup = (bench.shape.microbatches, WARMUP) if splits else (1, ahead + 2)
        # More minibatches than are timed, so that the drain is not among what is timed.
        stream = pipeline.train([batch] * (warmup + bench.count(microbatches) + ahead))
        yield partial(next, stream), microbatches, warmup
        for _ in stream:
            pass


@contextmanager
def torch_1f1b(bench: Bench) -> Iterator[Running]:
    """torch's own 1F1B on the same stages."""
    shape, rank = bench.shape, dist.get_rank()
    layer = network(shape, bench.waits)[rank]
    stage = PipelineStage(layer, rank, shape.stages, torch.device("cpu"), group=bench.group)
    schedule = Schedule1F1B(stage, shape.microbatches, loss_fn=loss)
    update = optimizer(layer.parameters())
    inputs, targets = shape.batch(shape.microbatches)
    arguments = (inputs,) if rank == 0 else ()
    last = {"target": targets} if rank == shape.stages - 1 else {}

    def step() -> None:
        update.zero_grad()
        schedule.step(*arguments, **last)
        update.step()

    yield step, shape.microbatches, WARMUP


@contextmanager
def by_hand(bench: Bench) -> Iterator[Running]:
    """1F1B written out over the same gloo: tensors of known shape, and nothing else."""
    shape, rank, m = bench.shape, dist.get_rank(), bench.shape.microbatches
    last = rank == shape.stages - 1
    layer = network(shape, bench.waits)[rank]
    update = optimizer(layer.parameters())
    inputs, targets = (part.split(len(part) // m) for part in shape.batch(m))
    microbatches = (WARMUP + bench.count(m)) * m
    activations, gradients = (_post_receives(bench.group, peer, shape.message_shape, microbatches)
                              for peer in (rank - 1, rank + 1))  # fmt: skip
    if rank > 0:
        next(activations)
    if not last:
        next(gradients)
    warmup = min(m, shape.stages - 1 - rank)
    order = "F" * warmup + "FB" * (m - warmup) + "B" * warmup

    def step() -> None:
        update.zero_grad()
        unfinished: deque[tuple[Tensor, Tensor]] = deque()
        forwards, sends = itertools.count(), []
        for op in order:
            if op == "F":
                k = next(forwards)
                x = inputs[k] if rank == 0 else next(activations).requires_grad_()
                y = layer(x)
                if last:
                    y = loss(y, targets[k]) / m
                else:
                    sends.append(dist.isend(y.detach(), rank + 1, bench.group))
                unfinished.append((x, y))
            else:
                x, y = unfinished.popleft()
                torch.autograd.backward(y, None if last else next(gradients))
                if rank > 0:
                    assert x.grad is not None
                    sends.append(dist.isend(x.grad, rank - 1, bench.group))
        update.step()
        for work in sends:
            assert work is not None
            work.wait()

    yield step, m, WARMUP


def _post_receives(group: dist.ProcessGroup | None, peer: int, size: tuple[int, int], count: int) -> Iterator[Tensor]:
    """Yields what comes from a neighbour, one receive posted ahead; the first value only posts one."""
    buffer = torch.empty(size)
    work = dist.irecv(buffer, peer, group)
    yield buffer
    for number in range(count):
        assert work is not None
        previous, received = work, buffer
        if number < count - 1:
            buffer = torch.empty(size)
            work = dist.irecv(buffer, peer, group)
        previous.wait()
        yield received


@contextmanager
def alone(bench: Bench) -> Iterator[Running]:
    """The passes of a stage without messages, while the other ranks do the same: what they cost themselves."""
    shape, rank = bench.shape, dist.get_rank()
    layer = network(shape, bench.waits)[rank]
    x = torch.randn(shape.message_shape) if rank else shape.batch(1)[0]

    def step() -> None:
        for _ in range(shape.microbatches):
            y = layer(x.detach().requires_grad_(rank > 0))
            torch.autograd.backward(y, torch.zeros_like(y))

    yield step, shape.microbatches, WARMUP


VARIANTS: dict[str, Callable[[Bench], AbstractContextManager[Running]]] = {
    "stages alone": alone,
    "by hand": by_hand,
    "torch, Schedule1F1B": torch_1f1b,
    "pipedream, 1f1b": partial(of_pipedream, schedule="1f1b"),
    "pipedream, 1f1b, depth full": partial(of_pipedream, schedule="1f1b", depth="full"),
    "pipedream, 2BW": partial(of_pipedream, schedule="pipedream_2bw"),
    "pipedream, depth full": partial(of_pipedream, schedule="pipedream", depth="full"),
}


def measure(request: dict[str, Any]) -> dict[str, list[Any]]:
    """Runs what was asked: keys `shape`, `variants`, `rounds`, `segment`, `pinned` (each rank to a core).

    Returns variant -> rounds -> ranks -> `Segment` as a list.
    """
    if request["pinned"]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    group = dist.new_group(backend="gloo")
    shape = Shape(**request["shape"])
    segments_by_variant: dict[str, list[Any]] = {name: [] for name in request["variants"]}
    for name in take_turns(segments_by_variant, request["rounds"]):
        dist.barrier(group)
        segment = _time_segment(name, Bench(shape, Waits(), group, request["segment"]))
        segments_by_variant[name].append(gather(astuple(segment), group))
        gc.collect()
    return segments_by_variant


def _time_segment(name: str, bench: Bench) -> Segment:
    """Times minibatches of a variant, after some that warm up."""
    with VARIANTS[name](bench) as (step, microbatches, warmup):
        for _ in range(warmup):
            step()
        bench.waits.clear()
        cpu_s, start_s = _read_cpu_s(), time.perf_counter()
        for _ in range(minibatches := bench.count(microbatches)):
            step()
        seconds = time.perf_counter() - start_s, _read_cpu_s() - cpu_s
        means_s = bench.waits.means_s
    count = microbatches * minibatches
    return Segment(seconds[0] / count, seconds[1] / count, *means_s)


def _read_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_memory(request: dict[str, Any]) -> list[Any]:
    """Makes each of the `runs` that the request asks for: keys `shape`, `variant` ('torch' or a schedule), `parts`.

    Returns for each run, rank and part (minibatches between two looks) `rise_bytes`, by which the process grew at most,
    and `resident_bytes` and `objects` (Python's, that the collector tracks) at its end.
    """
    runs = []
    for run in request["runs"]:
        rows, stream = [], _train_parts(Bench(Shape(**run["shape"]), Waits()), run["variant"], run["parts"])
        next(stream)
        before = restart_peak()
        for _ in stream:
            highest = read_memory("VmHWM")
            now = restart_peak()
            rows.append({"rise_bytes": highest - before, "resident_bytes": now, "objects": len(gc.get_objects())})
            before = now
        runs.append(gather(rows))
    return runs


def _train_parts(bench: Bench, variant: str, parts: list[int]) -> Iterator[None]:
    """Yields before the first minibatch, and after each part."""
    if variant == "torch":
        with torch_1f1b(bench) as (step, _, _):
            yield
            for minibatches in parts:
                for _ in range(minibatches):
                    step()
                yield
        return
    with open_pipeline(bench, variant) as (pipeline, batch):
        yield
        for minibatches in parts:
            for _ in pipeline.train([batch] * minibatches):
                pass
            yield


if __name__ == "__main__":
    answer_request(lambda request: measure_memory(request) if "runs" in request else measure(request))

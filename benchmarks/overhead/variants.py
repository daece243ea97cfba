"""One rank of what is compared over several processes, in turns: each variant trains a segment on all ranks."""

from __future__ import annotations

import cProfile
import gc
import itertools
import os
import pstats
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stages import Shape, Waits, network
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import pipedream as pd

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import answer_request, gather, take_turns

MESSAGE_S = 1e-4
"""One way, for the plan: depth full adds microbatches to hide messages."""

WARMUP = 2

optimizer = partial(torch.optim.SGD, lr=1e-3)
loss = functional.mse_loss


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


class Stopwatch:
    """Times minibatches, after some that warm up."""

    def __init__(self, bench: Bench, microbatches: int, warmup: int = WARMUP) -> None:
        self._bench = bench
        self.microbatches = microbatches
        self.warmup = warmup
        self.minibatches = max(2, -(-bench.segment // microbatches))
        self._done = 0

    def tick(self) -> None:
        """Notes that another minibatch is done."""
        self._done += 1
        if self._done == self.warmup:
            self._bench.waits.clear()
            self._read_cpu_s, self._start_s = _read_cpu_s(), time.perf_counter()
            if self._bench.profiler is not None:
                self._bench.profiler.enable()
        if self._done == self.warmup + self.minibatches:
            if self._bench.profiler is not None:
                self._bench.profiler.disable()
            count = self.microbatches * self.minibatches
            self.segment = Segment(
                (time.perf_counter() - self._start_s) / count,
                (_read_cpu_s() - self._read_cpu_s) / count,
                *self._bench.waits.means_s,
            )

    @property
    def total(self) -> int:
        """Minibatches, with those that warm up."""
        return self.warmup + self.minibatches


@dataclass(frozen=True)
class Bench:
    """What all variants share.

    Attributes:
        group: process group of what is not this library's.
        segment: microbatches that a segment times, at least.
        profiler: runs while the time is taken.
    """

    rank: int
    shape: Shape
    group: dist.ProcessGroup
    segment: int
    waits: Waits
    profiler: cProfile.Profile | None = None

    def print_profile(self, name: str, top: int = 40) -> None:
        """Prints where this rank's main thread spent CPU time."""
        assert self.profiler is not None
        print(f"== {name}, rank {self.rank}: CPU seconds of the main thread", file=sys.stderr)
        for order in ("tottime", "cumulative"):
            pstats.Stats(self.profiler, stream=sys.stderr).sort_stats(order).print_stats(top)


def _read_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def of_pipedream(bench: Bench, *, schedule: str, depth: str = "noam") -> Segment:
    """Runs a method of this library."""
    p = bench.shape.stages
    plan = pd.Plan.uniform(p, bench.shape.forward_s, bench.shape.backward_s, MESSAGE_S).with_depth(depth)
    splits = schedule != "pipedream"
    microbatches = bench.shape.microbatches if splits else 1
    ahead = plan.in_flight[0]
    stopwatch = Stopwatch(bench, microbatches, WARMUP if splits else ahead + 2)
    # More minibatches than are timed, so that the drain is not among what is timed.
    loader = [bench.shape.batch(microbatches)] * (stopwatch.total + ahead)
    with pd.Pipeline(
        network(bench.shape, bench.waits),
        plan,
        schedule=schedule,
        microbatches=microbatches if splits else None,
        loss=loss,
        optimizer=optimizer,
        sample=loader[0][0],
        check=False,
    ) as pipeline:
        for _ in pipeline.train(loader):
            stopwatch.tick()
    return stopwatch.segment


def torch_1f1b(bench: Bench) -> Segment:
    """Runs torch's own 1F1B on the same stages."""
    layer, rank, m = network(bench.shape, bench.waits)[bench.rank], bench.rank, bench.shape.microbatches
    stage = PipelineStage(layer, rank, bench.shape.stages, torch.device("cpu"), group=bench.group)
    schedule = Schedule1F1B(stage, m, loss_fn=loss)
    update = optimizer(layer.parameters())
    inputs, targets = bench.shape.batch(m)
    stopwatch = Stopwatch(bench, m)
    for _ in range(stopwatch.total):
        update.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == bench.shape.stages - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        update.step()
        stopwatch.tick()
    return stopwatch.segment


def by_hand(bench: Bench) -> Segment:
    """Runs 1F1B written out over the same gloo: tensors of known shape, and nothing else."""
    shape, rank, m = bench.shape, bench.rank, bench.shape.microbatches
    last = rank == shape.stages - 1
    layer = network(shape, bench.waits)[rank]
    update = optimizer(layer.parameters())
    inputs, targets = (part.split(len(part) // m) for part in shape.batch(m))
    rows = len(inputs[0])
    size = (rows, shape.message_bytes // 4) if shape.compute is None else (rows, shape.compute[1])
    stopwatch = Stopwatch(bench, m)
    left = stopwatch.total * m
    activations, gradients = _Posted(bench.group, rank - 1, size, left), _Posted(bench.group, rank + 1, size, left)
    warmup = min(m, shape.stages - 1 - rank)
    order = "F" * warmup + "FB" * (m - warmup) + "B" * warmup
    for _ in range(stopwatch.total):
        update.zero_grad()
        kept: deque[tuple[Tensor, Tensor]] = deque()
        forwards, sends = itertools.count(), []
        for op in order:
            if op == "F":
                k = next(forwards)
                x = inputs[k] if rank == 0 else activations.take().requires_grad_()
                y = layer(x)
                if last:
                    y = loss(y, targets[k]) / m
                else:
                    sends.append(dist.isend(y.detach(), rank + 1, bench.group))
                kept.append((x, y))
            else:
                x, y = kept.popleft()
                torch.autograd.backward(y, None if last else gradients.take())
                if rank > 0:
                    assert x.grad is not None
                    sends.append(dist.isend(x.grad, rank - 1, bench.group))
        update.step()
        for work in sends:
            assert work is not None
            work.wait()
        stopwatch.tick()
    return stopwatch.segment


class _Posted:
    """Receives from a neighbour, one posted ahead."""

    def __init__(self, group: dist.ProcessGroup, peer: int, size: tuple[int, int], left: int) -> None:
        self._group, self._peer, self._size, self._left = group, peer, size, left
        if 0 <= peer < dist.get_world_size(group):
            self._post()

    def _post(self) -> None:
        self._left -= 1
        buffer = torch.empty(self._size)
        self._next = (dist.irecv(buffer, self._peer, self._group), buffer)

    def take(self) -> Tensor:
        """Waits for the next message."""
        work, buffer = self._next
        assert work is not None
        if self._left:
            self._post()
        work.wait()
        return buffer


def alone(bench: Bench) -> Segment:
    """Runs the passes of a stage without messages, while the other ranks do the same: what they cost themselves."""
    shape = bench.shape
    layer = network(shape, bench.waits)[bench.rank]
    rows = 1 if shape.compute is None else shape.compute[0]
    width = shape.message_bytes // 4 if shape.compute is None else shape.compute[1]
    x = torch.randn(rows, width) if bench.rank else shape.batch(1)[0]
    stopwatch = Stopwatch(bench, shape.microbatches)
    for _ in range(stopwatch.total):
        for _ in range(shape.microbatches):
            y = layer(x.detach().requires_grad_(bench.rank > 0))
            torch.autograd.backward(y, torch.zeros_like(y))
        stopwatch.tick()
    return stopwatch.segment


VARIANTS: dict[str, Callable[[Bench], Segment]] = {
    "stages alone": alone,
    "by hand": by_hand,
    "torch, Schedule1F1B": torch_1f1b,
    "pipedream, 1f1b": partial(of_pipedream, schedule="1f1b"),
    "pipedream, 1f1b, depth full": partial(of_pipedream, schedule="1f1b", depth="full"),
    "pipedream, 2BW": partial(of_pipedream, schedule="pipedream_2bw"),
    "pipedream, depth full": partial(of_pipedream, schedule="pipedream", depth="full"),
}


def measure(request: dict[str, Any]) -> dict[str, list[Any]]:
    """Runs what was asked: keys `shape`, `variants`, `rounds`, `segment`, `profile`, `pinned` (each rank to a core).

    Returns variant -> rounds -> ranks -> `Segment` as a list.
    """
    if request["pinned"]:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    group = dist.new_group(backend="gloo")
    shape = Shape(**request["shape"])
    segments_by_variant: dict[str, list[Any]] = {name: [] for name in request["variants"]}
    for name in take_turns(segments_by_variant, request["rounds"]):
        profiler = cProfile.Profile(time.thread_time) if request["profile"] else None
        bench = Bench(dist.get_rank(), shape, group, request["segment"], Waits(), profiler)
        dist.barrier(group)
        segments = gather(astuple(VARIANTS[name](bench)), group)
        segments_by_variant[name].append(segments)
        for rank in range(len(segments)):
            if profiler is not None and bench.rank == rank:
                bench.print_profile(name)
            dist.barrier(group)
        gc.collect()
    return segments_by_variant


if __name__ == "__main__":
    answer_request(measure)

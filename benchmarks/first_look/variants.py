"""The methods side by side: each function runs one short segment on both workers and returns samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from model import CLASSES, Sizes, halves, network
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pipedream as pd
from pipedream import Plan, schedules

__all__ = ["Bench", "variants"]

optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


@dataclass(frozen=True)
class Bench:
    """What all variants share.

    Attributes:
        rank: of this worker.
        sizes: of network and batches.
        plan: two stages, at depth noam.
        group: process group of what is not PipeDream's.
        segment: microbatches that a segment times, at least.
    """

    rank: int
    sizes: Sizes
    plan: Plan
    group: dist.ProcessGroup
    segment: int

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a minibatch of `count` microbatches."""
        made = torch.Generator().manual_seed(1)
        samples = self.sizes.batch * count
        return (
            torch.randn(samples, 3, 32, 32, generator=made),
            torch.randint(0, CLASSES, (samples,), generator=made),
        )

    def at_depth(self, depth: str) -> Plan:
        """Returns the plan at another depth."""
        return self.plan.with_depth(depth)


def variants() -> dict[str, Callable[[Bench], float]]:
    """Returns name -> segment."""
    return {
        "solo": partial(solo, per_update=1),
        "solo, an update a minibatch": partial(solo, per_update=None),
        "pipedream, depth noam": partial(of_pipedream, schedule="pipedream", depth="noam"),
        "pipedream, depth full": partial(of_pipedream, schedule="pipedream", depth="full"),
        "pipedream, 2BW, depth full": partial(of_pipedream, schedule="pipedream_2bw", depth="full"),
        "pipedream, 1F1B flush": partial(of_pipedream, schedule="1f1b", depth="noam"),
        "pipedream, 1F1B flush, depth full": partial(of_pipedream, schedule="1f1b", depth="full"),
        "torch, Schedule1F1B": torch_1f1b,
        "torch, DDP": partial(ddp, microbatches=1),
        "torch, DDP, accumulating": partial(ddp, microbatches=None),
    }


def _timed(
    bench: Bench, step: Callable[[], None], microbatches: int, *, warmup: int = 1, most_steps: int | None = None
) -> float:
    """Returns samples per second of a step that takes in so many microbatches, over all workers."""
    for _ in range(warmup):
        step()
    dist.barrier(bench.group)
    steps = min(max(2, -(-bench.segment // microbatches)), most_steps or bench.segment)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * microbatches * bench.sizes.batch / (time.perf_counter() - start)


def solo(bench: Bench, *, per_update: int | None) -> float:
    """Runs this worker's half alone, without messages, while the other worker does the same with its own.

    Args:
        per_update: microbatches between two updates; None for a minibatch of the methods that split it.
    """
    each = per_update or bench.sizes.microbatches
    half = halves(network(bench.sizes))[bench.rank]
    update = optimizer(half.parameters())
    inputs, targets = bench.batch(1)
    if bench.rank:
        with torch.no_grad():
            inputs = halves(network(bench.sizes))[0](inputs)
    gradient = torch.ones_like(half(inputs)) * 1e-3

    def step() -> None:
        update.zero_grad()
        for _ in range(each):
            output = half(inputs.detach().requires_grad_(bench.rank > 0))
            if bench.rank:
                torch.autograd.backward(functional.cross_entropy(output, targets))
            else:
                torch.autograd.backward(output, gradient)
        update.step()

    return _timed(bench, step, each)


def of_pipedream(bench: Bench, *, schedule: str, depth: str) -> float:
    """Runs a method of this library, and times its steady part at the input stage."""
    plan = bench.at_depth(depth)
    splits = schedule != "pipedream"
    built = schedules.build(schedule, plan, bench.sizes.microbatches if splits else None)
    microbatches = built.microbatches
    warmup = 2 if splits else plan.in_flight[0] + 2
    count = max(2, -(-bench.segment // microbatches))
    # Minibatches after the timed ones, so that the drain is not among what is timed.
    behind = plan.in_flight[0] if not built.flushes else 0
    loader = [bench.batch(microbatches)] * (warmup + count + behind)
    ends: list[float] = []
    with pd.Pipeline(
        network(bench.sizes), plan, schedule=built, loss=functional.cross_entropy, optimizer=optimizer, check=False
    ) as pipeline:
        for _ in pipeline.train(loader):
            ends.append(time.perf_counter())
    return count * microbatches * bench.sizes.batch / (ends[warmup + count - 1] - ends[warmup - 1])


def torch_1f1b(bench: Bench) -> float:
    """Runs torch's own 1F1B on the same halves and microbatches, with the same update."""
    half = halves(network(bench.sizes))[bench.rank]
    stage = PipelineStage(half, bench.rank, 2, torch.device("cpu"), group=bench.group)
    schedule = Schedule1F1B(stage, bench.sizes.microbatches, loss_fn=functional.cross_entropy)
    update = optimizer(half.parameters())
    inputs, targets = bench.batch(bench.sizes.microbatches)

    def step() -> None:
        update.zero_grad()
        if bench.rank:
            schedule.step(target=targets)
        else:
            schedule.step(inputs)
        update.step()

    return _timed(bench, step, bench.sizes.microbatches)


def ddp(bench: Bench, *, microbatches: int | None) -> float:
    """Runs torch's data parallelism.

    Args:
        microbatches: that each worker takes between two sums of the gradients; None for as many as give the
            minibatch of the methods that split it.
    """
    model: nn.Module = DistributedDataParallel(network(bench.sizes), process_group=bench.group)
    update = optimizer(model.parameters())
    each = microbatches or max(1, bench.sizes.microbatches // 2)
    inputs, targets = bench.batch(1)

    def backward() -> None:
        torch.autograd.backward(functional.cross_entropy(model(inputs), targets) / each)

    def step() -> None:
        update.zero_grad()
        with model.no_sync():  # type: ignore[operator]
            for _ in range(each - 1):
                backward()
        backward()
        update.step()

    return _timed(bench, step, 2 * each, most_steps=6)  # a sum of all weights takes long where the link is slow

"""One of the two workers: trains by all variants in turns, round after round; rank 0 prints the seconds as JSON.

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import pipedream as pd
from pipedream.runtime.update.all_reduce import GradientAllReduce

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import collect_rounds, gather
from vgg import CLASSES, make_vgg
from worker_processes import answer_lines

WARMUP = 3
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How large the network (`make_vgg`) and its minibatches are."""

    samples: int
    width: float
    dense: int

    def network(self) -> torch.nn.Sequential:
        return make_vgg(self.width, self.dense)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(self.samples, 3, 32, 32), torch.randint(CLASSES, (self.samples,))


def measure(request: dict[str, Any]) -> dict[str, list[float]]:
    """Runs what was asked: keys `rounds`, `segment`, `batch`, `width`, `dense`."""
    sizes = Sizes(request["batch"], request["width"], request["dense"])
    variants: dict[str, Callable[[Sizes, int], float]] = {
        "one worker, no sums": alone,
        "pipedream, sums at the update": partial(ours, early=False, mib=4),
        "pipedream, buckets of 4 MiB": partial(ours, early=True, mib=4),
        "pipedream, buckets of 1 MiB": partial(ours, early=True, mib=1),
        "pipedream, buckets of 25 MiB": partial(ours, early=True, mib=25),
        "torch, DDP, 25 MiB (its default)": partial(theirs, mib=25),
        "torch, DDP, 4 MiB": partial(theirs, mib=4),
    }

    def time_slowest(name: str) -> float:
        dist.barrier()
        seconds = max(gather(variants[name](sizes, request["segment"])))
        gc.collect()
        if dist.get_rank() == 0:
            print(f"  {name}: {seconds:.3f} s", file=sys.stderr, flush=True)
        return seconds

    return collect_rounds(time_slowest, variants, request["rounds"])


def ours(sizes: Sizes, segment: int, *, early: bool, mib: int) -> float:
    """Returns the seconds of a minibatch by a one-stage plan."""
    model = sizes.network()
    plan, sample = pd.Plan.uniform(1, replicas=(2,)), sizes.batch()[:1]
    plan = replace(plan, stages=(replace(plan.stages[0], last=len(model)),))
    with pd.Pipeline(model, plan, loss=functional.cross_entropy, optimizer=optimizer, sample=sample) as pipeline:
        (worker,) = pipeline._session.local.workers
        (stage_state,) = worker.stage_states.values()
        reduction, group = stage_state.optimizer.all_reduce, stage_state.optimizer.replica_group
        assert reduction is not None
        assert group is not None
        stage_state.optimizer.all_reduce = GradientAllReduce(
            list(stage_state.versions.handles.values()), group, bucket_bytes=mib * MIB
        )
        if not early:
            worker._backwards.update_completed_by = lambda op: None
        start = 0.0
        for done in pipeline.train([sizes.batch()] * (2 * (WARMUP + segment))):
            if done.number == 2 * WARMUP - 1:
                start = time.perf_counter()
        return (time.perf_counter() - start) / segment


def theirs(sizes: Sizes, segment: int, *, mib: int) -> float:
    """Returns the seconds of a minibatch by torch's DistributedDataParallel."""
    return _time_loop(DistributedDataParallel(sizes.network(), bucket_cap_mb=mib), sizes, segment)


def alone(sizes: Sizes, segment: int) -> float:
    """Returns the seconds of a minibatch of a worker that adds up nothing."""
    return _time_loop(sizes.network(), sizes, segment)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Makes the optimizer."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _time_loop(model: torch.nn.Module, sizes: Sizes, segment: int) -> float:
    stepper, (x, y) = optimizer(model.parameters()), sizes.batch()
    start = 0.0
    for number in range(WARMUP + segment):
        if number == WARMUP:
            start = time.perf_counter()
        stepper.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        stepper.step()
    return (time.perf_counter() - start) / segment


if __name__ == "__main__":
    dist.init_process_group("gloo")
    answer_lines(measure)

"""One process of the memory benchmark: profiles the model, or trains as one rank and reports the peaks of all ranks.

{"do": "profile", ...}     measures a row of residual blocks, or with a `length` of text a GPT
{"do": "train", ...}       trains residual blocks (run.py)
{"do": "fit", ...}         trains a GPT (largest.py), or ends with status 12 if its memory does not suffice
{"do": "sleep", ...}       runs a plan with waits for computation (bubble.py)
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pipedream as pd
from pipedream.apps.emulate.emulate import build_emulated_pipeline, make_emulated_batches, scale_plan
from pipedream.core.plan.plan import Plan
from pipedream.profiler.sizes import Allocations

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "speedup")]
from models import Job, make_gpt_job, shard_fully
from scaffold import answer_request, gather, read_memory, restart_peak

FEATURES, CLASSES = 256, 10
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.001),
}


class Block(nn.Module):
    """A residual block: 8 width**2 weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


def _draw_batches(request: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields fresh minibatches, so that none is held but by the pipeline."""
    return (_draw(request["batch"]) for _ in range(request["minibatches"]))


def _draw(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, FEATURES), torch.randint(CLASSES, (samples,))


def _make_blocks(width: int, blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, CLASSES))


def _make_job(request: dict[str, Any], blocks: int) -> Job:
    """Returns a GPT of so many blocks, or residual blocks with an optimizer."""
    if "length" in request:
        return make_gpt_job("", blocks=blocks, **{name: request[name] for name in ("width", "length", "samples")})
    make, optimizer = partial(_make_blocks, request["width"], blocks), OPTIMIZERS[request["optimizer"]]
    return Job("", make, _draw, request["batch"], F.cross_entropy, optimizer)


def profile(request: dict[str, Any]) -> None:
    """Measures a minibatch of the model into a file."""
    job, parts = _make_job(request, request["blocks"]), request.get("microbatches")
    inputs, targets = job.batch(job.samples * (parts or 1))
    pd.profile(
        job.make(),
        inputs,
        loss=lambda output: job.loss(output, targets),
        optimizer=job.optimizer,
        microbatches=parts,
        warmup=0,
        runs=1,
    ).save(request["file"])


def train(request: dict[str, Any]) -> list[dict[str, int]]:
    """Trains as one rank, twice; returns what each rank held.

    The first time the allocator's events are kept, which take memory, and code is loaded that the second time has.
    """
    plan = Plan.load(request["plan"])
    with Allocations(torch.device("cpu")) as watch:
        gc.enable()
        _train_blocks(request, plan, watch.mark)
    section, (stage, rise_bytes) = watch.sections[1], _train_blocks(request, plan, lambda: None)
    sizes = {"start_bytes": section.start_bytes, "live_bytes": section.peak_bytes}
    return gather({"stage": stage, "resident_rise_bytes": rise_bytes} | sizes)


def _train_blocks(request: dict[str, Any], plan: Plan, mark: Callable[[], None]) -> tuple[int, int]:
    """Trains with `mark` called before and after; returns this rank's stage, and the rise of its resident bytes."""
    job, how = _make_job(request, request["blocks"]), {name: request[name] for name in ("schedule", "microbatches")}
    how |= {"loss": job.loss, "optimizer": job.optimizer, "check": False}
    with pd.Pipeline(job.make(), plan, **how) as pipeline:
        before_bytes = restart_peak()
        mark()
        for _ in pipeline.train(_draw_batches(request)):
            pass
        mark()
        rise_bytes = read_memory("VmHWM") - before_bytes
    rank = dist.get_rank()
    return next(s for s, row in enumerate(pipeline.program.placement.ranks) if rank in row), rise_bytes


def shrink_stacks(size_bytes: int) -> None:
    """Gives threads that begin from now on, also those of gloo, stacks of a size: the limit counts all of each."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(size_bytes))
    libc.pthread_setattr_default_np(attributes)


def fit(request: dict[str, Any]) -> list[dict[str, float]]:
    """Trains GPTs one after the other in limited memory; returns what each rank held of the last one.

    `base_bytes` is what the limit counts besides, after the first one: what the process has touched of its own memory,
    and what it has not, such as most of its threads' stacks and of the buffers of BLAS.
    """
    try:
        figures: dict[str, float] = {}
        for task in request["jobs"]:
            plan, job = Plan.load(task["plan"]), _make_job(request, task["blocks"])
            stored_bytes = _count_stored(plan)
            if request["limit_bytes"] is not None:
                soft_bytes = request["limit_bytes"] - stored_bytes
                resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, resource.RLIM_INFINITY))
            before_bytes = restart_peak()
            train_job = _train_pipeline if request["runs"] == "pipeline" else partial(_train_plainly, request["runs"])
            ends_s, sizes = train_job(job, plan, request["minibatches"])
            others_bytes = sizes["RssShmem"] - stored_bytes if stored_bytes else 0
            figures["samples_per_s"] = plan.batch * (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])
            figures["rise_bytes"] = read_memory("VmHWM") - before_bytes - others_bytes
            restart_peak()
            figures.setdefault("base_bytes", sizes["VmData"] - sizes["RssAnon"] + read_memory("RssAnon"))
        return gather(figures)
    except (RuntimeError, MemoryError, pd.PipelineError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"rank {dist.get_rank()}: {why}", file=sys.stderr, flush=True)
        lacks_memory = any(word in why.lower() for word in ("memory", "alloc", "new thread"))
        os._exit(errno.ENOMEM if lacks_memory else 1)  # others may wait for this one in a collective


def sleep(request: dict[str, Any]) -> float:
    """Returns the seconds of a minibatch of a plan while the pipeline is full."""
    plan, ends_s = scale_plan(Plan.load(request["plan"]), request["dilation"]), []
    with build_emulated_pipeline(plan, schedule=plan.schedule, microbatches=plan.microbatches) as pipeline:
        for _ in pipeline.train(make_emulated_batches(pipeline, request["minibatches"])):
            ends_s.append(time.perf_counter())
    return (ends_s[-2] - ends_s[0]) / (len(ends_s) - 2)  # no minibatch begins beside the last one


def _count_stored(plan: Plan) -> int:
    """Returns the bytes of this rank's weights in memory that all ranks share, which RLIMIT_DATA does not count."""
    if not plan.schedule.startswith("roundpipe"):
        return 0
    rows = zip(plan.stages, plan.placement.ranks, strict=True)
    return sum(stage.parameter_bytes for stage, ranks in rows if dist.get_rank() in ranks)


def _read_sizes() -> dict[str, int]:
    return {name: read_memory(name) for name in ("VmData", "RssAnon", "RssShmem")}


def _train_pipeline(job: Job, plan: Plan, minibatches: int) -> tuple[list[float], dict[str, int]]:
    """Trains by a plan; returns when each minibatch ended, and the kernel's sizes while all threads are there."""
    ends_s = []
    with torch.device("meta"):
        model = job.make()
    how = {"loss": job.loss, "optimizer": job.optimizer, "targets": lambda batch: batch[1], "check": False}
    with pd.Pipeline(model, plan, **how) as pipeline:
        for _ in pipeline.train([job.batch(plan.batch)] * minibatches):
            ends_s.append(time.perf_counter())
        return ends_s, _read_sizes()


def _train_plainly(runs: str, job: Job, plan: Plan, minibatches: int) -> tuple[list[float], dict[str, int]]:
    """Trains as `_train_pipeline` by a loop of torch's: alone ('one'), 'ddp' or 'fsdp', a microbatch at a time."""
    with torch.device("meta" if runs == "fsdp" else "cpu"):
        model: Any = job.make()
    if runs == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # or there is each gradient twice
    elif runs == "fsdp":
        shard_fully(model)
    optimizer, (inputs, targets) = job.optimizer(model.parameters()), job.batch(job.samples)
    parts, ends_s = plan.microbatches // dist.get_world_size(), []
    for _ in range(minibatches):
        for part in range(parts):
            with model.no_sync() if runs == "ddp" and part < parts - 1 else nullcontext():
                torch.autograd.backward(job.loss(model(inputs), targets) / parts)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
    return ends_s, _read_sizes()


if __name__ == "__main__":
    shrink_stacks(1 << 20)  # of 8 MiB
    tasks = {"profile": profile, "train": train, "fit": fit, "sleep": sleep}
    answer_request(lambda request: tasks[request["do"]](request))

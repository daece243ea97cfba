"""Training runs whose live bytes are known from the allocator, and what was predicted of them."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.plan.choices import Choices
from pipedream.planner import manual_plan
from pipedream.planner.tables.search_space import apply_depth
from pipedream.profiler.sizes import Allocations
from pipedream.runtime.comm import shared_memory
from pipedream.runtime.update.overlapped import OverlappedUpdate, UpdateThread
from pipedream.workflows.methods import occupancy_of

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=0.001)}


@dataclass(frozen=True)
class Living:
    """A run.

    Attributes:
        schedule, optimizer, recompute, microbatches: how it trains.
        frozen: half of the weights of each block, and all of the first two blocks.
        optimizer_state: 'host': an update that a thread would make begins when it is waited for.
        replicas: replicas of each stage; stages have as equal numbers of blocks as possible.
        width, blocks, batch: sizes of the model and its input.
    """

    schedule: str = "pipedream"
    replicas: tuple[int, ...] = (1, 1)
    optimizer: str = "sgd"
    recompute: bool = False
    frozen: bool = False
    optimizer_state: str = "device"
    microbatches: int | None = None
    width: int = 192
    blocks: int = 6
    batch: int = 240

    def __str__(self) -> str:
        words = [self.schedule, "-".join(map(str, self.replicas)), self.optimizer]
        words += [self.optimizer_state] * (self.optimizer_state != "device")
        return " ".join([*words, *(["recompute"] if self.recompute else []), *(["frozen"] if self.frozen else [])])


class Block(nn.Module):
    """A residual block, as in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


def model_of(run: Living) -> nn.Sequential:
    """Makes the model."""
    width = run.width
    blocks = [Block(width) for _ in range(run.blocks)]
    for number, block in enumerate(blocks if run.frozen else ()):
        (block if number < 2 else block.inner).requires_grad_(False)
    return nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10))


@cache
def plan_of(run: Living) -> pd.Plan:
    """Profiles the model and cuts it; peaks are those that the planner predicts."""
    torch.manual_seed(0)
    x, y = torch.randn(run.batch, 64), torch.randint(10, (run.batch,))
    profile = pd.profile(
        model_of(run),
        x,
        loss=lambda out: F.cross_entropy(out, y),
        optimizer=OPTIMIZERS[run.optimizer],
        warmup=1,
        runs=1,
    )
    cluster, choices = pd.Cluster.flat(sum(run.replicas)), Choices(optimizer_state=run.optimizer_state)
    stages = len(run.replicas)
    cuts = tuple(1 + (s * run.blocks) // stages for s in range(1, stages))
    plan = manual_plan(
        profile,
        cluster,
        cuts,
        run.replicas,
        choices=choices,
        occupancy=occupancy_of(run.schedule, run.microbatches),
        microbatches=run.microbatches or 1,
    )
    if not run.recompute:
        return plan
    from pipedream.planner.tables.search_space import SearchSpace

    space = SearchSpace.of(
        profile,
        plan.cluster,
        choices=choices,
        occupancy=occupancy_of(run.schedule, run.microbatches),
        microbatches=run.microbatches or 1,
    )
    again = tuple(replace(stage, recompute=True) for stage in plan.stages)
    return apply_depth(space, replace(plan, stages=again), plan.in_flight)


def lived(run: Living, plan: pd.Plan, minibatches: int = 10) -> tuple[int, int, int]:
    """Trains as one rank; returns its stage, the most bytes that lived, and those before the first minibatch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():  # in a process of its own; shared memory is not that of torch's allocator
        shared_memory.is_supported = lambda: False
        UpdateThread.begin = lambda self, op, number, make: OverlappedUpdate(op, number, cast(Any, _Late(make)))  # type: ignore[method-assign]
    torch.manual_seed(0)
    with Allocations(torch.device("cpu")) as watch:
        gc.enable()
        pipeline = pd.Pipeline(
            model_of(run),
            plan,
            schedule=run.schedule,
            microbatches=run.microbatches,
            loss=F.cross_entropy,
            optimizer=OPTIMIZERS[run.optimizer],
            check=False,  # it needs memory before training, which no plan counts
        )
        with pipeline:
            watch.mark()
            list(pipeline.train(_Loader(run.batch, minibatches)))
            watch.mark()
    section = watch.sections[1]
    stage = next(s for s, row in enumerate(pipeline.program.placement.ranks) if rank in row)
    return stage, section.peak_bytes, section.start_bytes


class _Late:
    """An update that begins when it is waited for, in the thread that waits, whose allocations are seen."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make

    def result(self) -> tuple[float, float]:
        self._make()
        return 0.0, 0.0


class _Loader:
    def __init__(self, batch: int, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Any:
        for _ in range(self.count):
            yield torch.randn(self.batch, 64), torch.randint(10, (self.batch,))

    def __len__(self) -> int:
        return self.count

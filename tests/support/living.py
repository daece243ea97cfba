"""Training runs whose live bytes are known from the allocator, and what was predicted of them."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from built import Built
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.profiler.sizes import Allocations
from pipedream.runtime.comm import shared_memory
from pipedream.runtime.update.overlapped import OverlappedUpdate, UpdateThread

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


def model_of(run: Living) -> nn.Sequential:
    """Makes a model of residual blocks, as in transformers."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))

    first, width, blocks = nn.Linear(64, run.width), run.width, []
    for number in range(run.blocks):
        linears = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        block = Built(forward, norm=nn.LayerNorm(width), inner=linears[0], outer=linears[1])
        if run.frozen:
            (block if number < 2 else linears[0]).requires_grad_(False)
        blocks.append(block)
    return nn.Sequential(first, *blocks, nn.Linear(width, 10))


@cache
def plan_of(run: Living) -> pd.Plan:
    """Profiles the model and cuts it; peaks are those that the planner predicts."""
    torch.manual_seed(0)
    x, y = torch.randn(run.batch, 64), torch.randint(10, (run.batch,))
    optimizer, stages = OPTIMIZERS[run.optimizer], len(run.replicas)
    profile = pd.profile(
        model_of(run), x, loss=lambda out: F.cross_entropy(out, y), optimizer=optimizer, warmup=1, runs=1
    )
    return pd.plan(
        profile,
        pd.Cluster.flat(sum(run.replicas)),
        schedule=run.schedule,
        microbatches=run.microbatches,
        cuts=tuple(1 + (s * run.blocks) // stages for s in range(1, stages)),
        shape=run.replicas,
        optimizer_state=run.optimizer_state,
        recompute="always" if run.recompute else None,
    )


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

"""One process of the memory benchmark: profiles the model, or trains as one rank and reports the peaks of all ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pipedream as pd
from pipedream.core.plan.plan import Plan
from pipedream.profiler.sizes import Allocations

sys.path.append(str(Path(__file__).parents[1]))
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


class Loader:
    """Fresh minibatches, so that none is held but by the pipeline."""

    def __init__(self, batch: int, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.count):
            yield torch.randn(self.batch, FEATURES), torch.randint(CLASSES, (self.batch,))

    def __len__(self) -> int:
        return self.count


def model_of(width: int, blocks: int) -> nn.Sequential:
    """Makes the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, width), *(Block(width) for _ in range(blocks)), nn.Linear(width, CLASSES))


def profile(request: dict[str, Any]) -> None:
    """Measures the model with an optimizer into a file."""
    x, y = next(iter(Loader(request["batch"], 1)))
    pd.profile(
        model_of(request["width"], request["blocks"]),
        x,
        loss=lambda output: F.cross_entropy(output, y),
        optimizer=OPTIMIZERS[request["optimizer"]],
        warmup=0,
        runs=1,
    ).save(request["file"])


def train(request: dict[str, Any]) -> list[dict[str, int]]:
    """Trains as one rank; returns what each rank held."""
    plan = Plan.load(request["plan"])
    with Allocations(torch.device("cpu")) as watch:
        gc.enable()
        how = {name: request[name] for name in ("schedule", "microbatches")}
        how |= {"loss": F.cross_entropy, "optimizer": OPTIMIZERS[request["optimizer"]], "check": False}
        with pd.Pipeline(model_of(request["width"], request["blocks"]), plan, **how) as pipeline:
            before = restart_peak()
            watch.mark()
            for _ in pipeline.train(Loader(request["batch"], request["minibatches"])):
                pass
            watch.mark()
            highest = read_memory("VmHWM")
    section, rank = watch.sections[1], dist.get_rank()
    stage = next(s for s, row in enumerate(pipeline.program.placement.ranks) if rank in row)
    sizes = {"start_bytes": section.start_bytes, "live_bytes": section.peak_bytes}
    return gather({"stage": stage, "resident_rise_bytes": highest - before} | sizes)


if __name__ == "__main__":
    answer_request(lambda request: {"profile": profile, "train": train}[request["do"]](request))

"""The same transformer trained by a Pipeline on a mesh and by torch's own parallel modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import pipedream

HEAD, WORDS = 64, 128
Batch = tuple[torch.Tensor, torch.Tensor]
OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
NAMES = {f"*.{name}.weight": "heads d_model" for name in ("query", "key", "value")} | {
    "*.mixed.weight": "d_model heads",
    "*.up.weight": "d_ff d_model",
    "*.down.weight": "d_model d_ff",
}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (project(x).unflatten(2, (-1, HEAD)).transpose(1, 2) for project in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        output: torch.Tensor = self.mixed(y.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(F.gelu(self.up(x)))
        return output


class Block(nn.Module):
    """A layer of a transformer; no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.feed_forward = Attention(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        output: torch.Tensor = x + self.feed_forward(self.norms[1](x))
        return output


class Shape:
    """Of the model and its batches."""

    def __init__(self, width: int, blocks: int, batch: int, length: int) -> None:
        self.width, self.blocks, self.batch, self.length = width, blocks, batch, length

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        blocks = (Block(self.width) for _ in range(self.blocks))
        return nn.Sequential(nn.Embedding(WORDS, self.width), *blocks, nn.Linear(self.width, WORDS))

    def batches(self, count: int) -> list[Batch]:
        size = self.batch, self.length
        return [(torch.randint(WORDS, size), torch.randint(WORDS, size)) for _ in range(count)]


def _compute_loss(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), words.flatten())


def plan_of(layers: int, mesh: str) -> pipedream.Plan:
    """Returns a plan with a stage for each mesh of `mesh`; the first has all layers but one for each other."""
    count = len(mesh.split("/"))
    ends = range(layers - count + 1, layers + 1)
    plan = pipedream.Plan.uniform(count)
    stages = [replace(stage, first=a, last=b) for stage, a, b in zip(plan.stages, [0, *ends], ends, strict=False)]
    return replace(plan, stages=tuple(stages)).with_mesh(mesh)


class Ours:
    """A Pipeline on a mesh."""

    def __init__(self, shape: Shape, mesh: str, layout: pipedream.Layout, schedule: str = "1f1b") -> None:
        self.pipeline = pipedream.Pipeline(
            shape.model(),
            plan_of(shape.blocks + 2, mesh),
            layout=layout,
            schedule=schedule,
            microbatches=1 if schedule == "1f1b" else None,
            loss=_compute_loss,
            inputs=lambda batch: batch[0],
            targets=lambda batch: batch[1],
            optimizer=OPTIMIZER,
            sample=shape.batches(1)[0][0],
            check=False,
        )
        self.pipeline.__enter__()

    def train(self, batches: list[Batch]) -> float:
        """Returns the last loss."""
        return [done.loss for done in self.pipeline.train(batches)][-1]

    def close(self) -> None:
        self.pipeline.__exit__(None, None, None)


class Torchs:
    """A plain loop with modules that torch has made parallel.

    Args:
        part: of a batch, what this rank computes.
    """

    def __init__(self, model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model, self._part = model, part
        self._optimizer: Any = OPTIMIZER(model.parameters())

    def train(self, batches: list[Batch]) -> float:
        """Returns the last loss, of this rank's part."""
        for x, y in batches:
            loss = _compute_loss(self._model(self._part(x)), self._part(y))
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
        return float(loss.detach())

    def close(self) -> None:
        pass


def _train_tensor_parallel(shape: Shape) -> Torchs:
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("model",)), shape.model()
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    ways = {"attention": whole, "feed_forward": whole}
    ways |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    ways |= {
        "feed_forward.up": ColwiseParallel(),
        "attention.mixed": RowwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    for block in model[1:-1]:
        parallelize_module(block, mesh, ways)
    return Torchs(model, lambda whole: whole)


def _train_fully_sharded(shape: Shape) -> Torchs:
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), shape.model()
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Torchs(model, lambda whole: whole.chunk(2)[mesh.get_local_rank()])


TRAINERS: dict[str, dict[str, Callable[[Shape], Ours | Torchs]]] = {
    "model": {
        "torch": _train_tensor_parallel,
        "ours": lambda shape: Ours(shape, "model:2", pipedream.Layout("heads:model, d_ff:model", names=NAMES)),
    },
    "data": {
        "torch": _train_fully_sharded,
        "ours": lambda shape: Ours(shape, "data:2", pipedream.Layout("batch:data", shard_weights="data")),
    },
}

"""One rank of a question; rank 0 prints what all found as a JSON value.

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pipedream

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import answer_request, collect_rounds, gather, read_memory, restart_peak

# -- the same transformer trained by a Pipeline on a mesh and by torch's own parallel modules ------

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


# -- what is measured ------------------------------------------------------------------------------

_KINDS = "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"


def _time_trainers(request: dict[str, Any]) -> dict[str, Any]:
    """Trainer -> rounds of [wall seconds of the slowest rank, CPU seconds of all ranks], per minibatch."""
    shape = Shape(**request["shape"])
    trainers = {name: make(shape) for name, make in TRAINERS[request["question"]].items()}
    torch.manual_seed(1)
    batches = shape.batches(request["minibatches"])
    collectives, losses = {}, {}
    for name, trainer in trainers.items():
        trainer.train(batches)  # the first minibatches make buffers
        with _Collectives() as counter:
            loss = trainer.train(batches[:1])
        losses[name], collectives[name] = fmean(gather(loss)), counter.counts
    if abs(losses["torch"] - losses["ours"]) > 1e-3 * losses["torch"]:
        raise SystemExit(f"the two train differently: losses {losses}")
    runs = {name: partial(trainer.train, batches) for name, trainer in sorted(trainers.items())}
    rounds = _time_rounds(runs, request)
    for trainer in trainers.values():
        trainer.close()
    return {"rounds": rounds, "collectives": collectives}


def _time_rounds(runs: dict[str, Callable[[], object]], request: dict[str, Any]) -> dict[str, list[Any]]:
    """Name -> rounds of [wall seconds of the slowest rank, CPU seconds of all ranks], per minibatch."""

    def time_ranks(name: str) -> list[float]:
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        runs[name]()
        ranks = gather((time.perf_counter() - start[0], time.process_time() - start[1]))
        wall_s, cpu_s = max(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)
        return [wall_s / request["minibatches"], cpu_s / request["minibatches"]]

    return collect_rounds(time_ranks, runs, request["rounds"])


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by their kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor computes it, by operators on parts that come here again
        name = str(func).replace("allreduce", "all_reduce").replace("allgather", "all_gather")
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts.update(kind for kind in _KINDS if kind in name)
        return func(*args, **(kwargs or {}))


def _measure_memory(request: dict[str, Any]) -> float:
    """The rise of resident bytes over those of a process that has trained a tiny model, of the fullest rank."""
    make = TRAINERS[request["question"]][request["trainer"]]
    tiny = make(Shape(128, 2, 2, 8))
    tiny.train(Shape(128, 2, 2, 8).batches(2))
    before = restart_peak()
    shape = Shape(**request["shape"])
    trainer = make(shape)
    trainer.train(shape.batches(2))
    restart_peak()
    trainer.train(shape.batches(3))
    peak_bytes = max(gather(float(read_memory("VmHWM") - before)))
    for trainer_here in (tiny, trainer):
        trainer_here.close()
    return peak_bytes


def _measure_stash(request: dict[str, Any]) -> int:
    """The bytes of stashed weights on the fullest rank of the first stage, which keeps two versions."""
    shape = Shape(**request["shape"])
    rules, shard_weights = request["rules"], request["shard_weights"]
    layout = pipedream.Layout(rules, shard_weights=shard_weights, names=NAMES if "model" in rules else {})
    trainer = Ours(shape, request["mesh"], layout, "pipedream")
    trainer.train(shape.batches(4))
    stash_bytes = max(gather(_count_stashed_bytes(trainer.pipeline)))
    trainer.close()
    return stash_bytes


def _count_stashed_bytes(pipeline: Any) -> int:
    """Of all versions of the first stage but the newest, on this rank."""
    state = pipeline._session.workers_here.workers[0].stage_states.get(0)
    if state is None:
        return 0
    versions = state.versions
    newest = {handle.untyped_storage().data_ptr() for handle in versions.handles.values()}
    leaves = [leaf for weights in versions._all_sets for leaf in weights.leaves.values()]
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}
    return sum(size for place, size in storages.items() if place not in newest)


def _time_experts(request: dict[str, Any]) -> dict[str, Any]:
    """Form -> rounds of [wall seconds, CPU seconds], per minibatch; in one process."""
    layers = {}
    for form in ("dense", "sorted"):
        torch.manual_seed(0)
        layers[form] = pipedream.experts.MixtureOfExperts(
            request["d_model"], request["d_ff"], request["experts"], groups=request["groups"], form=form
        )
    size = (request[name] for name in ("groups", "tokens", "d_model"))
    x = torch.randn(*size, requires_grad=True)  # as inside of a model
    outputs = {form: _forward_backward(layer, x) for form, layer in layers.items()}
    torch.testing.assert_close(outputs["sorted"], outputs["dense"], rtol=1e-3, atol=1e-4)
    return {
        "rounds": _time_rounds({form: partial(_forward_backward, layer, x) for form, layer in layers.items()}, request)
    }


def _forward_backward(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # random routing sends the same tokens
    layer.zero_grad()
    output: torch.Tensor = layer(x)
    output.square().mean().backward()  # type: ignore[no-untyped-call]
    return output.detach()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nobody writes its output in place
    answers = {"times": _time_trainers, "memory": _measure_memory, "stash": _measure_stash, "experts": _time_experts}
    answer_request(lambda request: answers[request["do"]](request))

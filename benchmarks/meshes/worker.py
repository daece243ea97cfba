"""One rank of a question; rank 0 prints what all found as a JSON value.

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import NAMES, TRAINERS, Ours, Shape

import pipedream

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import answer_request, gather, read_memory, restart_peak

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
        with _Collectives() as seen:
            loss = trainer.train(batches[:1])
        losses[name], collectives[name] = fmean(gather(loss)), seen.counts
    if abs(losses["torch"] - losses["ours"]) > 1e-3 * losses["torch"]:
        raise SystemExit(f"the two train differently: losses {losses}")
    rounds: dict[str, list[Any]] = {name: [] for name in trainers}
    for number in range(request["rounds"]):
        for name in sorted(trainers, reverse=bool(number % 2)):
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            trainers[name].train(batches)
            used = time.perf_counter() - start[0], time.process_time() - start[1]
            ranks = gather(used)
            wall, cpu = max(rank[0] for rank in ranks), sum(rank[1] for rank in ranks)
            rounds[name].append([wall / len(batches), cpu / len(batches)])
    for trainer in trainers.values():
        trainer.close()
    return {"rounds": rounds, "collectives": collectives}


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
    state = pipeline._session.local.workers[0].stage_states.get(0)
    if state is None:
        return 0
    versions = state.versions
    newest = {handle.untyped_storage().data_ptr() for handle in versions.handles.values()}
    leaves = [leaf for kept in versions._all_sets for leaf in kept.leaves.values()]
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
    x = torch.randn(
        request["groups"], request["tokens"], request["d_model"], requires_grad=True
    )  # as inside of a model
    outputs = {form: _forward_backward(layer, x) for form, layer in layers.items()}
    torch.testing.assert_close(outputs["sorted"], outputs["dense"], rtol=1e-3, atol=1e-4)
    rounds: dict[str, list[Any]] = {form: [] for form in layers}
    for number in range(request["rounds"]):
        for form in sorted(layers, reverse=bool(number % 2)):
            start = time.perf_counter(), time.process_time()
            for _ in range(request["minibatches"]):
                _forward_backward(layers[form], x)
            used = time.perf_counter() - start[0], time.process_time() - start[1]
            rounds[form].append([seconds / request["minibatches"] for seconds in used])
    return {"rounds": rounds}


def _forward_backward(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # random routing sends the same tokens
    layer.zero_grad()
    output: torch.Tensor = layer(x)
    output.square().mean().backward()  # type: ignore[no-untyped-call]
    return output.detach()


def _answer(request: dict[str, Any]) -> Any:
    answers = {"times": _time_trainers, "memory": _measure_memory, "stash": _measure_stash, "experts": _time_experts}
    return answers[request["do"]](request)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nobody writes its output in place
    answer_request(_answer)

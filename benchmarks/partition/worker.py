"""One of several ranks: runs what it reads from its standard input, one JSON object a line; rank 0 answers.

{"do": "link", "sizes": [...], "times": ...}
                                  seconds of an exchange in which each rank sends and receives so many bytes
{"do": "step", "model": ..., "method": ..., "rounds": ..., "link": [bytes per second, latency]}
                                  seconds of a step: together, and of each rank alone

Started by run.py, which sets torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import TIMED
from torch import nn

from pipedream import partition
from pipedream.core.plan.cost import EXCHANGE
from pipedream.extensions.meshes.layouts.step import GroupRank, PartitionedStep
from pipedream.extensions.meshes.layouts.tracing.trace import TracedStep
from pipedream.extensions.meshes.sharding.functions import exchange

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import gather
from worker_processes import answer_lines


class AloneRank(GroupRank):
    """A rank that computes its own parts, and packs and unpacks what it would send and get; nothing is sent."""

    def exchange(self, *pieces: Any) -> Any:
        with mock.patch("pipedream.extensions.meshes.layouts.step.exchange", lambda incoming, *_: incoming.zero_()):
            return super().exchange(*pieces)


@cache
def _trace(name: str) -> tuple[nn.Module, torch.Tensor, TracedStep]:
    return TIMED[name].traced()


def _link(sizes: list[int], times: int) -> list[float]:
    """Returns the mean seconds of an exchange of each size.

    They come between products, as in a step: a rank that computes sees late that something has arrived.
    """
    x = torch.randn(192, 192)

    def multiply(exchanged: Callable[[], object]) -> None:
        for _ in range(times):
            x @ x
            exchanged()

    def median_s(exchanged: Callable[[], object]) -> float:
        return statistics.median(_time_together(lambda: multiply(exchanged)) for _ in range(3))

    alone_s = median_s(lambda: None)
    return [(median_s(_exchange_of(size)) - alone_s) / times for size in sizes]


def _exchange_of(size: int) -> Callable[[], None]:
    """Returns what sends so many bytes from each rank to the others, in equal parts."""
    place, count = dist.get_rank(), dist.get_world_size()
    parts = [0 if rank == place else size // (count - 1) for rank in range(count)]
    incoming, outgoing = (torch.zeros(sum(parts), dtype=torch.uint8) for _ in range(2))
    group: Any = dist.group.WORLD
    return lambda: exchange(incoming, outgoing, parts, parts, group.group_name, EXCHANGE)


def _time_together(run: Callable[[], object]) -> float:
    """Returns the seconds until all ranks have ended, from a common start."""
    dist.barrier()
    began = time.perf_counter()
    run()
    return float(max(gather(time.perf_counter() - began)))


def _step(model: str, method: str, rounds: int, link: tuple[float, float]) -> dict[str, Any]:
    """Returns the seconds of each round: together, and of the slowest rank alone, while the others wait.

    Also what the exchanges are, and the bytes that all ranks sent.
    """
    module, sample, step = _trace(model)
    plan = partition(step.operators, dist.get_world_size(), method, batch="x0")
    rank = GroupRank()
    several, alone = (PartitionedStep(step, plan, step_rank) for step_rank in (rank, AloneRank()))
    values = {step.parameters[name]: tensor.detach() for name, tensor in module.named_parameters()}
    values |= {step.buffers[name]: tensor for name, tensor in module.named_buffers()} | {step.inputs[0]: sample}
    parts = {name: several.part(name, tensor) for name, tensor in values.items()}
    results = [*step.gradients.values(), *step.updated.values(), *step.outputs]
    several.run(parts, results)
    sent_bytes = sum(gather(rank.sent_bytes))
    alone.run(parts, results)
    gc.collect()
    gc.disable()
    together_s, alone_s = [], []
    for _ in range(rounds):
        alone_s.append(_time_in_turn(lambda: alone.run(parts, results)))
        together_s.append(_time_together(lambda: several.run(parts, results)))
    gc.enable()
    sizes = {name: dtype.itemsize for name, dtype in step.dtypes.items()}
    busiest_bytes = several.exchanges.list_busiest_bytes(sizes, len(step.calls))
    bytes_per_s, latency_s = link  # in each direction at once
    return {
        "together_s": together_s,
        "alone_s": alone_s,
        "exchanges": len(busiest_bytes),
        "exchange_s": latency_s * len(busiest_bytes) + sum(busiest_bytes) / bytes_per_s,
        "sent_bytes": sent_bytes,
        "predicted_bytes": several.sent_bytes,
    }


def _time_in_turn(run: Callable[[], object]) -> float:
    """Returns the most seconds that one rank takes, each in its turn."""
    seconds = 0.0
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
    return float(max(gather(seconds)))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    tasks: dict[str, Callable[..., Any]] = {"link": _link, "step": _step}
    answer_lines(lambda request: tasks[request.pop("do")](**request))

"""A short run over layers that do next to nothing, which shows what the runtime itself costs on these workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import Span, Timeline
from pipedream.runtime.assemble import Blueprint, Settings
from pipedream.runtime.comm.process_group import gather_texts, world_group
from pipedream.runtime.results.losses import Loss
from pipedream.runtime.session import Session

__all__ = ["Calibration", "calibrate"]

_NUMBERS = (1 << 4, 1 << 15)  # in a small and in a large message: so few that torch computes them in one thread
_COUNTED = (32, 12)  # minibatches of each size
_WARM_UP = 8  # further ones, before them: buffers grow, caches fill


@dataclass(frozen=True)
class Calibration:
    """What a minibatch of small messages, and one of large messages, costs.

    Attributes:
        message_bytes: of an activation, and of its gradient.
        passes_s, updates_s: of the spans of all forwards and backwards, and of all updates.
        layers_s: of the passes of all layers, and of the loss, alone.
        other_s: CPU besides these spans: of each worker; or, in a single process, of all together.
        arrival_s: from the beginning of a send to the end of its receive; 0 in a single process.
    """

    message_bytes: tuple[int, int]
    passes_s: tuple[float, float]
    updates_s: tuple[float, float]
    layers_s: tuple[float, float]
    other_s: tuple[tuple[float, ...], tuple[float, ...]]
    arrival_s: tuple[float, float]


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight


def calibrate(program: Program, evaluation: Program) -> Calibration:
    """Runs a program of one layer for each stage; every rank calls it and gets the same answer.

    Random generators are not read.
    """
    count = program.placement.stages
    layers = [_Scale() for _ in range(count)]
    graph = LayerGraph.chain(tuple(Layer(str(i), "Scale", (f"{i}.weight",)) for i in range(count)))
    blueprint = Blueprint(
        programs=[program],
        evaluation=evaluation,
        stages=[[(str(i), layer)] for i, layer in enumerate(layers)],
        settings=Settings(Loss(_loss), _sgd, metrics={}),
        device=torch.device("cpu"),
    )
    samples = [torch.ones(1, size, dtype=torch.float64) for size in _NUMBERS]
    layers_s = [_layers_s(count, *row) for row in zip(samples, _COUNTED, strict=True)]
    session = Session(nn.Sequential(*layers), graph, blueprint, stuck_after_s=0)
    failed = True
    try:
        cpu_s = [_cpu_s(session, *row) for row in zip(samples, _COUNTED, strict=True)]
        timeline = session.timeline(0, 1)
        failed = False
    finally:
        session.close(failed=failed)
    everyone = world_group() if session.distributed else None
    rows = [json.loads(text) for text in gather_texts(json.dumps([cpu_s, layers_s]), everyone)]
    ends = (_WARM_UP + _COUNTED[0], 2 * _WARM_UP + sum(_COUNTED))
    found = []
    for size, (count, end) in enumerate(zip(_COUNTED, ends, strict=True)):
        passes = _spans_s(timeline, "FB", range(end - count, end))
        updates = _spans_s(timeline, "U", range(end - count + 1, end + 1))
        spans = [sum(pair) for pair in zip(passes, updates, strict=True)]
        cpu = [row[0][size] for row in rows]
        other = [a - b for a, b in zip(cpu, spans if session.distributed else [sum(spans)], strict=True)]
        arrival = _arrival_s(timeline, range(end - count, end)) if session.distributed else 0.0
        layers_alone = sum(row[1][size] for row in rows) / len(rows)
        found.append((8 * _NUMBERS[size], sum(passes), sum(updates), layers_alone, tuple(other), arrival))
    return Calibration(*zip(*found, strict=True))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).mean()


def _sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


def _cpu_s(session: Session, sample: torch.Tensor, counted: int) -> float:
    """Trains on a sample; returns the CPU time that a minibatch takes from this process's core."""
    cores, here = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # With a core to spare, the threads that send and receive take no time from the worker's.
    clock = time.thread_time if here < cores else time.process_time
    marks = []
    session.open_feed([(sample, torch.ones(1))] * (_WARM_UP + counted), lambda batch: batch)
    for _ in session.train():
        marks.append(clock())
    return (marks[-1] - marks[_WARM_UP - 1]) / counted


def _layers_s(layers: int, sample: torch.Tensor, counted: int) -> float:
    """Returns the seconds of the layers and the loss, each run as it is when a model is profiled."""

    def layer() -> None:
        values = sample.detach().requires_grad_()
        torch.autograd.grad(scale(values), [values, scale.weight], sample)

    def loss() -> None:
        values = sample.detach().requires_grad_()
        torch.autograd.grad(_loss(values, torch.ones(1)), values)

    scale = _Scale()
    return layers * _median_s(layer, counted) + _median_s(loss, counted)


def _median_s(run: Callable[[], None], counted: int) -> float:
    seconds = []
    for _ in range(_WARM_UP + counted):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds[_WARM_UP:])


def _spans_s(timeline: Timeline, kinds: str, part: range) -> list[float]:
    """Returns, for each rank, the sum over kinds of the median span in some minibatches."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in timeline.spans:
        if span.kind in kinds and span.index in part:
            found.setdefault((span.rank, span.kind), []).append(span.end_s - span.start_s)
    return [sum(median(found[rank, kind]) for kind in kinds) for rank in range(timeline.workers)]


def _arrival_s(timeline: Timeline, part: range) -> float:
    """Returns the lower quartile over gradients whose receiver was waiting for them: other processes only delay them.

    Only gradients travel from a rank to the one before it, so a span shows whose it is.
    """

    def of(kind: str) -> dict[tuple[int, int], Span]:
        found = (span for span in timeline.spans if span.kind == kind and span.index in part)
        return {(span.rank, span.index): span for span in found}

    waits, sends = of("wait"), of("send")
    last = timeline.workers - 1
    late = sorted(
        waits[last - 1, index].end_s - sends[last, index].start_s
        for index in part
        if waits[last - 1, index].start_s < sends[last, index].end_s
    )
    return max(0.0, late[len(late) // 4]) if late else 0.0

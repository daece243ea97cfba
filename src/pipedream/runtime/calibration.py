"""A short run over layers that do next to nothing, which shows what the runtime itself costs on these workers."""

from __future__ import annotations

import json
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

_NUMBERS = (1 << 4, 1 << 16)  # in a small and in a large message
_COUNTED = (32, 12)  # minibatches of each size
_WARM_UP = 8  # further ones, before them: buffers grow, caches fill


@dataclass(frozen=True)
class Calibration:
    """What a minibatch of small messages, and one of large messages, costs: sums over all workers, in seconds of CPU.

    Attributes:
        message_bytes: of an activation, and of its gradient.
        host_s: of the workers' threads.
        passes_s, updates_s: in the spans of forwards and backwards, and of updates.
        layers_s: of the layers' passes and the loss alone.
        arrival_s: from the end of a send to the end of its receive, between processes; 0 in a single one.
    """

    message_bytes: tuple[int, int]
    host_s: tuple[float, float]
    passes_s: tuple[float, float]
    updates_s: tuple[float, float]
    layers_s: tuple[float, float]
    arrival_s: tuple[float, float]


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

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
        settings=Settings(Loss(nn.functional.mse_loss), _sgd, metrics={}),
        device=torch.device("cpu"),
    )
    samples = [torch.ones(1, size) for size in _NUMBERS]
    layers_s = [_layers_s(count, *row) for row in zip(samples, _COUNTED, strict=True)]
    session = Session(nn.Sequential(*layers), graph, blueprint, stuck_after_s=0)
    failed = True
    try:
        host_s = [_host_s(session, *row) for row in zip(samples, _COUNTED, strict=True)]
        timeline = session.timeline(0, 1)
        failed = False
    finally:
        session.close(failed=failed)
    everyone = world_group() if session.distributed else None
    mine = [*host_s, *layers_s]
    small_s, large_s, *layers_s = map(sum, zip(*map(json.loads, gather_texts(json.dumps(mine), everyone)), strict=True))
    ranks = program.placement.workers if session.distributed else 1
    ends = (_COUNTED[0], sum(_COUNTED) + _WARM_UP)
    parts = [range(_WARM_UP + end - count, _WARM_UP + end) for count, end in zip(_COUNTED, ends, strict=True)]
    spans = [_typical_s(timeline, "FB", part) for part in parts]
    updates = [_typical_s(timeline, "U", range(part.start + 1, part.stop + 1)) for part in parts]
    arrivals = [_arrival_s(timeline, part) if session.distributed else 0.0 for part in parts]
    return Calibration(
        message_bytes=(4 * _NUMBERS[0], 4 * _NUMBERS[1]),
        host_s=(small_s, large_s),
        passes_s=(spans[0], spans[1]),
        updates_s=(updates[0], updates[1]),
        layers_s=(layers_s[0] / ranks, layers_s[1] / ranks),
        arrival_s=(arrivals[0], arrivals[1]),
    )


def _sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)


def _host_s(session: Session, sample: torch.Tensor, counted: int) -> float:
    """Trains on a sample; returns this thread's seconds of CPU per minibatch."""
    marks = []
    session.open_feed([(sample, sample)] * (_WARM_UP + counted), lambda batch: batch)
    for _ in session.train():
        marks.append(time.thread_time())
    return (marks[-1] - marks[_WARM_UP - 1]) / counted


def _layers_s(layers: int, sample: torch.Tensor, counted: int) -> float:
    """Returns the seconds of the layers and the loss, each run as it is when a model is profiled."""

    def layer() -> None:
        values = sample.detach().requires_grad_()
        torch.autograd.backward(scale(values), sample)

    def loss() -> None:
        values = sample.detach().requires_grad_()
        nn.functional.mse_loss(values, sample).backward()

    scale = _Scale()
    return layers * _median_s(layer, counted) + _median_s(loss, counted)


def _median_s(run: Callable[[], None], counted: int) -> float:
    seconds = []
    for _ in range(_WARM_UP + counted):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds[_WARM_UP:])


def _typical_s(timeline: Timeline, kinds: str, part: range) -> float:
    """Returns the median of each rank's spans of these kinds in some minibatches, summed over ranks and kinds."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in timeline.spans:
        if span.kind in kinds and span.index in part:
            found.setdefault((span.rank, span.kind), []).append(span.end_s - span.start_s)
    return sum(map(median, found.values()))


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
        waits[last - 1, index].end_s - sends[last, index].end_s
        for index in part
        if waits[last - 1, index].start_s < sends[last, index].end_s
    )
    return max(0.0, late[len(late) // 4]) if late else 0.0

"""Measures the runtime's own costs on these workers, by a short run of layers of known cost."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from pipedream.core.cold import WARM_UP, busy_wait_cold_cache
from pipedream.core.malloc import keep_freed_memory
from pipedream.core.model.graph import Layer, LayerGraph
from pipedream.core.plan.choices import DEFAULTS
from pipedream.core.plan.codec import list_encodings
from pipedream.core.schedule.program import Program
from pipedream.core.schedule.timeline import WORK, Span, Timeline
from pipedream.runtime.blueprint import Blueprint, Settings
from pipedream.runtime.comm.process_group import gather_json, world_group
from pipedream.runtime.data.rng import preserved_rng
from pipedream.runtime.recorder import Moment
from pipedream.runtime.session.session import Session
from pipedream.services.failure.guard import Guard
from pipedream.services.joining.joining import is_distributed
from pipedream.services.losses.losses import Loss
from pipedream.services.losses.scoring import LossScorer
from pipedream.services.probe.survey import lower_quartile
from pipedream.services.results.measurements import Measurements
from pipedream.services.results.recorder import SpanRecorder

_MESSAGE_NUMBERS = (1 << 4, 1 << 15)  # a small and a large message: few enough for torch to compute in one thread
_MINIBATCHES = (32, 16)  # measured, with each size
_ENCODED_NUMBERS = 1 << 16
_SHORT_WARM_UP = 4


@dataclass(frozen=True)
class Calibration:
    """The runtime's costs with messages of one size: medians of minibatches, lower quartiles of passes and updates.

    Attributes:
        message_bytes: of an activation, and of its gradient.
        op_s: of a forward or a backward, beyond its layers.
        update_s: of an update, beyond the step of the optimizer.
        other_s: processor time of a minibatch, of all threads of a process, beyond forwards, backwards and updates: for
            each process. A link makes it wait, which takes none.
        arrival_s: from the beginning of a send to the end of its receive; 0 in a single process.
    """

    message_bytes: int
    op_s: float
    update_s: float
    other_s: tuple[float, ...]
    arrival_s: float


class _Meter:
    """Reads a process's processor time when its first worker begins a minibatch, without that of the workers' ops."""

    def __init__(self) -> None:
        self.ops_s = 0.0
        self.other_s: dict[int, float] = {}

    def make_recorder(self, rank: int, device: torch.device) -> SpanRecorder:
        return _MeteredRecorder(self, rank, device)

    def measure_other_s(self, part: range) -> float:
        """Returns the median of minibatches."""
        return median(after - before for before, after in pairwise(self.other_s[index] for index in part))


class _MeteredRecorder(SpanRecorder):
    def __init__(self, meter: _Meter, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self._meter, self._began_s = meter, 0.0
        self.mark = self._begin

    def _begin(self) -> float:
        self._began_s = time.thread_time()
        return time.perf_counter()

    def note(self, kind: str, stage: int, index: int, start: Moment) -> None:
        if kind in WORK:
            self._meter.ops_s += time.thread_time() - self._began_s
        if kind == "F":  # other workers of this process begin the minibatch later
            self._meter.other_s.setdefault(index, time.process_time() - self._meter.ops_s)
        super().note(kind, stage, index, start)


class _Layer(nn.Module):
    """Keeps its core busy in both passes, as real layers do while messages travel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        busy_wait_cold_cache()
        result = values * self.weight
        if result.requires_grad:
            result.register_hook(lambda gradient: busy_wait_cold_cache())  # type: ignore[no-untyped-call]
        return result


def calibrate(program: Program, evaluation: Program) -> tuple[Calibration, Calibration]:
    """Runs a program of one layer for each stage, with small and then with large messages.

    Every rank calls it and gets the same answer. The random generators are left as they were.
    """
    count, meter = program.placement.stages, _Meter()
    warm_ups = WARM_UP, max(_SHORT_WARM_UP, count)  # the second fills the pipeline again
    layers = [_Layer() for _ in range(count)]
    graph = LayerGraph.chain(tuple(Layer(str(i), "Layer", (f"{i}.weight",)) for i in range(count)))
    blueprint = Blueprint(
        programs=[program],
        evaluation=evaluation,
        stages=[[(str(i), layer)] for i, layer in enumerate(layers)],
        settings=Settings(
            partial(LossScorer, Loss(_mean_product), {}), lambda named: _NoStep([p for _, p in named], lr=0.0)
        ),
        device=torch.device("cpu"),
        make_recorder=meter.make_recorder,
    )
    samples = [torch.ones(1, size, dtype=torch.float64) for size in _MESSAGE_NUMBERS]
    layers_alone_s = [_measure_layers_s(count, *row) for row in zip(samples, _MINIBATCHES, strict=True)]
    session = Session(
        nn.Sequential(*layers),
        graph,
        blueprint,
        make_guard=partial(Guard.of_session, stuck_after_s=0),
        prepare=lambda workers_here: keep_freed_memory(),
    )
    measurements, failed = Measurements(session.workers_here), True
    try:
        for sample, *counts in zip(samples, warm_ups, _MINIBATCHES, strict=True):
            batches: Any = [(sample, torch.ones(1))] * sum(counts)
            # This loader costs next to nothing; the seconds of a recipe's own loader are added later.
            loader = DataLoader(batches, shuffle=True, collate_fn=itemgetter(0))
            with preserved_rng(loader):
                session.streams.open_feed(loader, lambda batch: batch)
                for _ in session.streams.train():
                    pass
        timeline = measurements.collect_timeline(1)
        failed = False
    finally:
        session.close(failed=failed)
    group = world_group() if session.workers_here.distributed else None
    small = range(warm_ups[0], warm_ups[0] + _MINIBATCHES[0])
    large = range(small.stop + warm_ups[1], small.stop + warm_ups[1] + _MINIBATCHES[1])
    rows = gather_json([*zip(layers_alone_s, map(meter.measure_other_s, (small, large)), strict=True)], group)

    def summarize(number: int, part: range) -> Calibration:
        layers_s = sum(row[number][0] for row in rows) / len(rows)
        return Calibration(
            message_bytes=8 * _MESSAGE_NUMBERS[number],
            op_s=(_sum_spans_s(timeline, "FB", part) - layers_s) / (2 * count),
            update_s=_sum_spans_s(timeline, "U", range(part.start + 1, part.stop + 1)) / count,
            other_s=tuple(row[number][1] for row in rows),
            arrival_s=_measure_arrival_s(timeline, part) if session.workers_here.distributed else 0.0,
        )

    return summarize(0, small), summarize(1, large)


def measure_encodings() -> dict[str, float]:
    """Returns for each encoding the seconds of encoding or decoding, per byte in memory; the same on every rank."""
    tensor = torch.randn(_ENCODED_NUMBERS, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run(encoding: str) -> None:
        DEFAULTS.choosing(messages=encoding).messages.imitate_message(tensor)

    seconds = {encoding: _measure_s(partial(run, encoding), _MINIBATCHES[1]) for encoding in list_encodings()}
    group = world_group() if is_distributed() else None
    rows = gather_json(seconds, group)
    return {encoding: median(row[encoding] for row in rows) / 2 / tensor.nbytes for encoding in seconds}


def _mean_product(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).mean()


class _NoStep(torch.optim.SGD):
    """An optimizer whose step takes no time: a profile has the time of the user's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""

    step.hooked = True  # type: ignore[attr-defined]  # torch then does not wrap it


def _measure_layers_s(layers: int, sample: torch.Tensor, runs: int) -> float:
    """Returns the seconds of the layers and the loss, each run as the profiler runs it."""

    def run_passes() -> None:
        values = sample.detach().requires_grad_()
        torch.autograd.grad(layer(values), [values, layer.weight], sample)

    def run_loss() -> None:
        values = sample.detach().requires_grad_()
        torch.autograd.grad(_mean_product(values, torch.ones(1)), values)

    layer = _Layer()
    return layers * _measure_s(run_passes, runs) + _measure_s(run_loss, runs)


def _measure_s(run: Callable[[], None], runs: int) -> float:
    seconds = []
    for _ in range(_SHORT_WARM_UP + runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return lower_quartile(seconds[_SHORT_WARM_UP:])


def _sum_spans_s(timeline: Timeline, kinds: str, part: range) -> float:
    """Returns the sum, over ranks and kinds, of the lower quartile of the spans of the minibatches `part`."""
    durations: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in kinds and span.index in part:
            durations[span.rank, span.kind].append(span.end_s - span.start_s)
    return sum(map(lower_quartile, durations.values()))


def _measure_arrival_s(timeline: Timeline, part: range) -> float:
    """Returns the lower quartile, as noise only delays, over gradients for which the receiver waited.

    Only gradients travel from the last rank to the one before it, so its sends are gradients.
    """

    def index_spans(kind: str) -> dict[tuple[int, int], Span]:
        spans = (span for span in timeline.spans if span.kind == kind and span.index in part)
        return {(span.rank, span.index): span for span in spans}

    waits, sends = index_spans("wait"), index_spans("send")
    last = timeline.workers - 1
    arrivals_s = sorted(
        waits[last - 1, index].end_s - sends[last, index].start_s
        for index in part
        if waits[last - 1, index].start_s < sends[last, index].end_s
    )
    return max(0.0, arrivals_s[len(arrivals_s) // 4]) if arrivals_s else 0.0

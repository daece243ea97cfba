"""RoundPipe's bubble beside that of its paper: predicted, and measured with workers that sleep.

Seconds, stages and bubbles are those of the simulations of Efficient Training on Multiple Consumer GPUs with RoundPipe
(arXiv 2604.27085, figure 16; ITcarrot/RoundPipe-artifact, pp-simulate). There a recomputation is no idle time; without
a flush the bubble is that of one minibatch, less its fill and its drain. Its 1F1B waits for gradients to recompute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipedream.core.hardware.cluster import Cluster
from pipedream.core.plan.plan import Plan
from pipedream.workflows.methods import score

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import format_table, run_processes

WORKER = Path(__file__).with_name("worker.py")
METHODS = ("1f1b", "interleaved_1f1b", "roundpipe[forwards=0]", "roundpipe[forwards=0,delay=1]")
WORKERS, MICROBATCHES = 8, 16
_EMULATED = 4
"""Workers that sleep; with as many microbatches for each."""

_MINIBATCHES = 2 * _EMULATED + 2
"""The first and the last, and twice as many as begin with different workers."""


@dataclass(frozen=True)
class Model:
    """A model on the paper's GPUs: milliseconds of a microbatch.

    Attributes:
        layer_ms: of the forward and the backward of a layer.
        head_ms: of those of the LM head, which is on the last stage.
        hop_ms: of a message.
        straight, chunks, backwards: layers of each stage with 1F1B, with interleaved 1F1B and with RoundPipe.
        published: bubbles in percent, in the order of METHODS.
    """

    name: str
    layer_ms: tuple[float, float]
    head_ms: tuple[float, float]
    hop_ms: float
    straight: list[int]
    chunks: list[int]
    backwards: list[int]
    published: tuple[float, float, float, float]


MODELS = (
    Model("Qwen3-1.7B", (7.429, 15.831), (22.0655, 43.707), 1.6, [3, 3, 4, 4, 4, 4, 4, 2], [*[1] * 18, *[2] * 5, 0],
          [2, 2, *[3] * 8, 0], (35.2, 27.8, 19.1, 4.0)),
    Model("Llama3-8B", (18.5037, 41.2066), (37.2255, 74.501), 3.2, [4] * 8, [1] * 32, [*[2] * 16, 0],
          (42.1, 30.6, 14.3, 1.3)),
    Model("GPT-OSS-20B", (21.6446, 81.7809), (44.2925, 86.264), 2.25, [3] * 8, [1] * 24, [*[1] * 24, 0],
          (41.7, 30.9, 14.0, 3.3)),
    Model("Qwen3-32B", (40.5611, 91.1743), (54.928, 108.294), 4.0, [8] * 8, [1] * 64, [*[1] * 64, 0],
          (34.9, 15.1, 6.7, 2.6)),
    Model("Qwen3-235B", (43.016, 58.376), (42.444, 43.294), 3.2, [11, *[12] * 6, 11], [0, *[1] * 94, 0],
          [*[1] * 94, 0], (31.2, 6.0, 3.3, 1.0)),
)  # fmt: skip


def make_plan(model: Model, method: str, workers: int = WORKERS) -> Plan:
    """Returns a method's plan of a model; on fewer workers than the paper's a stage of 1F1B has those of several."""
    wider, is_roundpipe = WORKERS // workers, method.startswith("roundpipe")
    counts = model.backwards if is_roundpipe else model.chunks
    if method == "1f1b":
        counts = [sum(model.straight[first : first + wider]) for first in range(0, WORKERS, wider)]
    last, order = len(counts) - 1, tuple(stage % workers for stage in range(len(counts)))
    plan = Plan.uniform(len(counts), order=order[::-1] if is_roundpipe else order)
    stages = []
    for number, (stage, count) in enumerate(zip(plan.stages, counts, strict=True)):
        forward_ms, backward_ms = (
            count * layer_ms + head_ms * (number == last)
            for layer_ms, head_ms in zip(model.layer_ms, model.head_ms, strict=True)
        )
        if not is_roundpipe:  # layers are recomputed, the LM head is not
            backward_ms += count * model.layer_ms[0]
        seconds = {"forward_s": forward_ms / 1e3, "backward_s": backward_ms / 1e3}
        stages.append(replace(stage, recompute=is_roundpipe and number < last, **seconds))
    cluster = Cluster.flat(workers, 1e30, model.hop_ms / 1e3 if workers == WORKERS else 0.0)
    return replace(plan, stages=tuple(stages), cluster=cluster, schedule=method, microbatches=MICROBATCHES // wider)


def compare_with_paper(models: Sequence[Model] = MODELS) -> Iterator[str]:
    """Yields a table: the bubbles of each model, the paper's and those predicted."""
    rows = []
    for model in models:
        pairs = zip(model.published, (score(make_plan(model, name)).bubble for name in METHODS), strict=True)
        rows.append([model.name, *(f"{paper:.1f} / {100 * predicted:.1f}" for paper, predicted in pairs)])
    yield f"Bubble in %, paper / predicted, of {WORKERS} workers and {MICROBATCHES} microbatches:\n"
    yield format_table(f"model|{'|'.join(METHODS)}", "lr", rows) + "\n"


def measure(models: Sequence[Model], dilation: float, folder: Path, log: Callable[[str], None]) -> Iterator[str]:
    """Yields a table: the bubbles of each model on fewer workers, predicted and measured.

    Args:
        dilation: factor on all seconds.
        folder: for files between processes.
    """
    rows = []
    for model in models:
        cells = []
        for method in METHODS:
            plan = make_plan(model, method, _EMULATED)
            plan.save(folder / "plan.json")
            request = {"do": "sleep", "plan": str(folder / "plan.json"), "dilation": dilation}
            minibatch_s = run_processes(WORKER, request | {"minibatches": _MINIBATCHES}, _EMULATED)
            predicted = score(plan)
            measured = 1 - (1 - predicted.bubble) * predicted.period_s * dilation / minibatch_s
            cells.append(f"{100 * predicted.bubble:.1f} / {100 * measured:.1f}")
            log(f"{model.name}, {method}: {cells[-1]}")
        rows.append([model.name, *cells])
    parts = MICROBATCHES * _EMULATED // WORKERS
    yield f"Bubble in %, predicted / measured, of {_EMULATED} workers that sleep, and {parts} microbatches:\n"
    yield format_table(f"model|{'|'.join(METHODS)}", "lr", rows) + "\n"

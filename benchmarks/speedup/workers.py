"""Four, eight and sixteen workers, emulated: plans for the papers' models on the papers' clusters.

Every worker is a process with the real runtime, which waits where it would compute; its messages and all-reduces are
real, over shaped links (docs/slow_links.md). Two cores serve up to 16 workers because a run takes `dilation` times as
long as what it stands for, and each message has `byte_scale` times the bytes; all figures are without these factors.

Needs the profiles that the original published: PIPEDREAM_PROFILES, or shared/profiles beside or above this checkout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import ceil, lcm
from pathlib import Path
from typing import Any

import torch
from paper_tables.graph_txt import GraphText
from scaffold import find_published, format_table
from table_1 import TABLE_1, Row
from torch import nn
from worker_processes import Workers, worker_processes

import pipedream as pd
from pipedream import Cluster, Plan, Profile
from pipedream.apps.cli import presets
from pipedream.apps.emulate.emulate import scale_plan
from pipedream.core.plan.cost import all_reduce_bytes
from pipedream.slow_links import Network, slow_network, why_not
from pipedream.workflows.methods import score

_SECONDS = {"test": 0.5, "short": 5.0, "full": 25.0}  # of a run
_MIN_DILATION = 4.0  # for what two cores do besides, such as passing on the messages of all-reduces
_SEGMENTS = 3
_WORKER = str(Path(__file__).parents[1] / "prediction" / "worker.py")
_CARRIED_BYTES_PER_S = 120e6  # by all links together, for which two cores need a third of their time
_WEIGHTS_BYTES = 400e6  # of all workers together, whose sums and checks the cores really compute
_QUIET = 0.05  # share of the cores' time that others may take
_AGAIN_S = {"test": 0.0, "short": 0.0, "full": 90.0}  # for running again what others disturbed

_DATA_PARALLEL, _PLANNED = "data-parallel", "any"
_GPT = "GPT-2.2B"


@dataclass(frozen=True)
class Case:
    """A plan for a model on a cluster.

    Attributes:
        table: 'speed-up', 'flush' or '2bw'.
        cluster: of `presets`, or 'flat'.
        shape: as in `pipedream.plan`; _PLANNED is our planner's own choice.
        paper: its samples per second over those of the first case with this table, model and cluster; None: not known.
    """

    table: str
    model: str
    cluster: str
    machines: int
    shape: str
    paper: float | None = None
    schedule: str = "pipedream"
    microbatches: int | None = None

    @property
    def against(self) -> tuple[Any, ...]:
        """Cases with this in common are compared."""
        return self.table, self.model, self.cluster, self.machines, self.microbatches if self.table == "2bw" else 0

    def on(self) -> Cluster:
        """Returns the cluster, whose memory is not limited, because the profiles tell no batch."""
        if self.cluster == "flat":
            return Cluster.flat(self.machines, 1.25e9)
        return replace(presets.cluster(self.cluster, self.machines), memory_bytes=None)


_FILES = {row.model: row.profile for row in TABLE_1}


def _list_cases(size: str) -> Iterator[Case]:
    """Yields cases; those of a table, model and cluster begin with what the others are compared with."""
    rows = sorted(TABLE_1, key=lambda row: (row.cluster, row.machines, row.profile))
    rows.append(Row("vgg16", "VGG-16", "flat", 8, "7-1", 5.12))  # arXiv 1806.03377, table 1
    for row in rows[: None if size == "full" else 1]:
        shape = _DATA_PARALLEL if row.config == "16" else row.config
        for other in dict.fromkeys((_DATA_PARALLEL, shape, _PLANNED)):
            paper = row.speedup if other == shape else None
            yield Case("speed-up", row.model, row.cluster, row.machines, other, paper)
    if size != "full":
        return
    for cluster, machines, paper in (("pipedream-a", 4, 0.45), ("pipedream-b", 2, 0.29)):
        case = Case("flush", "GNMT-16", cluster, machines, "straight")
        yield case
        yield replace(case, schedule="gpipe", microbatches=16, paper=paper)
        yield replace(case, schedule="1f1b", microbatches=16)
    for microbatches, paper in ((8, 1.6), (32, 1.15)):
        case = Case("2bw", _GPT, "pipedream-2bw", 1, "straight", schedule="1f1b", microbatches=microbatches)
        yield case
        yield replace(case, schedule="pipedream_2bw", paper=paper)


def measure(size: str, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Emulates the cases; returns a row for each, none where the profiles or slow links are missing."""
    reason = why_not() or (
        "" if find_published() else "no published profiles: PIPEDREAM_PROFILES may name their folder"
    )
    if reason:
        log(f"workers: {reason}")
        return []
    cases = sorted(_list_cases(size), key=lambda case: _list_widths(case.on()))
    rows: list[dict[str, Any]] = []
    again_s = _AGAIN_S[size]
    for widths in dict.fromkeys(_list_widths(case.on()) for case in cases):
        with (
            slow_network(widths, (None,) * len(widths)) as network,
            worker_processes(network, len(network.hosts), _WORKER) as workers,
        ):
            done: dict[tuple[Any, ...], dict[str, Any]] = {}
            for case in (case for case in cases if _list_widths(case.on()) == widths):
                plan = _plan(case)
                key = (case.model, case.cluster, plan.stages, plan.in_flight, plan.schedule, plan.microbatches)
                while key not in done or (done[key]["others"] > _QUIET and again_s > 0):
                    began = time.monotonic()
                    row = _emulate(plan, workers, network, _SECONDS[size])
                    if key not in done or row["others"] < done[key]["others"]:
                        done[key] = row
                    again_s -= time.monotonic() - began if row["others"] > _QUIET else 0.0
                rows.append(asdict(case) | done[key])
                log(f"workers: {case.model}, {_place(rows[-1])}, {plan.config} {plan.schedule}: "
                    f"{_compute_error(rows[-1]):+.1%} of predicted, others {rows[-1]['others']:.0%}")  # fmt: skip
    return rows


def _emulate(plan: Plan, workers: Workers, network: Network, seconds: float) -> dict[str, Any]:
    """Runs a plan for so many seconds; returns the seconds of a minibatch, predicted and in each segment."""
    predicted_s, parts = score(plan).period_s, plan.microbatches
    turn = lcm(plan.placement.cycle, parts) // parts
    admitted = max(map(int.__mul__, plan.in_flight, plan.replicas)) / parts
    warm = turn * ceil((2 if len(plan.stages) > 1 else 1) * admitted / turn)
    segment = turn * ceil(admitted / turn)  # where a plan's rounds alternate, both are in a segment
    count = warm + segment * _SEGMENTS + ceil(admitted)
    dilation = max(_MIN_DILATION, _round(seconds / (count * predicted_s)))
    byte_scale = _round(
        min(
            1.0,
            _CARRIED_BYTES_PER_S * dilation * predicted_s / _count_carried_bytes(plan),
            _WEIGHTS_BYTES / sum(stage.replicas * stage.parameter_bytes for stage in plan.stages),
        )
    )
    for level in range(len(plan.cluster.levels)):
        network.limit(None, level=level)
    how = {"dilation": dilation, "byte_scale": byte_scale}
    request = {"plan": plan.to_json(), "model": None, "warm": warm, "segment": segment, "segments": _SEGMENTS}

    def limit() -> None:
        for number, level in enumerate(scale_plan(plan, dilation, byte_scale).cluster.levels):
            network.limit(level.bandwidth_bytes_per_s, level=number)

    segments, disturbance = workers.run_segments(request | how, limit)
    return how | {
        "config": plan.config,
        "workers": plan.workers,
        "predicted_s": predicted_s,
        "segments_s": [seconds / dilation for seconds in segments],
        "own": disturbance.own_share(),
        "others": disturbance.share(),
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as tables in Markdown."""
    heads = {
        "speed-up": "Speed-up over data parallelism, **emulated**. Data parallelism is this library's.",
        "flush": "GNMT-16 with and without a flush, **emulated**: samples per second over those of PipeDream.",
        "2bw": "2BW beside 1F1B with a flush, **emulated**: samples per second over those of 1F1B.",
    }
    parts = []
    for table, head in heads.items():
        if table_rows := [row for row in rows if row["table"] == table]:
            titles = "model | cluster | plan | method | paper | predicted | emulated (least to most) | off"
            cells = format_table(f"{titles} | slower by | bytes", "llllr", _list_cells(table_rows))
            parts.append(f"{head}\n\n{cells}")
    if not parts:
        return ""
    off = [abs(_compute_error(row)) for row in rows]
    within = sum(error <= 0.1 for error in off)
    parts.append(
        f"*off*: samples per second emulated over predicted, minus one. {within} of {len(off)} runs are within 10% of "
        f"predicted; median {statistics.median(off):.1%}, most {max(off):.1%}. The runs' own processes took up to "
        f"{max(row['own'] for row in rows):.0%} of the cores, others up to {max(row['others'] for row in rows):.0%}."
    )
    return "\n\n".join(parts)


def _list_cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        other = first.setdefault(case.against, row)
        rates = sorted(_find_median(other) / seconds for seconds in row["segments_s"])
        yield [
            row["model"],
            _place(row),
            row["config"] + (" (planner)" if row["shape"] == _PLANNED else ""),
            _describe_method(row),
            "" if row["paper"] is None else f"{row['paper']:.2f}",
            f"{other['predicted_s'] / row['predicted_s']:.2f}",
            f"{_find_median(other) / _find_median(row):.2f} ({rates[0]:.2f} to {rates[-1]:.2f})",
            f"{_compute_error(row):+.1%}",
            f"{row['dilation']:g}",
            f"{row['byte_scale']:g}",
        ]


def _find_median(row: dict[str, Any]) -> float:
    return statistics.median(row["segments_s"])


def _compute_error(row: dict[str, Any]) -> float:
    return float(row["predicted_s"]) / _find_median(row) - 1


def _place(row: dict[str, Any]) -> str:
    if row["cluster"] == "flat":
        return f"{row['machines']}x1, 10 Gbit/s"
    return (
        f"{row['machines']}x{row['workers'] // row['machines']} ({row['cluster'].removeprefix('pipedream-').upper()})"
    )


def _describe_method(row: dict[str, Any]) -> str:
    if row["config"] == str(row["workers"]):
        return "data parallel"
    return str(row["schedule"]) + (f", m = {row['microbatches']}" if row["microbatches"] else "")


def _plan(case: Case) -> Plan:
    profile = _make_gpt(8 * (case.microbatches or 1)) if case.model == _GPT else _load_published(_FILES[case.model])
    how: dict[str, Any] = {"schedule": case.schedule, "microbatches": case.microbatches}
    recompute = "always" if case.model == _GPT else "never"
    return pd.plan(profile, case.on(), shape=case.shape, recompute=recompute, **how)


@cache
def _load_published(name: str) -> Profile:
    folder = find_published()
    assert folder is not None
    return GraphText.load(folder / f"{name}.txt").profile(name)


@cache
def _make_gpt(samples: int) -> Profile:
    """A GPT as large as the paper's on a V100, by its data sheet: 48 blocks of width 1920, 512 tokens, float16."""
    with torch.device("meta"):
        blocks = [
            nn.TransformerEncoderLayer(1920, 20, 7680, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(48)
        ]
        model = nn.Sequential(nn.Embedding(50257, 1920), *blocks, nn.LayerNorm(1920), nn.Linear(1920, 50257))
        words = torch.zeros(samples, 512, dtype=torch.long)
    return pd.profile(model, words, device="meta", as_device="V100-16GB", dtype=torch.float16)


def _count_carried_bytes(plan: Plan) -> float:
    """Returns what all workers send for a minibatch."""
    carried_bytes = 2.0 * sum(stage.output_bytes for stage in plan.stages[:-1])
    for stage in plan.stages:
        updates = stage.replicas if plan.microbatches > 1 else 1  # in the time of as many minibatches as replicas
        carried_bytes += float(all_reduce_bytes(stage.parameter_bytes, stage.replicas)) * updates
    return carried_bytes


def _list_widths(cluster: Cluster) -> tuple[int, ...]:
    return tuple(level.width for level in cluster.levels)


def _round(value: float) -> float:
    return float(f"{value:.2g}")

"""The tables, the summary and the picture."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from scatter import Pair, scatter_svg


def tables(rows: Sequence[Any]) -> str:
    """Returns a table for each model, and the summary."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        lines += [
            f"### {model}",
            "",
            "| plan | depth | compute | link | slowest stage | predicted | measured (least to most) | error | others | "
            "drift |",
            "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in rows:
            if row.model == model:
                lines.append(
                    f"| {row.config} | {row.depth} | {_compute(row)} | {row.link} | "
                    f"{row.stage_s * 1e3:.1f} ms | {row.predicted_s * 1e3:.1f} ms | {row.measured_s * 1e3:.1f} ms "
                    f"({min(row.segments_s) * 1e3:.1f} to {max(row.segments_s) * 1e3:.1f}) | {_error(row):+.1%} | "
                    f"{row.others:.0%} | {f'{row.drift:+.0%}' if row.drift else ''} |"
                )
        lines.append("")
    return "\n".join([*lines, *_summary(rows)])


def _summary(rows: Sequence[Any]) -> list[str]:
    lines = [
        "### Summary",
        "",
        "Error: of the predicted throughput, measured over predicted, minus one. Goals: median 5%, "
        "worst 15%, rank 0.9.",
        "",
        "| which | plans | median error | worst | Spearman's rank correlation |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    groups: dict[str, list[Any]] = {"all but free": [row for row in rows if _compute(row) != "free"]}
    for row in groups["all but free"]:
        for name in (row.model, row.link):
            groups.setdefault(name, []).append(row)
    for row in rows:
        groups.setdefault(_compute(row), []).append(row)
    for name, group in groups.items():
        if not group:
            continue
        errors = [abs(_error(row)) for row in group]
        rank = _spearman([row.predicted_s for row in group], [row.measured_s for row in group])
        lines.append(f"| {name} | {len(group)} | {statistics.median(errors):.1%} | {max(errors):.1%} | {rank:.3f} |")
    return lines


def _compute(row: Any) -> str:
    """Returns how a plan computed: at a steady pace, as fast as it could, or not at all."""
    return "emulated" if not row.real else "paced" if row.dilation > 1 else "free"


def _error(row: Any) -> float:
    """Returns by how much the measured throughput lies above the predicted one."""
    return float(row.predicted_s / row.measured_s - 1)


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) < 2:
        return 1.0

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]

    return statistics.correlation(ranks(one), ranks(other))


def plot(rows: Sequence[Any]) -> str:
    """Returns an SVG: a point a plan, minibatches per second predicted and measured; filled where it computed."""
    pairs = [
        Pair(
            1 / row.predicted_s,
            1 / row.measured_s,
            f"{row.model}, {row.config}, {row.depth}, {row.link}",
            row.link,
            row.real,
        )
        for row in rows
    ]
    return scatter_svg(pairs, title="Plans predicted and measured", unit="minibatches/s", tolerance=0.15)


def environment(load: float, seconds: float, rounds: int, profiles: dict[str, Any]) -> str:
    """Returns where and when this was measured."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    return "\n".join(
        (
            f"- {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes, median of {rounds} segments",
            f"- {os.cpu_count()} cores of {cpu}, Linux {platform.release()}, Python {platform.python_version()}, torch "
            f"{torch.__version__}",
            f"- load average {load:.2f} before the run, {os.getloadavg()[0]:.2f} at its end",
            *(
                f"- {name}: {(p.forward_s + p.backward_s + p.update_s + p.loss_s) * 1e3:.0f} ms a minibatch on "
                f"one core, weights {p.parameter_bytes / 1e6:.0f} MB"
                for name, p in profiles.items()
            ),
            f"- command: python {' '.join(sys.argv)}",
            "",
        )
    )

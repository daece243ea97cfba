"""The tables, the summary and the picture."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from math import floor, log10
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment", "plot", "tables"]

_COLOURS = {"100 mbit/s": "#b5483a", "400 mbit/s": "#c99a2e", "1 gbit/s": "#2f6f9f"}
_SIDE, _EDGE = 420, 56


def tables(rows: Sequence[Any]) -> str:
    """Returns a table for each model, and the summary."""
    lines = []
    for model in dict.fromkeys(row.model for row in rows):
        lines += [
            f"### {model}",
            "",
            "| plan | depth | compute | link | slowest stage | predicted | measured (least to most) | error | others |",
            "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in rows:
            if row.model == model:
                lines.append(
                    f"| {row.config} | {row.depth} | {'real' if row.real else 'emulated'} | {row.link} | "
                    f"{row.stage_s * 1e3:.1f} ms | {row.predicted_s * 1e3:.1f} ms | {row.measured_s * 1e3:.1f} ms "
                    f"({min(row.segments_s) * 1e3:.1f} to {max(row.segments_s) * 1e3:.1f}) | {_error(row):+.1%} | "
                    f"{row.others:.0%} |"
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
    groups: dict[str, list[Any]] = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row.model, []).append(row)
        groups.setdefault("real compute" if row.real else "emulated", []).append(row)
        groups.setdefault(row.link, []).append(row)
    for name, group in groups.items():
        errors = [abs(_error(row)) for row in group]
        rank = _spearman([row.predicted_s for row in group], [row.measured_s for row in group])
        lines.append(f"| {name} | {len(group)} | {statistics.median(errors):.1%} | {max(errors):.1%} | {rank:.3f} |")
    return lines


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
    """Returns an SVG: a point a plan, minibatches per second predicted and measured, both axes logarithmic."""
    rates = [1 / seconds for row in rows for seconds in (row.predicted_s, row.measured_s)]
    low, high = log10(min(rates)) - 0.1, log10(max(rates)) + 0.1

    def at(rate: float) -> float:
        return (log10(rate) - low) / (high - low) * _SIDE

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIDE + 2 * _EDGE} {_SIDE + 2 * _EDGE}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<g transform="translate({_EDGE},{_EDGE})">',
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#888888"/>',
        f'<line x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0" stroke="#888888"/>',
    ]
    for share in (0.85, 1.15):  # the goal for the worst
        shift = log10(share) / (high - low) * _SIDE
        ends = (0, _SIDE - shift, _SIDE - shift, 0) if shift > 0 else (-shift, _SIDE, _SIDE, -shift)
        x1, y1, x2, y2 = ends
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#bbbbbb" stroke-dasharray="4 4"/>'
        )
    for tick in _ticks(low, high):
        place = at(tick)
        parts.append(f'<text x="{place:.1f}" y="{_SIDE + 16}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="-6" y="{_SIDE - place + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for row in rows:
        x, y = at(1 / row.predicted_s), _SIDE - at(1 / row.measured_s)
        label = f"{row.model}, {row.config}, {row.depth}, {row.link}: {_error(row):+.1%}"
        colour = _COLOURS.get(row.link, "#444444")
        fill = colour if row.real else "none"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}"><title>{label}</title></circle>'
        )
    for number, (link, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="10" y="{20 + 16 * number}" fill="{colour}">{link}</text>')
    parts.append('<text x="10" y="68" fill="#444444">filled: real compute; dashed: 15% off</text>')
    middle = _SIDE / 2
    parts.append(f'<text x="{middle}" y="{_SIDE + 40}" text-anchor="middle">predicted minibatches/s</text>')
    parts.append(
        f'<text transform="translate(-40,{middle}) rotate(-90)" text-anchor="middle">measured minibatches/s</text>'
    )
    return "\n".join([*parts, "</g></svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    every = [digit * 10.0**power for power in range(floor(low), floor(high) + 1) for digit in (1, 2, 5)]
    return [tick for tick in every if low <= log10(tick) <= high]


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

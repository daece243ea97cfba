"""The tables, the summary and the picture."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
                    f"({min(row.segments_s) * 1e3:.1f} to {max(row.segments_s) * 1e3:.1f}) | "
                    f"{_compute_error(row):+.1%} | {row.others:.0%} | {f'{row.drift:+.0%}' if row.drift else ''} |"
                )
        lines.append("")
    return "\n".join([*lines, *_summarise(rows)])


def _summarise(rows: Sequence[Any]) -> list[str]:
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
        errors = [abs(_compute_error(row)) for row in group]
        rank = _correlate_ranks([row.predicted_s for row in group], [row.measured_s for row in group])
        lines.append(f"| {name} | {len(group)} | {statistics.median(errors):.1%} | {max(errors):.1%} | {rank:.3f} |")
    return lines


def _compute(row: Any) -> str:
    """Returns how a plan computed: at a steady pace, as fast as it could, or not at all."""
    return "emulated" if not row.real else "paced" if row.dilation > 1 else "free"


def _compute_error(row: Any) -> float:
    """Returns by how much the measured throughput lies above the predicted one."""
    return float(row.predicted_s / row.measured_s - 1)


def _correlate_ranks(values: Sequence[float], other: Sequence[float]) -> float:
    if len(values) < 2:
        return 1.0

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]

    return statistics.correlation(ranks(values), ranks(other))


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


def describe_profiles(profiles: dict[str, Any]) -> str:
    """Returns a list in Markdown of what was profiled."""
    lines = (
        f"- {name}: {(p.forward_s + p.backward_s + p.update_s + p.loss_s) * 1e3:.0f} ms a minibatch on one core, "
        f"weights {p.parameter_bytes / 1e6:.0f} MB\n"
        for name, p in profiles.items()
    )
    return "".join(lines)

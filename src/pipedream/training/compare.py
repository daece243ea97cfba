"""Compares methods: trains a recipe on one worker, by data parallelism and by some methods, in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipedream.core.errors import WorkerError
from pipedream.core.units import format_number
from pipedream.options import TrainingOptions
from pipedream.runtime.failure.launch import launch

__all__ = ["compare_recipe", "comparison_table"]


def compare_recipe(
    recipe: str, schedules: tuple[str, ...], options: TrainingOptions, out: Path
) -> list[dict[str, Any]]:
    """Trains each variant in its own processes; returns a row of figures for each.

    Args:
        schedules: methods besides one worker and data parallelism.
        options: only workers, epochs, minibatches, seed and device are used.
        out: folder for the run folders.

    Raises:
        WorkerError: a variant failed; its own message is on standard error.
    """
    workers = options.workers or 2
    common = ["--seed", str(options.seed or 0), "--device", options.device, "--json"]
    for flag, count in (("--epochs", options.epochs), ("--minibatches", options.minibatches)):
        common += [] if count is None else [flag, str(count)]
    variants = [("one worker", 1, ["--schedule", "pipedream"])]
    if workers > 1:
        variants.append(("data parallel", workers, ["--schedule", "pipedream", "--data-parallel"]))
        variants.extend((name, workers, ["--schedule", name]) for name in schedules)
    rows = []
    for name, count, flags in variants:
        folder = out / name.replace(" ", "_").replace("/", "_")
        status = launch(
            count,
            ["-m", "pipedream", "train", recipe, "--workers", str(count), *flags, *common, "--out", str(folder)],
            silent=True,
        )
        if status:
            raise WorkerError(0, f"variant {name!r}", f"its run ended with exit status {status}")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows.append(
            {
                "variant": name,
                "workers": count,
                "samples_per_s": summary["throughput"]["measured_per_s"],
                "predicted_per_s": summary["throughput"]["predicted_per_s"],
                "bubble": summary["bubble"]["measured"],
                "peak_bytes": max(stage["peak_bytes"] or 0 for stage in summary["stages"]),
                "bytes_sent": sum(stage["bytes_sent"] for stage in summary["stages"]),
                "metrics": summary["metrics"],
            }
        )
    return rows


def comparison_table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a table; speed-ups are relative to the first."""
    names = list(rows[0]["metrics"])
    head = (
        f"{'variant':<24}  {'workers':>7}  {'samples/s':>9}  {'speed-up':>8}  {'predicted':>9}  {'bubble':>6}  "
        f"{'peak MB':>7}"
    )
    lines = [head + "".join(f"  {name:>10}" for name in names)]
    for row in rows:
        speedup = row["samples_per_s"] / rows[0]["samples_per_s"]
        lines.append(
            f"{row['variant']:<24}  {row['workers']:>7}  {format_number(row['samples_per_s']):>9}  {speedup:>8.2f}  "
            f"{format_number(row['predicted_per_s']):>9}  {row['bubble']:>6.1%}  {row['peak_bytes'] / 1e6:>7.0f}"
            + "".join(f"  {format_number(row['metrics'][name]):>10}" for name in names)
        )
    return "\n".join(lines)

"""Time to accuracy, end to end, on two hosts with a slow link between them.

One worker, DDP as it ships, DDP with the pipeline's batch, 1F1B, PipeDream and 2BW train the digits and the characters
(accuracy_recipe.py) for the same epochs. Learning rates are tuned for both batches of DDP, with a seed of their own;
one worker and the pipelines take that of DDP with their batch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accuracy_recipe import ASKED, recipe

from pipedream import Cluster, Plan, Profile
from pipedream import plan as make_plan
from pipedream.core.units import format_bytes, format_number
from pipedream.core.variants import DDP, ONE_WORKER, TORCH, format_link, format_ratio
from pipedream.options import TrainingOptions
from pipedream.runtime import torch_baselines
from pipedream.slow_links import Network, slow_network
from pipedream.training.compare import profile_together
from pipedream.training.compare_runs import Runs, limit_threads

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import format_table
from worker_processes import cores_busy_s

SAME_BATCH = TORCH[1]
VARIANTS: dict[str, dict[str, Any] | None] = {
    ONE_WORKER: None,
    DDP: None,
    SAME_BATCH: None,
    "1F1B": {"schedule": "1f1b"},
    "PipeDream, noam": {"schedule": "pipedream"},
    "PipeDream, full": {"schedule": "pipedream", "in_flight": "full"},
    "2BW": {"schedule": "pipedream_2bw"},
}
PARTS = 2  # microbatches of a minibatch, for DDP with the pipeline's batch
TUNING_SEED = 100
QUIET, TRIES = 0.05, 2  # share of the cores that others may take; runs until that is so


@dataclass(frozen=True)
class Task:
    """What is trained, and over which link.

    Attributes:
        metric: that decides, and the target's.
        rate: in the middle of those that are tried.
        minibatches: of an epoch; None: all data.
    """

    name: str
    metric: str
    rate: float
    epochs: int
    minibatches: int | None
    bytes_per_s: float

    def describe_request(self, rate: float, *, batch: int = 1, each_update: int = 1) -> str:
        """Returns what the recipe reads."""
        numbers = {"rate": rate, "epochs": self.epochs, "minibatches": self.minibatches}
        return json.dumps({"task": self.name, "batch": batch, "each_update": each_update} | numbers)


DIGITS = Task("digits", "accuracy", 0.01, 5, None, 50e6)
CHARACTERS = Task("characters", "loss", 0.004, 8, 30, 25e6)


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
        rates: factors on the task's rate that are tried; one alone is not tried.
    """

    tasks: tuple[Task, ...]
    seeds: int
    rates: tuple[float, ...]
    variants: tuple[str, ...] = tuple(VARIANTS)


SIZES = {
    "test": Size((Task("digits", "accuracy", 0.01, 1, 4, 50e6),), 1, (1.0,), (DDP, "PipeDream, full")),
    "short": Size((Task("digits", "accuracy", 0.01, 2, None, 50e6),), 1, (1.0,), (DDP, "PipeDream, full", "2BW")),
    "full": Size((DIGITS, CHARACTERS), 3, (0.5, 1.0, 2.0, 4.0)),
}


def measure(size: str, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns a row for each run, those that tune a rate included."""
    size_options, rows = SIZES[size], []
    with tempfile.TemporaryDirectory() as folder, slow_network((2,), (None,)) as network, limit_threads(2):
        for task in size_options.tasks:
            rows += _Bench(task, size_options, network, Path(folder, task.name), log).rows()
    return rows


@dataclass
class _Bench:
    """The runs of one task."""

    task: Task
    size: Size
    network: Network
    folder: Path
    log: Callable[[str], None]
    _count: int = 0

    def rows(self) -> list[dict[str, Any]]:
        task = self.task
        rows = [row for each_update in (1, 2) for row in self._tune(each_update)]
        rates = {row["each_update"]: row["rate"] for row in rows if row["is_best"]}
        os.environ[ASKED] = task.describe_request(rates[1])
        self.network.limit(None)
        profile, _ = profile_together(self._run_all(TUNING_SEED), 2, PARTS)
        self.network.limit(task.bytes_per_s)
        for seed in range(self.size.seeds):
            for name in self.size.variants:
                row = self._run_least_disturbed(name, seed, profile, rates[2 if name == DDP else 1])
                rows.append(row)
                self.log(
                    f"{task.name}, seed {seed}, {name}: {row['samples_per_s']:.4g} samples/s, "
                    f"{task.metric} {row['final']:.4f}, others' share of the cores {row['others']:.0%}"
                )
        return rows

    def _tune(self, each_update: int) -> list[dict[str, Any]]:
        """Tries rates for updates of so many minibatches, in this process, as DDP's sums do not depend on the link.

        The one with the least loss is taken.
        """
        task, rows = self.task, []
        for factor in self.size.rates:
            row = {"task": task.name, "tunes": DDP if each_update == 2 else SAME_BATCH, "each_update": each_update}
            row |= {"rate": task.rate * factor, "metric": task.metric, "final": None, "loss": 0.0, "is_best": False}
            if len(self.size.rates) > 1:
                os.environ[ASKED] = task.describe_request(task.rate * factor, batch=each_update)
                loop = torch_baselines.plain_loop(
                    torch_baselines.Task(recipe(TUNING_SEED), 0, 1, torch.device("cpu"), PARTS)
                )
                metrics = loop.train(task.epochs, None)["metrics"]
                row |= {"final": metrics[task.metric], "loss": metrics["loss"]}
                self.log(f"{task.name}, {row['tunes']}, rate {row['rate']:g}: {task.metric} {row['final']:.4f}")
            rows.append(row)
        min(rows, key=lambda row: row["loss"])["is_best"] = True
        return rows

    def _run_all(self, seed: int) -> Runs:
        self._count += 1
        options = TrainingOptions(seed=seed, epochs=self.task.epochs)
        file = str(Path(__file__).with_name("accuracy_recipe.py"))
        return Runs(file, options, self.folder / str(self._count), self.network, count=10 * self._count)

    def _run_least_disturbed(self, name: str, seed: int, profile: Profile, rate: float) -> dict[str, Any]:
        """Runs a variant until other processes have left the cores alone meanwhile, or often enough."""
        os.environ[ASKED] = self.task.describe_request(rate, each_update=2 if name == DDP else 1)
        best: dict[str, Any] = {}
        for _ in range(TRIES if self.size.seeds > 1 else 1):
            busy_s, own_s, begun = cores_busy_s(), sum(os.times()[:4]), time.monotonic()
            row = self._run(name, seed, profile)
            taken_s = max(0.0, cores_busy_s() - busy_s - (sum(os.times()[:4]) - own_s))
            row["others"] = taken_s / (time.monotonic() - begun) / (os.cpu_count() or 1)
            if not best or row["others"] < best["others"]:
                best = row
            if best["others"] <= QUIET:
                break
        return {"task": self.task.name, "variant": name, "seed": seed, "rate": rate} | best

    def _run(self, name: str, seed: int, profile: Profile) -> dict[str, Any]:
        runs, task = self._run_all(seed), self.task
        how = VARIANTS[name]
        if how is None:
            workers, parts = (1 if name == ONE_WORKER else 2), (PARTS if name == SAME_BATCH else 1)
            file, sent = runs.run_worker("plain" if workers == 1 else "ddp", workers, name, parts=parts, bounds=())
            summary = json.loads(file.read_text(encoding="utf-8"))
            rate = summary["samples_per_s"]
        else:
            cluster = Cluster.flat(2, bandwidth_bytes_per_s=task.bytes_per_s)
            plan: Plan = make_plan(profile, cluster, shape="pipeline", all_workers=True, **how)
            summary, sent = runs.train(plan, name)
            rate = summary["throughput"]["measured_per_s"]
        seconds = summary["seconds_to_target"]
        reached = [
            evaluation["minibatches"] for evaluation in summary["evaluations"] if evaluation["seconds"] == seconds
        ]
        return {
            "metric": task.metric,
            "bytes_per_s": task.bytes_per_s,
            "samples_per_s": rate,
            "target": recipe().target[1],
            "seconds_to_target": seconds,
            "bytes_to_target": (sent or 0) * reached[0] / summary["minibatches"] if reached else None,
            "final": summary["metrics"][task.metric],
            "evaluations": summary["evaluations"],
        }


def tables(rows: list[dict[str, Any]]) -> str:
    """Returns for each task what each variant reached, and the rates that were tried."""
    return "\n\n".join(_format_table(rows, task) for task in dict.fromkeys(row["task"] for row in rows))


def _format_table(rows: list[dict[str, Any]], task: str) -> str:
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] == task and "variant" in row:
            runs.setdefault(row["variant"], []).append(row)
    baseline = runs[DDP][0]
    metric, seeds = baseline["metric"], len(runs[DDP])
    ddp = _find_median(row["seconds_to_target"] for row in runs[DDP])
    titles = f"variant | learning rate | {metric} at the end | s to target | DDP's over them | bytes to target"
    table_rows = []
    for name, variant_runs in runs.items():
        seconds = [row["seconds_to_target"] for row in variant_runs]
        middle = _find_median(seconds)
        table_row = [
            name,
            f"{variant_runs[0]['rate']:g}",
            _format_range([row["final"] for row in variant_runs], lambda value: f"{value:.3f}"),
            _format_range(seconds, lambda value: f"{value:.1f}"),
            "-" if None in (middle, ddp) else format_ratio(ddp / middle),
            _format_range([row["bytes_to_target"] for row in variant_runs], format_bytes),
            _format_range([row["samples_per_s"] for row in variant_runs], format_number),
            f"{max(row['others'] for row in variant_runs):.0%}",
        ]
        table_rows.append(table_row)
    lines = [
        f"### {task}, {format_link(baseline['bytes_per_s'])}",
        "",
        f"Target: {metric} {baseline['target']:g}. Medians of {seeds} seeds (their range).",
        "",
        format_table(f"{titles} | samples/s | others' share of the cores", "lr", table_rows),
    ]
    tried = [row for row in rows if row["task"] == task and "tunes" in row and row["final"] is not None]
    for name in dict.fromkeys(row["tunes"] for row in tried):
        values = [
            f"{row['rate']:g}: {row['final']:.3f}{' (taken)' if row['is_best'] else ''}"
            for row in tried
            if row["tunes"] == name
        ]
        lines += ["", f"Learning rates tried for {name}, with the {metric} at the end: {'; '.join(values)}."]
    return "\n".join(lines)


def _find_median(values: Iterable[float | None]) -> float | None:
    """Returns the median; None if the target was not always reached."""
    numbers = list(values)
    return None if None in numbers else median(numbers)


def _format_range(values: list[float | None], words: Callable[[float], str]) -> str:
    """Returns the median and the range; says how many runs have no value."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return f"not reached by {len(values) - len(numbers)} of {len(values)}"
    middle = words(median(numbers))
    return middle if len(numbers) == 1 else f"{middle} ({words(min(numbers))} to {words(max(numbers))})"

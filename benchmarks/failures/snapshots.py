"""What snapshots cost a run that nothing happens to: its seconds, and the memory, planned and measured. See README.md.

This file is also the recipe that is trained.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import pipedream as pd
from pipedream.runtime.failure.processes import MEMORY

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "speedup"))
import scaffold
from models import MODELS

WORKERS = 2
VARIANTS = ("without", "auto", "every 50")


def recipe(seed: int = 0) -> pd.Recipe:
    """Returns the model that the variable MODEL names, with Adam, whose state is twice the weights."""
    job, minibatches = MODELS[os.environ["MODEL"]], int(os.environ["MINIBATCHES"])
    batch = job.batch(job.samples)
    optimizer = partial(torch.optim.Adam, lr=1e-4)
    return pd.Recipe(job.make(), job.loss, optimizer, [batch] * minibatches, epochs=1, targets=itemgetter(1))


def measure(variant: str, model: str, minibatches: int, plan: Path | None = None) -> dict[str, Any]:
    """Trains; returns the run's summary, with the most bytes in memory that its snapshots had."""
    every = {"without": (), "auto": ("--snapshot-every", "auto")}.get(variant, ("--snapshot-every", variant[6:]))
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        options = ["--workers", str(WORKERS), "--max-restarts", "1", "--checkpoint-every", "0"]
        options += [*every, "--out", str(run), *(("--plan", str(plan)) if plan else ())]
        command = [sys.executable, "-m", "pipedream", "train", __file__, *options]
        environment = os.environ | {"MODEL": model, "MINIBATCHES": str(minibatches)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as launcher:
            most_bytes = _watch(launcher)
        if launcher.returncode:
            raise RuntimeError(f"{' '.join(command)} has ended with exit status {launcher.returncode}")
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        return summary | {"most_bytes": most_bytes, "plan_text": (run / "plan.json").read_text()}


def _watch(launcher: subprocess.Popen[bytes]) -> int:
    """Returns the most bytes that the launcher's snapshots have until its end."""
    most_bytes = 0
    while launcher.poll() is None:
        files = MEMORY.glob(f"pipedream-*-{launcher.pid}-*/snapshots/**/*.distcp")
        with suppress(FileNotFoundError):  # one has just been removed
            most_bytes = max(most_bytes, sum(file.stat().st_size for file in files))
        time.sleep(0.02)
    return most_bytes


def compare(model: str, minibatches: int, rounds: int) -> list[tuple[object, ...]]:
    """Returns a row for each variant: seconds against those without snapshots, and memory."""
    with TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        plan.write_text(measure("without", model, 16)["plan_text"])  # all rounds train by the same plan
        results = scaffold.collect_rounds(lambda variant: measure(variant, model, minibatches, plan), VARIANTS, rounds)
    seconds = {variant: [summary["train_seconds"] for summary in summaries] for variant, summaries in results.items()}
    rows: list[tuple[object, ...]] = []
    for variant in VARIANTS[1:]:
        snapshots = [summary["snapshots"] for summary in results[variant]]
        rows.append(
            (
                f"{MODELS[model].title}, {variant}",
                f"{statistics.median(seconds['without']) / minibatches * 1e3:.1f} ms",
                f"{statistics.median(snapshot['every'] for snapshot in snapshots):g}",
                scaffold.format_quartiles(scaffold.compare_rounds(seconds[variant], seconds["without"])),
                _spell_share(results[variant]),
                scaffold.format_mib(snapshots[0]["planned_bytes"]),
                scaffold.format_mib(max(summary["most_bytes"] for summary in results[variant])),
            )
        )
    return rows


def _spell_share(summaries: list[dict[str, Any]]) -> str:
    """Returns the share of the time that the runs have measured themselves."""
    shares = [
        summary["snapshots"]["seconds"] / summary["train_seconds"]
        for summary in summaries
        if summary["snapshots"]["seconds"] is not None
    ]
    return f"{statistics.median(shares):.1%}" if shares else ""


def main() -> None:
    parser = scaffold.make_parser(__doc__, "one round of few minibatches")
    parser.add_argument("--models", nargs="+", default=["vgg", "gpt"], choices=sorted(MODELS))
    parser.add_argument("--minibatches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    options = scaffold.parse_quick(parser, minibatches=60, rounds=1)
    environment = scaffold.Environment()
    rows = [row for model in options.models for row in compare(model, options.minibatches, options.rounds)]
    print(environment.describe(f"{options.rounds} rounds of {options.minibatches} minibatches, {WORKERS} workers"))
    titles = "network | a minibatch | every | seconds, of those without | cost, as measured by the run"
    print(f"\n{scaffold.format_table(f'{titles} | memory, planned | measured', 'lrrrrr', rows)}")


if __name__ == "__main__":
    main()

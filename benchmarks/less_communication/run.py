"""What encoded messages cost in accuracy: the tasks of benchmarks/convergence through pipelines. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import pipedream as pd

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "convergence")]
from scaffold import Environment, format_table, make_parser, write_rows
from steppers import STEPPERS
from tasks import TASKS

OPTIMIZERS = {"digits": "sgd", "char_gpt": "adamw"}
RATES = {("digits", "1f1b"): 0.05, ("digits", "pipedream_2bw"): 0.003125}
RATES |= {("char_gpt", "1f1b"): 0.008, ("char_gpt", "pipedream_2bw"): 0.008}
"""The rates that benchmarks/convergence found for synchronous training and 2BW, with messages as they are."""

METHODS = ("1f1b", "pipedream_2bw")
MESSAGES = ("full", "bfloat16", "int8", "int4", "int4,int4_stochastic")
FEW_BITS = {"digits": ("int3,int4", "int4; deltas=int3:797", "int2,int4", "int4; deltas=int2:797")}
"""Activations of few bits, and their differences to a sample's last visit, for tasks whose samples come again."""
MICROBATCHES = 4


def main() -> None:
    """Trains what is missing, and prints the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="of a run; by default the task's own")
    parser.add_argument("--again", action="store_true", help="only print what rows.json has")
    parser.add_argument("--out", type=Path, default=Path("build/less_communication"), help="folder of rows.json")
    options = parser.parse_args()
    file = options.out / "rows.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    for run in () if options.again else _list_runs(options):
        if not any(run.items() <= row.items() for row in rows):
            rows.append(run | _train(**run))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            write_rows(file, rows)
    print(f"{Environment().describe('one process')}\n\n{_format_tables(rows)}")


def _list_runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for task in options.tasks:
        arms = (*MESSAGES, *FEW_BITS.get(task, ()))
        for run in product([task], options.stages, METHODS, range(options.seeds), arms):
            names = ("task", "stages", "method", "seed", "messages")
            yield dict(zip(names, run, strict=True)) | {"updates": options.updates or TASKS[task].updates}


def _train(task: str, stages: int, method: str, seed: int, messages: str, updates: int) -> dict[str, Any]:
    """Returns test loss and accuracy after training, and the bytes that were sent."""
    chosen, rate, begin = TASKS[task], RATES[task, method], time.process_time()
    model = torch.nn.Sequential(*chosen.model(seed))
    batches = chosen.batches(seed)[:updates]
    cuts = tuple(str(count * len(model) // stages) for count in range(1, stages))  # as many of the equal layers each
    plan = pd.plan(pd.profile(model, batches[0][0], device="meta"), pd.Cluster.flat(stages), cuts=cuts)
    optimizer = partial(STEPPERS[OPTIMIZERS[task]], lr=rate)
    messages, _, deltas = messages.partition("; deltas=")
    with pd.Pipeline(
        model,
        plan,
        schedule=method,
        microbatches=MICROBATCHES,
        loss=chosen.loss,
        targets=lambda batch: batch[1],
        optimizer=optimizer,
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=chosen.factor),
        metrics={"accuracy": lambda output, targets: (output.argmax(-1) == targets).double().mean()},
        messages=messages,
        deltas=deltas or None,
        check=False,
    ) as pipeline:
        for _ in pipeline.train(batches):
            pass
        sent_bytes = sum(pipeline.sent_bytes().values())
        figures = pipeline.evaluate([chosen.data()[1]])
    return {**figures, "bytes_per_update": sent_bytes // len(batches), "seconds": time.process_time() - begin}


def _format_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table for each task: the mean, and what the encoding changes, seed by seed."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        lines = []
        metric, unit, scale = ("accuracy", "points", 100) if TASKS[task].metric == "accuracy" else ("loss", "nats", 1)
        for messages in (*MESSAGES, *FEW_BITS.get(task, ())):
            for method in METHODS:
                cells: list[str] = []
                for stages in sorted({row["stages"] for row in rows if row["task"] == task}):
                    arm = {"task": task, "method": method, "stages": stages}
                    full = _select(rows, arm | {"messages": "full"})
                    encoded = _select(rows, arm | {"messages": messages})
                    values = [scale * row[metric] for row in encoded.values()]
                    changes = [scale * (encoded[seed][metric] - full[seed][metric]) for seed in encoded if seed in full]
                    sent = statistics.mean(row["bytes_per_update"] for row in encoded.values()) if encoded else 0
                    cells += [
                        f"{statistics.mean(values):.4g} ({min(values):.4g} to {max(values):.4g})" if values else "-",
                        f"{statistics.mean(changes):+.3f}" if changes and messages != "full" else "-",
                        f"{sent / 1e3:.0f} kB" if encoded else "-",
                    ]
                lines.append([messages, method, *cells])
        heads = [
            f"{head}, {stages} stages"
            for stages in sorted({row["stages"] for row in rows if row["task"] == task})
            for head in (f"{metric} in {unit}" if unit == "nats" else "accuracy in %", "change", "sent for an update")
        ]
        parts.append(f"### {task}\n\n{format_table('|'.join(['messages', 'method', *heads]), 'llr', lines)}")
    return "\n\n".join(parts)


def _select(rows: Sequence[dict[str, Any]], where: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["seed"]: row for row in rows if where.items() <= row.items()}


if __name__ == "__main__":
    main()

"""The runtime's own cost beside torch's pipelining and the plain loop, in turns within one run. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from stages import Shape
from startup import MARK, STEPS
from variants import Segment

from pipedream import slow_links

sys.path.append(str(Path(__file__).parents[1]))
import scaffold
from worker_processes import worker_processes

TORCH, OURS = "torch, Schedule1F1B", "pipedream, 1f1b"
DEEP, FULL = "pipedream, 1f1b, depth full", "pipedream, depth full"
BUSY = {2: 0.97, 4: 0.95}
"""Stages -> bound of the busy share at depth full."""
CPU_MS = "1.10"
COMPUTE = (48, 160, 4)
"""About 0.3 ms for forward and backward of a stage."""
LARGE = (704, 1024, 2)
"""About 50 ms for forward and backward."""
FOLDER = Path(__file__).parent
RECIPE = str(FOLDER.resolve() / "startup.py")

Rounds = list[list[Segment]]
"""Of a variant: rounds -> ranks."""


def main() -> None:
    sections = {"waiting": _ask_waiting, "compute": _ask_compute, "process": _ask_process}
    sections |= {"startup": _ask_startup, "memory": _ask_memory, "connections": _ask_connections}
    parser = scaffold.make_parser(__doc__, "one round, short sleeps, and all memory runs in the same processes")
    parser.add_argument("--only", choices=sections)
    parser.add_argument("--rounds", type=int, default=7, help="segments of each variant, in turns")
    parser.set_defaults(segment=64, stages=(2, 4), messages=(4096, 1 << 20))  # of waiting stages
    options = scaffold.parse_quick(parser, rounds=1, segment=8, stages=(2,), messages=(4096,))
    scaffold.stop_if(None if len(os.sched_getaffinity(0)) > 1 else "it needs two cores", "overhead")
    environment = scaffold.Environment()
    scaffold.print_sections(sections, options)
    print("Medians (quartiles) of the rounds.\n\n" + environment.describe(f"{options.rounds} rounds"))


# -- several processes ------------------------------------------------------------------------------


def _measure(shape: Shape, variants: Sequence[str], options: argparse.Namespace, **more: Any) -> dict[str, Rounds]:
    request = {"rounds": options.rounds, "segment": options.segment, "pinned": False} | more
    request |= {"shape": asdict(shape), "variants": list(variants)}
    rounds_by_variant = scaffold.run_processes(FOLDER / "variants.py", request, shape.stages)
    return {
        name: [[Segment(*rank) for rank in ranks] for ranks in rounds] for name, rounds in rounds_by_variant.items()
    }


def _ask_waiting(options: argparse.Namespace) -> Iterator[str]:
    forward_s, backward_s = (0.0005, 0.001) if options.quick else (0.004, 0.008)
    yield f"### Stages that only wait ({forward_s * 1e3:g} + {backward_s * 1e3:g} ms), m = 8\n"
    yield scaffold.format_head("p | message | figure | bound | stages alone | by hand | torch | ours", "rrlr")
    for p, size in product(options.stages, options.messages):
        shape = Shape(p, forward_s=forward_s, backward_s=backward_s, message_bytes=size)
        rounds_by_variant = _measure(shape, ("stages alone", "by hand", TORCH, OURS, DEEP, FULL), options)
        added = {
            name: [_compute_added_s(ranks, shape) for ranks in rounds_by_variant[name]]
            for name in ("by hand", TORCH, OURS, DEEP)
        }
        alone, half = rounds_by_variant["stages alone"], f"{statistics.median(added[TORCH]) / 2 * 1e3:.2f}"
        shares = ([_find_waits_s(ranks) / _find_period_s(ranks) for ranks in rounds]
                  for rounds in (alone, rounds_by_variant[FULL]))  # fmt: skip
        most, share = map(scaffold.format_quartiles, shares)
        free = _format_ms([_find_period_s(ranks) - _find_waits_s(ranks) for ranks in alone])
        cpu = {name: _format_ms(_list_cpu_s(rounds)) for name, rounds in rounds_by_variant.items()}
        beside = "by hand", TORCH, OURS
        for cells in (
            ("added per microbatch, ms", half, free, *(_format_ms(added[name]) for name in beside)),
            ("the same at depth full, ms", half, "", "", "", _format_ms(added[DEEP])),
            ("busy share, PipeDream at depth full", BUSY[p], most, "", "", share),
            ("CPU of a rank per microbatch, ms", CPU_MS, *(cpu[name] for name in ("stages alone", *beside))),
            ("the same, PipeDream at depth full, ms", CPU_MS, "", "", "", cpu[FULL]),
        ):
            yield scaffold.format_row((p, f"{size / 1024:g} KiB", *cells))
    yield ""


def _compute_added_s(ranks: list[Segment], shape: Shape) -> float:
    """Returns what a microbatch takes longer than (m + p - 1)(f + b) / m."""
    m = shape.microbatches
    return _find_period_s(ranks) - (m + shape.stages - 1) / m * _find_waits_s(ranks)


def _find_period_s(ranks: list[Segment]) -> float:
    return max(rank.period_s for rank in ranks)


def _find_waits_s(ranks: list[Segment]) -> float:
    return statistics.mean(rank.forward_s + rank.backward_s for rank in ranks)


def _list_cpu_s(rounds: Rounds, microbatches: int = 1) -> list[float]:
    return [max(rank.cpu_s for rank in ranks) * microbatches for ranks in rounds]


def _ask_compute(options: argparse.Namespace) -> Iterator[str]:
    shape = Shape(2, compute=COMPUTE)
    names = ("stages alone", "by hand", TORCH, OURS, DEEP, "pipedream, 2BW", FULL)
    rounds_by_variant = _measure(shape, names, options, pinned=True, segment=8 if options.quick else 400)
    periods_s = {name: [_find_period_s(ranks) for ranks in rounds] for name, rounds in rounds_by_variant.items()}
    alone_s = statistics.median(periods_s["stages alone"])
    yield f"### Stages that compute ({alone_s * 1e3:.2f} ms per microbatch), p = 2, m = 8\n"
    yield scaffold.format_head(
        "variant | CPU of a rank, ms per step | ms per step | bound, of torch's | of torch's", "lr"
    )
    for name, rounds in rounds_by_variant.items():
        cpu = _format_ms(_list_cpu_s(rounds, shape.microbatches))
        steps = _format_ms([period_s * shape.microbatches for period_s in periods_s[name]])
        ratios = scaffold.format_quartiles(scaffold.compare_rounds(periods_s[name], periods_s[TORCH]), "{:.2f}".format)
        yield scaffold.format_row((name, cpu, steps, "0.85" if name in (OURS, DEEP) else "", ratios))
    yield ""


def _ask_memory(options: argparse.Namespace) -> Iterator[str]:
    yield "### Memory, p = 2, stages that do nothing\n"
    titles = "variant | rank | rise at m = 8 | at m = 64 | left between minibatch 200 and 2,000: resident | objects"
    yield scaffold.format_head(titles, "lr")
    some, few, many = (2, 4, 8) if options.quick else (20, 200, 2000)
    shapes = (
        (Shape(2, 8, 0.0, 0.0, 1 << 20), (some,)),
        (Shape(2, 64, 0.0, 0.0, 1 << 20), (some,)),
        (Shape(2, 8, 0.0, 0.0), (few, many - few)),
    )
    variants = ("torch", "1f1b", "pipedream")
    runs = [
        {"variant": variant, "shape": asdict(shape), "parts": parts} for variant in variants for shape, parts in shapes
    ]
    # Each in processes of its own, whose memory holds nothing of another run.
    batches = [runs] if options.quick else [[run] for run in runs]
    rows = [
        row
        for batch in batches
        for row in scaffold.run_processes(FOLDER / "variants.py", {"runs": batch}, 2, scaffold.TIGHT_MALLOC)
    ]
    for variant in variants:
        rows_of_variant, rows = rows[: len(shapes)], rows[len(shapes) :]
        for rank, (small, large, lasting) in enumerate(zip(*rows_of_variant, strict=True)):
            rises = (scaffold.format_mib(part[0]["rise_bytes"]) for part in (small, large))
            growth = {name: lasting[1][name] - lasting[0][name] for name in ("resident_bytes", "objects")}
            resident = scaffold.format_mib(growth["resident_bytes"])
            yield scaffold.format_row((variant, rank, *rises, resident, f"{growth['objects']:,}"))
    yield ""


def _ask_connections(options: argparse.Namespace) -> Iterator[str]:
    yield "### Gbit/s of a message over 1, 2 and 4 connections of gloo\n"
    if reason := slow_links.why_not():
        yield f"This needs slow links: {reason}\n"
        return
    counts, sizes = (1, 2, 4), (1 << 20, 1 << 22, 1 << 24)
    titles = " | ".join(("link, Gbit/s | directions | MiB", *(f"{count}" for count in counts)))
    yield scaffold.format_head(titles, "rlr")
    with (
        slow_links.slow_network((2,), (None,)) as network,
        worker_processes(network, 2, str(FOLDER / "connections.py"), computes=False) as workers,
    ):
        for gbit, both, size in product((1,) if options.quick else (1, 4, 10), (False, True), sizes):
            network.limit(gbit * 1e9 / 8)
            case = {"bytes": size, "both": both, "repeats": 1 if options.quick else max(4, (gbit << 24) // size)}

            def measure_gbit_per_s(count: str, case: dict[str, Any] = case) -> float:
                return float(workers.ask(case | {"connections": int(count)})) * 8e-9

            rates = scaffold.collect_rounds(measure_gbit_per_s, map(str, counts), options.rounds)
            cells = (scaffold.format_quartiles(rates[str(count)], "{:.2f}".format) for count in counts)
            yield scaffold.format_row((gbit, "both" if both else "one", size >> 20, *cells))
    yield ""


# -- one process ------------------------------------------------------------------------------------


def _ask_process(options: argparse.Namespace) -> Iterator[str]:
    yield "### One process\n"
    titles = "stages | method | plain loop, us | stages by hand, us | ours, us | bound | ours of plain | in CPU time"
    yield scaffold.format_head(titles, "llr")
    cases = [("two tiny", 2.5, "tiny", 2, method, 10) for method in ("pipedream", "1f1b")]
    cases.append(("one of 50 ms", 1.02, [8, 64, 2] if options.quick else LARGE, 1, "pipedream", 1))
    for name, bound, model, stages, schedule, count in cases:
        # Short slices: most of them are disturbed by nothing.
        number = 2 if options.quick else 60 * options.rounds // (1 if count > 1 else 8)
        request = {"model": model, "stages": stages, "schedule": schedule, "slices": number, "slice": count}
        slices = scaffold.run_processes(FOLDER / "one_process.py", request)
        plain, by_hand, ours = (list(zip(*stream, strict=True)) for stream in zip(*slices, strict=True))
        times = (scaffold.format_quartiles(walls, lambda s: f"{s * 1e6:.0f}") for walls, _ in (plain, by_hand, ours))
        ratios = (scaffold.format_quartiles(scaffold.compare_rounds(ours[i], plain[i])) for i in range(2))
        yield scaffold.format_row((name, schedule, *times, bound, *ratios))
    yield ""


def _ask_startup(options: argparse.Namespace) -> Iterator[str]:
    yield "### From the command to the first minibatch, two workers: seconds of rank 0 at the end of each step\n"
    titles = " | ".join(("command", "bytecode", *STEPS, "CPU of all processes"))
    yield scaffold.format_head(titles, "llr")
    commands = {
        "pipedream train": (sys.executable, "-m", "pipedream", "train", RECIPE, "--workers", "2"),
        "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", RECIPE),
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, command) in product(range(1 if options.quick else options.rounds), commands.items()):
            kind = "new" if not number else "kept"
            variables = {"PYTHONPYCACHEPREFIX": f"{folder}/{name}", "PYTHONDONTWRITEBYTECODE": ""}
            began_s, cpu_s = time.time(), sum(os.times()[2:4])
            done = subprocess.run(
                command, env={**os.environ, **variables}, cwd=folder, stdout=subprocess.PIPE, text=True
            )
            if done.returncode:
                raise SystemExit(f"{name} ended with {done.returncode}")
            steps_s = json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])
            cells = (f"{steps_s[step] - began_s:.2f}" for step in STEPS)
            yield scaffold.format_row((name, kind, *cells, f"{sum(os.times()[2:4]) - cpu_s:.2f}"))
    yield ""


def _format_ms(seconds: Sequence[float]) -> str:
    return scaffold.format_quartiles(seconds, lambda s: f"{s * 1e3:.2f}")


if __name__ == "__main__":
    main()

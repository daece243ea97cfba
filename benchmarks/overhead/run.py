"""The runtime's own cost beside torch's pipelining and the plain loop, in turns within one run. See README.md."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages import Shape
from variants import Segment

sys.path.append(str(Path(__file__).parents[1]))
from scaffold import (
    TIGHT_MALLOC,
    Environment,
    format_mib,
    format_quartiles,
    format_row,
    make_parser,
    print_sections,
    run_processes,
)

TORCH, OURS = "torch, Schedule1F1B", "pipedream, 1f1b"
DEEP, FULL = "pipedream, 1f1b, depth full", "pipedream, depth full"
BUSY = {2: 0.97, 4: 0.95}
"""Stages -> bound of the busy share at depth full."""
CPU_S = 1.1e-3
COMPUTE = (48, 160, 4)
"""About 0.3 ms for forward and backward of a stage."""
LARGE = (704, 1024, 2)
"""About 50 ms for forward and backward."""
FOLDER = Path(__file__).parent

Rounds = list[list[Segment]]
"""Of a variant: rounds -> ranks."""


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    options = _parse_options()
    if len(os.sched_getaffinity(0)) < 2:
        print("benchmarks/overhead cannot run here: it needs two cores")
        return 0
    sections = {"waiting": _ask_waiting, "compute": _ask_compute, "process": _ask_process, "memory": _ask_memory}
    environment = Environment()
    print_sections(sections, options)
    print("Medians (quartiles) of the rounds.\n\n" + environment.describe(f"{options.rounds} rounds"))
    return 0


def _parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__, "one round, short sleeps, and all memory runs in the same processes")
    parser.add_argument("--only", choices=("waiting", "compute", "process", "memory"))
    parser.add_argument("--rounds", type=int, default=7, help="segments of each variant, in turns")
    parser.add_argument("--segment", type=int, default=64, help="microbatches that a segment of waiting stages times")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 4), default=(2, 4), help="of waiting stages")
    parser.add_argument("--messages", type=int, nargs="+", default=(4096, 1 << 20), metavar="BYTES")
    parser.add_argument("--profile", action="store_true", help="print profiles of each rank; times are then useless")
    options = parser.parse_args()
    if options.profile:
        options.rounds, options.segment = 1, 160
    if options.quick:
        options.rounds, options.segment, options.stages, options.messages = 1, 8, (2,), (4096,)
    return options


# -- several processes ------------------------------------------------------------------------------


def _measure(shape: Shape, variants: Sequence[str], options: argparse.Namespace, **more: Any) -> dict[str, Rounds]:
    request = {
        "shape": asdict(shape),
        "variants": list(variants),
        "rounds": options.rounds,
        "segment": options.segment,
        "profile": options.profile,
        "pinned": False,
    }
    rounds_by_variant = run_processes(FOLDER / "variants.py", request | more, shape.stages)
    return {
        name: [[Segment(*rank) for rank in ranks] for ranks in rounds] for name, rounds in rounds_by_variant.items()
    }


def _ask_waiting(options: argparse.Namespace) -> Iterator[str]:
    forward_s, backward_s = (0.0005, 0.001) if options.quick else (0.004, 0.008)
    yield f"### Stages that only wait ({forward_s * 1e3:g} + {backward_s * 1e3:g} ms), m = 8\n"
    yield "| p | message | figure | bound | stages alone | by hand | torch | ours |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for p in options.stages:
        for size in options.messages:
            shape = Shape(p, forward_s=forward_s, backward_s=backward_s, message_bytes=size)
            rounds_by_variant = _measure(shape, ("stages alone", "by hand", TORCH, OURS, DEEP, FULL), options)
            at = f"| {p} | {size / 1024:g} KiB |"
            added = {
                name: [_compute_added_s(ranks, shape) for ranks in rounds_by_variant[name]]
                for name in ("by hand", TORCH, OURS, DEEP)
            }
            half = statistics.median(added[TORCH]) / 2
            alone = rounds_by_variant["stages alone"]
            free = [_find_period_s(ranks) - _find_waits_s(ranks) for ranks in alone]
            yield (
                f"{at} added per microbatch, ms | {_format_ms(half)} | {format_quartiles(free, _format_ms)} | "
                f"{format_quartiles(added['by hand'], _format_ms)} | {format_quartiles(added[TORCH], _format_ms)} | "
                f"{format_quartiles(added[OURS], _format_ms)} |"
            )
            deep = format_quartiles(added[DEEP], _format_ms)
            yield f"{at} the same at depth full, ms | {_format_ms(half)} | | | | {deep} |"
            most, share = (
                [_find_waits_s(ranks) / _find_period_s(ranks) for ranks in rounds]
                for rounds in (alone, rounds_by_variant[FULL])
            )
            yield (
                f"{at} busy share, PipeDream at depth full | {BUSY[p]} | {format_quartiles(most, _format_share)} | | | "
                f"{format_quartiles(share, _format_share)} |"
            )
            cpu = {
                name: format_quartiles([max(rank.cpu_s for rank in ranks) for ranks in rounds], _format_ms)
                for name, rounds in rounds_by_variant.items()
            }
            beside = f"{cpu['stages alone']} | {cpu['by hand']} | {cpu[TORCH]}"
            yield f"{at} CPU of a rank per microbatch, ms | {_format_ms(CPU_S)} | {beside} | {cpu[OURS]} |"
            yield f"{at} the same, PipeDream at depth full, ms | {_format_ms(CPU_S)} | | | | {cpu[FULL]} |"
    yield ""


def _compute_added_s(ranks: list[Segment], shape: Shape) -> float:
    """Returns what a microbatch takes longer than (m + p - 1)(f + b) / m."""
    m = shape.microbatches
    return _find_period_s(ranks) - (m + shape.stages - 1) / m * _find_waits_s(ranks)


def _find_period_s(ranks: list[Segment]) -> float:
    return max(rank.period_s for rank in ranks)


def _find_waits_s(ranks: list[Segment]) -> float:
    return statistics.mean(rank.forward_s + rank.backward_s for rank in ranks)


def _ask_compute(options: argparse.Namespace) -> Iterator[str]:
    shape = Shape(2, compute=COMPUTE)
    names = ("stages alone", "by hand", TORCH, OURS, DEEP, "pipedream, 2BW", FULL)
    rounds_by_variant = _measure(shape, names, options, pinned=True, segment=8 if options.quick else 400)
    alone = statistics.median(_find_period_s(ranks) for ranks in rounds_by_variant["stages alone"])
    yield f"### Stages that compute ({_format_ms(alone)} ms per microbatch), p = 2, m = 8\n"
    yield "| variant | CPU of a rank, ms per step | ms per step | bound, of torch's | of torch's |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, rounds in rounds_by_variant.items():
        steps = [_find_period_s(ranks) * shape.microbatches for ranks in rounds]
        # Round by round: what disturbs the machine for seconds disturbs both.
        ratios = [
            _find_period_s(mine) / _find_period_s(theirs)
            for mine, theirs in zip(rounds, rounds_by_variant[TORCH], strict=True)
        ]
        bound = "0.85" if name in (OURS, DEEP) else ""
        cpu = format_quartiles([max(rank.cpu_s for rank in ranks) * shape.microbatches for ranks in rounds], _format_ms)
        yield format_row(
            (name, cpu, format_quartiles(steps, _format_ms), bound, format_quartiles(ratios, "{:.2f}".format))
        )
    yield ""


def _ask_memory(options: argparse.Namespace) -> Iterator[str]:
    yield "### Memory, p = 2, stages that do nothing\n"
    yield "| variant | rank | rise at m = 8 | at m = 64 | left between minibatch 200 and 2,000: resident | objects |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
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
    rows = [row for batch in batches for row in run_processes(FOLDER / "memory.py", {"runs": batch}, 2, TIGHT_MALLOC)]
    for variant in variants:
        rows_of_variant, rows = rows[: len(shapes)], rows[len(shapes) :]
        for rank, (small, large, lasting) in enumerate(zip(*rows_of_variant, strict=True)):
            rises = (format_mib(part[0]["rise_bytes"]) for part in (small, large))
            left = {name: lasting[1][name] - lasting[0][name] for name in ("resident_bytes", "objects")}
            resident = format_mib(left["resident_bytes"])
            yield format_row((variant, rank, *rises, resident, f"{left['objects']:,}"))
    yield ""


# -- one process ------------------------------------------------------------------------------------


def _ask_process(options: argparse.Namespace) -> Iterator[str]:
    yield "### One process\n"
    yield "| stages | method | plain loop, us | stages by hand, us | ours, us | bound | ours of plain | in CPU time |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    cases = [("two tiny", 2.5, "tiny", 2, method, 10) for method in ("pipedream", "1f1b")]
    if not options.profile:
        cases.append(("one of 50 ms", 1.02, [8, 64, 2] if options.quick else LARGE, 1, "pipedream", 1))
    for name, bound, model, stages, schedule, count in cases:
        request = {
            "model": model,
            "stages": stages,
            "schedule": schedule,
            # Short slices: most of them are disturbed by nothing.
            "slices": 2 if options.quick else 60 * options.rounds // (1 if count > 1 else 8),
            "slice": count,
            "profile": options.profile,
        }
        slices = run_processes(FOLDER / "one_process.py", request)
        times = " | ".join(
            format_quartiles([wall for wall, _ in slices], _format_us) for slices in zip(*slices, strict=True)
        )
        # Slice by slice: what disturbs the machine for seconds disturbs both.
        ratios = (format_quartiles([ours[i] / plain[i] for plain, _, ours in slices], _format_share) for i in range(2))
        yield f"| {name} | {schedule} | {times} | {bound} | {' | '.join(ratios)} |"
    yield ""


# -- what is printed --------------------------------------------------------------------------------


def _format_share(value: float) -> str:
    return f"{value:.3f}"


def _format_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _format_us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


if __name__ == "__main__":
    sys.exit(main())

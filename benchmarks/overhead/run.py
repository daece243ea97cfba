"""The runtime's own cost beside torch's pipelining and the plain loop, in turns within one run.

    python benchmarks/overhead/run.py            # some minutes
    python benchmarks/overhead/run.py --quick    # that it runs, not how fast
    python benchmarks/overhead/run.py --profile  # where each rank's main thread spends CPU time

Needs two cores. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from stages import Shape
from variants import Segment

TORCH, OURS = "torch, Schedule1F1B", "pipedream, 1f1b"
DEEP, FULL = "pipedream, 1f1b, depth full", "pipedream, depth full"
BUSY = {2: 0.97, 4: 0.95}
"""Stages -> bound of the busy share at depth full."""
CPU_S = 1.1e-3
COMPUTE = (48, 160, 4)
"""About 0.3 ms for forward and backward of a stage."""
LARGE = (704, 1024, 2)
"""About 50 ms for forward and backward."""
TIGHT_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that what a process has freed is not counted as its own."""

Rounds = list[list[Segment]]
"""Of a variant: rounds -> ranks."""


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    options = _options()
    if len(os.sched_getaffinity(0)) < 2:
        print("benchmarks/overhead cannot run here: it needs two cores")
        return 0
    sections = {"waiting": _waiting, "compute": _compute, "process": _process, "memory": _memory}
    before, start = os.getloadavg()[0], time.monotonic()
    for name, section in sections.items():
        if options.only in (None, name):
            for line in section(options):
                print(line, flush=True)
    print(_environment(before, time.monotonic() - start, options))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=("waiting", "compute", "process", "memory"))
    parser.add_argument("--rounds", type=int, default=7, help="segments of each variant, in turns")
    parser.add_argument("--segment", type=int, default=64, help="microbatches that a segment of waiting stages times")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 4), default=(2, 4), help="of waiting stages")
    parser.add_argument("--messages", type=int, nargs="+", default=(4096, 1 << 20), metavar="BYTES")
    parser.add_argument("--quick", action="store_true", help="one round, short sleeps")
    parser.add_argument("--profile", action="store_true", help="print profiles of each rank; times are then useless")
    options = parser.parse_args()
    if options.profile:
        options.rounds, options.segment = 1, 160
    if options.quick:
        options.rounds, options.segment, options.stages, options.messages = 1, 8, (2,), (4096,)
    return options


# -- several processes ------------------------------------------------------------------------------


def _launch(
    program: str, asked: dict[str, Any], processes: int = 1, environment: Mapping[str, str] | None = None
) -> Any:
    """Runs a program of this folder in so many processes; returns what rank 0 printed as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank in range(processes):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **(environment or {}),
            }
            command = (sys.executable, str(Path(__file__).with_name(program)), json.dumps(asked))
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            workers.append(subprocess.Popen(command, env=os.environ | variables, stdout=output, text=True))
        text = workers[0].communicate()[0]
        if any(statuses := [worker.wait(timeout=60) for worker in workers]):
            raise SystemExit(f"the workers ended with {statuses}")
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    return json.loads(text.splitlines()[-1])


def _measured(shape: Shape, variants: Sequence[str], options: argparse.Namespace, **more: Any) -> dict[str, Rounds]:
    asked = {
        "shape": asdict(shape),
        "variants": list(variants),
        "rounds": options.rounds,
        "segment": options.segment,
        "profile": options.profile,
        "pinned": False,
    }
    found = _launch("worker.py", asked | more, shape.stages)
    return {name: [[Segment(*rank) for rank in ranks] for ranks in rounds] for name, rounds in found.items()}


def _waiting(options: argparse.Namespace) -> Iterator[str]:
    forward_s, backward_s = (0.0005, 0.001) if options.quick else (0.004, 0.008)
    yield f"### Stages that only wait ({forward_s * 1e3:g} + {backward_s * 1e3:g} ms), m = 8\n"
    yield "| p | message | figure | bound | stages alone | by hand | torch | ours |"
    yield "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for p in options.stages:
        for size in options.messages:
            shape = Shape(p, forward_s=forward_s, backward_s=backward_s, message_bytes=size)
            found = _measured(shape, ("stages alone", "by hand", TORCH, OURS, DEEP, FULL), options)
            at = f"| {p} | {size / 1024:g} KiB |"
            added = {name: [_added_s(ranks, shape) for ranks in found[name]] for name in ("by hand", TORCH, OURS, DEEP)}
            half = statistics.median(added[TORCH]) / 2
            alone = found["stages alone"]
            free = [_period_s(ranks) - _waits_s(ranks) for ranks in alone]
            yield (
                f"{at} added per microbatch, ms | {_ms(half)} | {_quartiles(free, _ms)} | "
                f"{_quartiles(added['by hand'], _ms)} | {_quartiles(added[TORCH], _ms)} | "
                f"{_quartiles(added[OURS], _ms)} |"
            )
            yield f"{at} the same at depth full, ms | {_ms(half)} | | | | {_quartiles(added[DEEP], _ms)} |"
            most, share = ([_waits_s(ranks) / _period_s(ranks) for ranks in rounds] for rounds in (alone, found[FULL]))
            yield (
                f"{at} busy share, PipeDream at depth full | {BUSY[p]} | {_quartiles(most, _share)} | | | "
                f"{_quartiles(share, _share)} |"
            )
            cpu = {
                name: _quartiles([max(rank.cpu_s for rank in ranks) for ranks in rounds], _ms)
                for name, rounds in found.items()
            }
            beside = f"{cpu['stages alone']} | {cpu['by hand']} | {cpu[TORCH]}"
            yield f"{at} CPU of a rank per microbatch, ms | {_ms(CPU_S)} | {beside} | {cpu[OURS]} |"
            yield f"{at} the same, PipeDream at depth full, ms | {_ms(CPU_S)} | | | | {cpu[FULL]} |"
    yield ""


def _added_s(ranks: list[Segment], shape: Shape) -> float:
    """Returns what a microbatch takes longer than (m + p - 1)(f + b) / m."""
    m = shape.microbatches
    return _period_s(ranks) - (m + shape.stages - 1) / m * _waits_s(ranks)


def _period_s(ranks: list[Segment]) -> float:
    return max(rank.period_s for rank in ranks)


def _waits_s(ranks: list[Segment]) -> float:
    return statistics.mean(rank.forward_s + rank.backward_s for rank in ranks)


def _compute(options: argparse.Namespace) -> Iterator[str]:
    shape = Shape(2, compute=COMPUTE)
    names = ("stages alone", "by hand", TORCH, OURS, DEEP, "pipedream, 2BW", FULL)
    found = _measured(shape, names, options, pinned=True, segment=8 if options.quick else 400)
    alone = statistics.median(_period_s(ranks) for ranks in found["stages alone"])
    yield f"### Stages that compute ({_ms(alone)} ms per microbatch), p = 2, m = 8\n"
    yield "| variant | CPU of a rank, ms per step | ms per step | bound, of torch's | of torch's |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, rounds in found.items():
        steps = [_period_s(ranks) * shape.microbatches for ranks in rounds]
        # Round by round: what disturbs the machine for seconds disturbs both.
        ratios = [_period_s(mine) / _period_s(theirs) for mine, theirs in zip(rounds, found[TORCH], strict=True)]
        bound = "0.85" if name in (OURS, DEEP) else ""
        cpu = _quartiles([max(rank.cpu_s for rank in ranks) * shape.microbatches for ranks in rounds], _ms)
        yield f"| {name} | {cpu} | {_quartiles(steps, _ms)} | {bound} | {_quartiles(ratios, '{:.2f}'.format)} |"
    yield ""


def _memory(options: argparse.Namespace) -> Iterator[str]:
    yield "### Memory, p = 2, stages that do nothing\n"
    yield "| variant | rank | rise at m = 8 | at m = 64 | left between minibatch 200 and 2,000: resident | objects |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    few, many = (4, 8) if options.quick else (200, 2000)
    for variant in ("torch", "1f1b", "pipedream"):
        runs = []
        for shape, parts in (
            (Shape(2, 8, 0.0, 0.0, 1 << 20), (20,)),
            (Shape(2, 64, 0.0, 0.0, 1 << 20), (20,)),
            (Shape(2, 8, 0.0, 0.0), (few, many - few)),
        ):
            asked = {"shape": asdict(shape), "variant": variant, "parts": parts}
            runs.append(_launch("memory.py", asked, 2, TIGHT_MALLOC))
        for rank, (small, large, lasting) in enumerate(zip(*runs, strict=True)):
            rises = (_mib(part[0]["rise_bytes"]) for part in (small, large))
            left = {name: lasting[1][name] - lasting[0][name] for name in ("resident_bytes", "objects")}
            yield f"| {variant} | {rank} | {' | '.join(rises)} | {_mib(left['resident_bytes'])} | {left['objects']:,} |"
    yield ""


# -- one process ------------------------------------------------------------------------------------


def _process(options: argparse.Namespace) -> Iterator[str]:
    yield "### One process\n"
    yield "| stages | method | plain loop, us | stages by hand, us | ours, us | bound | ours of plain | in CPU time |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    cases = [("two tiny", 2.5, "tiny", 2, method, 10) for method in ("pipedream", "1f1b")]
    if not options.profile:
        cases.append(("one of 50 ms", 1.02, [8, 64, 2] if options.quick else LARGE, 1, "pipedream", 1))
    for name, bound, model, stages, schedule, count in cases:
        asked = {
            "model": model,
            "stages": stages,
            "schedule": schedule,
            # Short slices: most of them are disturbed by nothing.
            "slices": 2 if options.quick else 60 * options.rounds // (1 if count > 1 else 8),
            "slice": count,
            "profile": options.profile,
        }
        found = _launch("one_process.py", asked)
        times = " | ".join(_quartiles([wall for wall, _ in slices], _us) for slices in zip(*found, strict=True))
        # Slice by slice: what disturbs the machine for seconds disturbs both.
        ratios = (_quartiles([ours[i] / plain[i] for plain, _, ours in found], _share) for i in range(2))
        yield f"| {name} | {schedule} | {times} | {bound} | {' | '.join(ratios)} |"
    yield ""


# -- what is printed --------------------------------------------------------------------------------


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _share(value: float) -> str:
    return f"{value:.3f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _quartiles(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Returns the median, and the quartiles in parentheses."""
    if len(values) < 2:
        return text(values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{text(middle)} ({text(low)} to {text(high)})"


def _environment(load: float, seconds: float, options: argparse.Namespace) -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return "\n".join(
        (
            "Medians (quartiles) of the rounds.",
            "",
            f"- {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes, {options.rounds} rounds",
            f"- {len(os.sched_getaffinity(0))} cores of {cpu}, Linux {platform.release()}, Python "
            f"{platform.python_version()}, torch {torch.__version__}",
            f"- load average {load:.2f} before the run, {os.getloadavg()[0]:.2f} at its end",
            f"- command: python {' '.join(sys.argv)}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())

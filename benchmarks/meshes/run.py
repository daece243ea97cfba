"""Meshes beside torch's own parallel modules: seconds, bytes, bytes of a stash, forms of experts.

    python benchmarks/meshes/run.py               # some minutes
    python benchmarks/meshes/run.py --only data   # one question
    python benchmarks/meshes/run.py --quick       # that it runs, not how fast

Needs two cores. Prints the table of README.md.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TIGHT_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""So that what a process has freed is not counted as its own."""
SHAPE = {"width": 512, "blocks": 2, "batch": 8, "length": 256}
SMALL = {"width": 128, "blocks": 2, "batch": 4, "length": 16}
EXPERTS = {"groups": 4, "tokens": 1024, "d_model": 512, "d_ff": 2048, "experts": 8}
"""Tokens are those of a group."""

Rounds = list[list[float]]
"""Rounds -> wall seconds, CPU seconds."""


@dataclass(frozen=True)
class Row:
    """One figure: what the paper says of it, what follows for this case, what was found."""

    figure: str
    paper: str
    predicted: str
    measured: str
    met: bool | None = None

    def __str__(self) -> str:
        end = "" if self.met is None else " met" if self.met else " **not met**"
        return f"| {self.figure} | {self.paper} | {self.predicted} | {self.measured}{end} |"


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    options = _options()
    if len(os.sched_getaffinity(0)) < 2:
        print("benchmarks/meshes cannot run here: it needs two cores")
        return 0
    questions: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
        "model": _model,
        "data": _data,
        "stash": _stash,
        "experts": _experts,
    }
    before, start = os.getloadavg()[0], time.monotonic()
    print("| figure | paper | predicted | measured |\n| --- | --- | --- | --- |")
    for name, question in questions.items():
        if options.only in (None, name):
            for row in question(options):
                print(row, flush=True)
    print(_environment(before, time.monotonic() - start, options))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=("model", "data", "stash", "experts"))
    parser.add_argument("--rounds", type=int, default=5, help="segments of each variant, in turns")
    parser.add_argument("--minibatches", type=int, default=2, help="of a segment")
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.minibatches = 1, 1
    return options


def _model(options: argparse.Namespace) -> Iterator[Row]:
    found = _times("model", options)
    yield from _beside("tensor parallelism, of `parallelize_module`", found["rounds"], "torch", 1.05)
    counts = found["collectives"]
    predicted = f"{4 * SHAPE['blocks']} all-reduces"
    words = "; ".join(f"{name}: {_counted(counts[name])}" for name in ("ours", "torch"))
    yield Row("collectives of a minibatch", "4 all-reduces a block (Megatron-LM, 3)", predicted, words)
    yield from _peaks("model", None, options)


def _data(options: argparse.Namespace) -> Iterator[Row]:
    found = _times("data", options)
    yield from _beside("`shard_weights`, of `fully_shard`", found["rounds"], "torch", 1.10)
    counts = found["collectives"]
    units = SHAPE["blocks"] + 1  # the root has the rest
    predicted = f"{2 * units} all-gathers, {units} reduce-scatters, if one is made for each block"
    words = "; ".join(f"{name}: {_counted(counts[name])}" for name in ("ours", "torch"))
    yield Row("collectives of a minibatch", "2 gathers, 1 scatter a weight (ZeRO, 7.2.2)", predicted, words)
    yield from _peaks("data", 1.05, options)


def _times(question: str, options: argparse.Namespace) -> dict[str, Any]:
    asked = {"do": "times", "question": question, "rounds": options.rounds, "minibatches": options.minibatches}
    found: dict[str, Any] = _launch(asked | {"shape": SMALL if options.quick else SHAPE}, 2)
    return found


def _beside(what: str, rounds: Mapping[str, Rounds], other: str, bound: float) -> Iterator[Row]:
    """Our seconds over the other's, round by round: what disturbs the machine for seconds disturbs both."""
    for at, kind in enumerate(("CPU seconds", "wall seconds")):
        ratios = [mine[at] / theirs[at] for mine, theirs in zip(rounds["ours"], rounds[other], strict=True)]
        middle = statistics.median(one[at] for one in rounds["ours"])
        text = f"{_quartiles(ratios)}; ours {middle * 1e3:.0f} ms"
        met = statistics.median(ratios) <= bound if at == 0 else None
        yield Row(f"{kind} of {what}", "", f"at most {bound:.2f}" if at == 0 else "", text, met)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"


def _peaks(question: str, bound: float | None, options: argparse.Namespace) -> Iterator[Row]:
    asked = {"do": "memory", "question": question, "shape": SMALL if options.quick else SHAPE}
    peaks: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(1 if options.quick else 2):
        for name, found in peaks.items():
            found.append(_launch(asked | {"trainer": name}, 2, TIGHT_MALLOC))
    ours, torchs = (statistics.median(peaks[name]) for name in ("ours", "torch"))
    spread = max(max(found) / min(found) for found in peaks.values()) - 1
    text = f"{ours / torchs:.2f}; ours {_mib(ours)}, torch's {_mib(torchs)}, spread {spread:.1%}"
    met = None if bound is None else ours <= bound * torchs
    yield Row("peak of resident bytes, of torch's", "", "" if bound is None else f"at most {bound:.2f}", text, met)


def _stash(options: argparse.Namespace) -> Iterator[Row]:
    def stashed(mesh: str, ranks: int, rules: str = "", shard_weights: str = "") -> int:
        asked = {
            "do": "stash",
            "mesh": mesh,
            "rules": rules,
            "shard_weights": shard_weights,
            "shape": SMALL | {"blocks": 2},
        }
        return int(_launch(asked, ranks))

    one = stashed("-/-", 2)
    for mesh, size, rules, shard_weights in (
        ("model:2/-", 2, "heads:model, d_ff:model", ""),
        ("data:2/-", 2, "batch:data", "data"),
        ("data:4/-", 4, "batch:data", "data"),
    ):
        bytes_ = stashed(mesh, size + 1, rules, shard_weights)
        how = f"cut by `{rules}`" if not shard_weights else "sharded"
        share = bytes_ / one
        yield Row(
            f"stash of a rank of {size}, {how}, of one rank's",
            "weights over n (ZeRO, 5.3)" if shard_weights else "weights over n (Mesh-TensorFlow, 4)",
            f"{1 / size:.3f}, within 10%",
            f"{share:.3f}; {bytes_:,} of {one:,} bytes",
            abs(share * size - 1) <= 0.1,
        )


def _experts(options: argparse.Namespace) -> Iterator[Row]:
    asked = {"do": "experts", "rounds": options.rounds, "minibatches": 1} | EXPERTS
    rounds = _launch(asked, 1)["rounds"]
    flops = 1 + EXPERTS["tokens"] / EXPERTS["d_ff"]
    for at, kind in enumerate(("CPU second", "second")):
        ratios = [dense[at] / ours[at] for dense, ours in zip(rounds["dense"], rounds["sorted"], strict=True)]
        tokens = EXPERTS["groups"] * EXPERTS["tokens"] / statistics.median(one[at] for one in rounds["sorted"])
        yield Row(
            f"tokens per {kind} of sorted experts, of the dense form's",
            "dense: GShard's einsums (2.2)",
            f"at least 1.8 ({flops:.2f} by the products if all places are filled)" if at == 0 else "",
            f"{_quartiles(ratios)}; {tokens:,.0f} tokens",
            statistics.median(ratios) >= 1.8 if at == 0 else None,
        )


def _launch(asked: dict[str, Any], processes: int, environment: Mapping[str, str] | None = None) -> Any:
    """Runs worker.py in so many processes; returns what rank 0 printed as JSON."""
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
            command = (sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(asked))
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


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _quartiles(values: list[float]) -> str:
    """Returns the median, and the quartiles in parentheses."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _environment(load: float, seconds: float, options: argparse.Namespace) -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return "\n".join(
        (
            "",
            f"- {time.strftime('%Y-%m-%d')}, {seconds / 60:.1f} minutes, {options.rounds} rounds of "
            f"{options.minibatches} minibatches",
            f"- {len(os.sched_getaffinity(0))} cores of {cpu}, Linux {platform.release()}, Python "
            f"{platform.python_version()}, torch {torch.__version__}",
            f"- load average {load:.2f} before the run, {os.getloadavg()[0]:.2f} at its end",
            f"- command: python {' '.join(sys.argv)}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())

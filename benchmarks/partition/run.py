"""Tofu's partition beside its baselines: elements and bytes, predicted and real seconds of a step, seconds of search.

    python benchmarks/partition/run.py                  # half an hour
    python benchmarks/partition/run.py --only seconds   # one of search, bytes, seconds
    python benchmarks/partition/run.py --quick          # that it runs

The seconds of a step need two cores and network namespaces. Prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from models import COUNTED, PUBLISHED, SCALE, SQUARE, TIMED, Model

from pipedream import partition
from pipedream.core.errors import PlanError
from pipedream.layouts import METHODS, PartitionedStep, SimulatedRanks
from pipedream.slow_links import slow_network, why_not

sys.path.append(str(Path(__file__).parents[1]))
from worker_processes import Workers, cores_busy_s, worker_processes

SEARCH_S = {"WResNet-152, widened 10 times": 8.3, "RNN, 10 layers, 20 time steps, 4096 units": 66.6}
"""Published, on 8 ranks (EuroSys 2019, section 7)."""

EXPECTED = {
    (512, 8192): {2: 25_165_824, 4: 58_720_256, 8: 109_051_904},
    (4096, 4096): {2: 100_663_296, 4: 218_103_808, 8: 360_710_144},
    (8192, 1024): {2: 8_388_608, 4: 25_165_824, 8: 58_720_256},
}
"""Elements that the recursion moves by the published costs, from another implementation: batch, width -> ranks."""

SLOW_METHODS = ("recursive", "data", "all-row", "model")
"""Whose steps are timed."""

LINK_BYTES = (400_000, 2_400_000)
"""Sizes of the exchanges by which a link is measured; both are far larger than what a link sends at once."""


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    options = _options()
    torch.set_num_threads(1)
    before, start = os.getloadavg()[0], time.monotonic()
    for name, question in {"search": _search, "bytes": _bytes, "seconds": _seconds}.items():
        if options.only in (None, name):
            for line in question(options):
                print(line, flush=True)
            print()
    print(_environment(before, time.monotonic() - start))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=("search", "bytes", "seconds"))
    parser.add_argument("--rate", type=float, default=25e6, help="of a link, in bytes per second")
    parser.add_argument("--rounds", type=int, default=7, help="steps that are timed")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for other processes to end")
    parser.add_argument("--quick", action="store_true", help="few steps, few models")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.patience = 2, 0.0
    return options


def _first(models: dict[str, Model], options: argparse.Namespace) -> Iterator[tuple[str, Model]]:
    yield from list(models.items())[: 1 if options.quick else None]


def _search(options: argparse.Namespace) -> Iterator[str]:
    yield "| search on 8 ranks | operators | published | measured, recursive | data | tracing |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, model in _first(PUBLISHED, options):
        began = time.perf_counter()
        operators = model.traced("meta", updates=True)[2].operators
        traced_s = time.perf_counter() - began
        found: dict[str, list[float]] = {"recursive": [], "data": []}
        for _ in range(1 if options.quick else 3):
            for method, seconds in found.items():
                began = time.perf_counter()
                partition(operators, 8, method, batch="x0")
                seconds.append(time.perf_counter() - began)
        cells = [f"{statistics.median(one):.1f} s ({min(one):.1f} to {max(one):.1f})" for one in found.values()]
        yield (
            f"| {name} | {len(operators.steps):,} | {SEARCH_S[name]} s | {cells[0]} | {cells[1]} | {traced_s:.0f} s |"
        )


def _bytes(options: argparse.Namespace) -> Iterator[str]:
    yield "| model | ranks | method | elements expected | moved | bytes predicted | bytes sent | of recursive |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for name, model in _first(COUNTED, options):
        module, sample, step = model.traced()
        sizes = next((one for one in SQUARE if f"{one[0]} x {one[1]}" in name), None)
        larger = SCALE**2 if sizes else 1
        values = {step.parameters[key]: one.detach() for key, one in module.named_parameters()}
        values |= {step.buffers[key]: one for key, one in module.named_buffers()} | {step.inputs[0]: sample}
        values |= {tensor: torch.randn(step.operators.tensors[tensor]) for tensor in step.tangents}
        made = {*step.gradients.values(), *step.input_gradients, *step.updated.values(), *step.outputs}
        for count in (2, 4, 8):
            least = 0
            for method in METHODS:
                try:
                    found = partition(step.operators, count, method, batch="x0")
                except PlanError:
                    yield f"| {name} | {count} | {method} | | too large to search | | | |"
                    continue
                ranks = SimulatedRanks(count)
                run = PartitionedStep(step, found, ranks)
                run.run({key: run.part(key, one) for key, one in values.items()}, made)
                least = least or ranks.sent_bytes
                expected = EXPECTED[sizes][count] if sizes and method == "recursive" else None
                cells = (
                    "" if expected is None else f"{expected:,}",
                    f"{larger * found.elements:,}",
                    f"{larger * run.sent_bytes:,}",
                    f"{larger * ranks.sent_bytes:,}",
                    f"{ranks.sent_bytes / least:.2f}",
                )
                yield f"| {name} | {count} | {method} | {' | '.join(cells)} |"


def _seconds(options: argparse.Namespace) -> Iterator[str]:
    if (reason := why_not()) is not None:
        yield f"The seconds of a step cannot be measured here: {reason}"
        return
    cores, errors = len(os.sched_getaffinity(0)), []
    yield (
        "| model | ranks | method | exchanges | bytes sent | alone | exchanging | predicted | measured | error "
        "| of recursive | others |"
    )
    yield f"| --- | ---: | --- |{' ---: |' * 9}"
    for count in (2, 4):
        with (
            slow_network((count,), (options.rate,)) as network,
            worker_processes(network, count, str(Path(__file__).with_name("worker.py"))) as workers,
        ):
            link = _link(workers)
            print(f"{count} ranks: {link[0] * 1e-6:.2f} MB/s, latency {link[1] * 1e3:.2f} ms", file=sys.stderr)
            for name, _ in _first(TIMED, options):
                least = 0.0
                for method in SLOW_METHODS:
                    found, others = _asked(workers, options, {"model": name, "method": method, "link": link})
                    alone_s = statistics.median(found["alone_s"]) * max(1.0, count / cores)
                    measured_s = statistics.median(found["together_s"])
                    predicted_s = alone_s + found["exchange_s"]
                    errors.append(predicted_s / measured_s - 1)
                    least = least or measured_s
                    sent = f"{found['sent_bytes']:,}"
                    if found["sent_bytes"] != found["predicted_bytes"]:
                        sent += f" (predicted {found['predicted_bytes']:,})"
                    low, high = min(found["together_s"]), max(found["together_s"])
                    cells = (
                        f"{found['exchanges']} | {sent} | {alone_s * 1e3:.0f} ms | {found['exchange_s'] * 1e3:.0f} ms",
                        f"{predicted_s * 1e3:.0f} ms | {measured_s * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f})",
                        f"{errors[-1]:+.1%} | {measured_s / least:.2f} | {others:.0%}",
                    )
                    yield f"| {name} | {count} | {method} | {' | '.join(cells)} |"
    sizes = sorted(map(abs, errors))
    yield f"\nMedian error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, of {len(sizes)} steps."


def _link(workers: Workers) -> tuple[float, float]:
    """Returns bytes per second and latency of an exchange between all ranks."""
    small_s, large_s = workers.asked({"do": "link", "sizes": LINK_BYTES, "times": 20})
    bytes_per_s = (LINK_BYTES[1] - LINK_BYTES[0]) / (large_s - small_s)
    return bytes_per_s, max(0.0, small_s - LINK_BYTES[0] / bytes_per_s)


def _asked(workers: Workers, options: argparse.Namespace, case: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Returns the least disturbed of several answers, and the share of the cores that others took meanwhile."""
    cores, until = len(os.sched_getaffinity(0)), time.monotonic() + options.patience
    tries: list[tuple[float, dict[str, Any]]] = []
    while not tries or (min(share for share, _ in tries) > 0.05 and time.monotonic() < until):
        busy_s, own_s, began = cores_busy_s(), workers.cpu_s(), time.monotonic()
        found = workers.asked({"do": "step", "rounds": options.rounds, **case})
        others_s = (cores_busy_s() - busy_s) - (workers.cpu_s() - own_s)
        tries.append((max(0.0, others_s / cores / (time.monotonic() - began)), found))
    share, found = min(tries, key=lambda one: one[0])
    return found, share


def _environment(before: float, seconds: float) -> str:
    lines: Sequence[str] = ()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"- {time.strftime('%Y-%m-%d')}, {seconds / 60:.1f} minutes, load average {before:.2f} before the run\n"
        f"- {os.cpu_count()} cores of {cpu}, Linux {platform.release()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}\n- command: python {' '.join(sys.argv)}"
    )


if __name__ == "__main__":
    sys.exit(main())
